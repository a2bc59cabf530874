#include "allocator/pool/block_pool.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace xpyd::allocator {

constinit bool BlockPool::poison_by_default = std::string_view(XPYD_BUILD_MODE) != "release";

BlockPool::BlockPool(KvPlaces places, bool prefix_cache, uint64_t hash_mask, int proof_tokens, bool radix)
    : KvPool(places, size_t(places.whole.block_tokens) * places.token_bytes()),
      blocks_(size_t(n_blocks_) * sizeof(Block)),
      free_(n_blocks_) {
  static_assert(sizeof(Block) == 32);
  for (int32_t b = 0; b < n_blocks_; ++b) at(b) = {{}, {}, -1, -1};
  if (prefix_cache && radix)
    index_ = std::make_unique<RadixTree>(n_blocks_, block_tokens_, &at(0).node, sizeof(Block),
                                         [this](int32_t block) { lost(block); });
  else if (prefix_cache)
    index_ = std::make_unique<PrefixIndex>(n_blocks_, block_tokens_, hash_mask, proof_tokens, &at(0).node,
                                           sizeof(Block));
  users_at(&at(0).users, sizeof(Block));
}

void BlockPool::end_use(int32_t block) {
  if (!cached(block)) return free_.release(block);
  Block& b = at(block);
  b.older = newest_, b.newer = -1;
  (newest_ < 0 ? oldest_ : at(newest_).newer) = block;
  newest_ = block;
  ++n_cached_;
}

void BlockPool::unlist(int32_t block) {
  const int32_t newer = at(block).newer, older = at(block).older;
  (older < 0 ? oldest_ : at(older).newer) = newer;
  (newer < 0 ? newest_ : at(newer).older) = older;
  --n_cached_;
}

void BlockPool::lost(int32_t block) {
  if (at(block).users.any()) return;
  unlist(block);
  free_.release(block);
}

void BlockPool::evict(int32_t block) {
  unlist(block);
  index_->evict(block);
  free_.release(block);
}

bool BlockPool::reserve(int n) {
  Lock lock(mutex_);
  if (n > 0 && n > spare()) return false;
  reserved_ += n;
  return true;
}

bool BlockPool::allocate(int n, std::vector<int32_t>& out, int64_t& evictions, int drawn) {
  const size_t first = out.size(), end = first + size_t(n);
  {
    Lock lock(mutex_);
    if (n - drawn > spare()) return false;
    free_.claim(end - out.size(), out);
    while (out.size() < end) {
      const int before = n_cached_;
      evict(oldest_);  // with all that continues it in a tree
      evictions += before - n_cached_;
      free_.claim(end - out.size(), out);
    }
    reserved_ -= drawn;
    for (size_t i = first; i < end; ++i) {
      filled_[size_t(out[i])] = 0;
      add_reference(out[i]);
    }
  }
  if (poison_)
    for (size_t i = first; i < end; ++i) poison(out[i]);
  return true;
}

int BlockPool::indexed_tokens(int32_t block) const {
  Lock lock(mutex_);
  return index_ ? index_->tokens_in(block) : 0;
}

int BlockPool::match(std::span<const int32_t> tokens, uint64_t salt, int max_tokens) const {
  if (!index_) return 0;
  PrefixChain chain{.hash = salt};
  return index_->match(tokens, max_tokens, chain, locked(), [](std::span<const int32_t>) {});
}

int BlockPool::acquire(std::span<const int32_t> tokens, uint64_t salt, int max_tokens, std::vector<int32_t>& out,
                       PrefixChain& chain) {
  chain = PrefixChain{.hash = salt};
  if (!index_) return 0;
  locked()([&] {
    if (reserved_ > 0) max_tokens = std::min(max_tokens, spare() * block_tokens_);
  });
  return index_->match(tokens, max_tokens, chain, locked(), [&](std::span<const int32_t> blocks) {
    for (int32_t block : blocks) add_reference(block);  // keeps the next batch's chain intact
    out.insert(out.end(), blocks.begin(), blocks.end());
  });
}

void BlockPool::insert(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain) {
  if (index_ && int(tokens.size()) >= index_->grain) index_->insert(tokens, blocks, chain, locked());
}

void BlockPool::tell(std::shared_ptr<CacheListener> listener) {
  if (index_) index_->tell(std::move(listener));
}

void BlockPool::clear_prefix_cache() {
  Lock lock(mutex_);
  while (oldest_ >= 0) evict(oldest_);
}

KvStats BlockPool::stats() const {
  Lock lock(mutex_);
  KvStats stats = count();
  stats.reserved_blocks = reserved_;
  stats.mappings = int(places_.ranks.size());
  return stats;
}

void BlockPool::check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                                 bool complete) const {
  Lock lock(mutex_);
  check_uses(references, leases, complete);
  std::vector<char> in_lru(size_t(n_blocks_), 0), held(size_t(n_blocks_), 0);
  for (int32_t b = oldest_, before = -1; b >= 0 || before != newest_; before = b, b = at(b).newer)
    XPYD_CHECK(b >= 0 && b < n_blocks_ && !in_lru[size_t(b)]++ && at(b).older == before, "LRU list");
  for (int32_t b = 0; b < n_blocks_; ++b) {
    const bool used = at(b).users.any();
    held[size_t(b)] = used || cached(b);
    XPYD_CHECK(bool(in_lru[size_t(b)]) == (!used && cached(b)), "block " + std::to_string(b));
    if (cached(b)) XPYD_CHECK(filled(b) >= index_->tokens_in(b), "block " + std::to_string(b));
  }
  XPYD_CHECK(reserved_ >= 0 && (!complete || spare() >= 0), "more blocks are reserved than the pool has");
  free_.check_invariants(held);
  if (index_) index_->check_invariants();
}

void BlockPool::poison(int32_t block) {  // all ones is NaN in every float format
  for (const auto& [l, memory] : places_.ranks) {
    size_t bytes = size_t(l.block_tokens) * l.token_stride();
    int planes = l.order == KvOrder::layer_major ? 2 * l.shape.n_layers : 1;
    for (int p = 0; p < planes; ++p) std::memset(memory.get() + l.offset(block, p / 2, p % 2, 0, 0), 0xff, bytes);
  }
}

size_t BlockPool::metadata_bytes(const KvLayout& layout, bool prefix_cache) {
  const size_t in_free_list = sizeof(int32_t), filled = sizeof(int32_t);
  return size_t(layout.n_blocks) * (sizeof(Block) + in_free_list + filled) +
         (prefix_cache ? PrefixIndex::metadata_bytes(layout.n_blocks, layout.block_tokens) : 0);
}

}  // namespace xpyd::allocator
