#include "allocator/kv_pool.h"

#include <algorithm>
#include <string>
#include <utility>

namespace xpyd {

KvPool::KvPool(KvPlaces places, size_t block_bytes)
    : places_(std::move(places)),
      n_blocks_(places_.whole.n_blocks),
      block_tokens_(places_.whole.block_tokens),
      block_bytes_(block_bytes),
      filled_(size_t(n_blocks_), 0) {
  XPYD_CHECK(n_blocks_ > 0 && block_tokens_ > 0);
}

void KvPool::add_written(std::span<const int32_t> blocks, int from, int n) {
  const int end = from + n;
  for (int token = from; token < end;) {
    const int block = token / block_tokens_, stop = std::min(end, (block + 1) * block_tokens_);
    std::atomic_ref(filled_[size_t(blocks[size_t(block)])])
        .store(stop - block * block_tokens_, std::memory_order_relaxed);
    token = stop;
  }
  written_outside_.fetch_add(n, std::memory_order_relaxed);
}

void KvPool::set_written(std::span<const int32_t> blocks, int n) {
  Lock lock(mutex_);
  for (int i = 0; i < int(blocks.size()); ++i) {
    const int32_t block = blocks[size_t(i)];
    const int tokens = std::clamp(n - i * block_tokens_, 0, block_tokens_);
    if (in_use(block)) written_ += tokens - filled(block);
    filled_[size_t(block)] = tokens;
  }
}

KvStats KvPool::new_stats() const {
  KvStats stats;
  stats.capacity = n_blocks_;
  stats.block_tokens = block_tokens_;
  stats.written_bytes = (written_ + written_outside_.load(std::memory_order_relaxed)) * int64_t(places_.token_bytes());
  return stats;
}

void KvPool::check_written(bool complete) const {
  int64_t written = 0;
  for (int32_t block = 0; block < n_blocks_; ++block) {
    const int tokens = filled(block);
    XPYD_CHECK(tokens >= 0 && tokens <= block_tokens_, "block " + std::to_string(block));
    if (in_use(block)) written += tokens;
  }
  if (complete) XPYD_CHECK(written == written_ + written_outside_.load());
}

}  // namespace xpyd
