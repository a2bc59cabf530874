#include "disagg/cache_view.h"

#include "allocator/prefix_index.h"

namespace xpyd::disagg {

std::span<const uint64_t> PromptHashes::of(int block_tokens) {
  auto [at, fresh] = hashes_.try_emplace(block_tokens);
  if (fresh && !tokens_.empty()) at->second = prefix_hashes(tokens_.first(tokens_.size() - 1), block_tokens, salt_);
  return at->second;
}

void CacheView::heard(const CacheReport& report) {
  for (uint64_t hash : report.removed) known_.erase(hash);
  for (uint64_t hash : report.stored)
    if (known_.size() < capacity_) known_.insert(hash);
}

int CacheView::promise(PromptHashes& prompt, int block_tokens) const {
  if (known_.empty()) return 0;
  int blocks = 0;
  for (uint64_t hash : prompt.of(block_tokens)) {
    if (!known_.contains(hash)) break;
    ++blocks;
  }
  return blocks * block_tokens;
}

}  // namespace xpyd::disagg
