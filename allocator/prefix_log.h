// PrefixLog: which blocks a pool's prefix index came to find, and which it lost, for somebody who is too far away to
// ask it: a conductor that places requests by what its workers' caches hold (Dynamo's KV events, Mooncake's conductor).
// Blocks are named by their chained hash (prefix_index.h).
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace xpyd::allocator {

struct PrefixChanges {
  std::vector<uint64_t> stored, removed;
  bool empty() const { return stored.empty() && removed.empty(); }
};

class PrefixLog {
 public:
  void stored(uint64_t hash) { note(hash, 1); }
  void removed(uint64_t hash) { note(hash, -1); }
  // Since the last call; what came and went in between is left out.
  PrefixChanges take() {
    PrefixChanges changes;
    std::lock_guard lock(mutex_);
    for (const auto& [hash, by] : pending_) (by > 0 ? changes.stored : changes.removed).push_back(hash);
    pending_.clear();
    return changes;
  }

 private:
  void note(uint64_t hash, int by) {
    std::lock_guard lock(mutex_);
    auto at = pending_.try_emplace(hash, 0).first;
    if ((at->second += by) == 0) pending_.erase(at);
  }

  std::mutex mutex_;
  std::unordered_map<uint64_t, int> pending_;  // how much more often it is there; never 0
};

}  // namespace xpyd::allocator
