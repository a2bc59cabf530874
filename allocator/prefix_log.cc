#include "allocator/prefix_log.h"

namespace xpyd::allocator {

void PrefixLog::note(uint64_t hash, int by) {
  std::lock_guard lock(mutex_);
  auto at = pending_.try_emplace(hash, 0).first;
  if ((at->second += by) == 0) pending_.erase(at);
}

PrefixChanges PrefixLog::take() {
  PrefixChanges changes;
  std::lock_guard lock(mutex_);
  for (const auto& [hash, by] : pending_) (by > 0 ? changes.stored : changes.removed).push_back(hash);
  pending_.clear();
  return changes;
}

}  // namespace xpyd::allocator
