#include "allocator/block_pool.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace xpyd {

BlockPool::BlockPool(KvPlaces places, bool prefix_cache, uint64_t hash_mask)
    : BlockPool(places, prefix_cache, make_free_list(places.whole.n_blocks), hash_mask) {}

BlockPool::BlockPool(KvPlaces places, bool prefix_cache, std::unique_ptr<BlockSource> source, uint64_t hash_mask)
    : KvPool(places, size_t(places.whole.block_tokens) * places.token_bytes()),
      blocks_(size_t(n_blocks_) * sizeof(Block)),
      source_(std::move(source)),
      share_(source_->share()),
      poison_(std::string_view(XPYD_BUILD_MODE) != "release") {
  static_assert(sizeof(Block) == 32);
  for (int32_t b = 0; b < n_blocks_; ++b) at(b) = {{}, 0, 0, 0, -1, -1};
  if (prefix_cache)
    index_ = std::make_unique<PrefixIndex>(n_blocks_, block_tokens_, hash_mask, &at(0).node, sizeof(Block));
  count_[kFree] = n_blocks_;
}

size_t BlockPool::metadata_bytes(const KvLayout& layout, bool prefix_cache) {
  const size_t in_free_list = sizeof(int32_t), filled = sizeof(int32_t);
  size_t bytes = size_t(layout.n_blocks) * (sizeof(Block) + in_free_list + filled);
  if (prefix_cache) bytes += PrefixIndex::metadata_bytes(layout.n_blocks, layout.block_tokens);
  return bytes;
}

BlockPool::State BlockPool::state(int32_t block) const {
  const Block& b = at(block);
  if (b.held()) return kInTransfer;
  if (b.references > 0) return kActive;
  return b.node.uid != 0 ? kCached : kFree;
}

bool BlockPool::in_use(int32_t block) const { return at(block).references > 0 || at(block).held(); }

void BlockPool::lru_append(int32_t block) {
  Block& b = at(block);
  b.older = newest_, b.newer = -1;
  (newest_ < 0 ? oldest_ : at(newest_).newer) = block;
  newest_ = block;
}

void BlockPool::lru_remove(int32_t block) {
  Block& b = at(block);
  (b.older < 0 ? oldest_ : at(b.older).newer) = b.newer;
  (b.newer < 0 ? newest_ : at(b.newer).older) = b.older;
}

void BlockPool::add_reference(int32_t block) {
  Block& b = at(block);
  if (b.references++ > 0 || b.held()) return;
  const bool indexed = b.node.uid != 0;  // then it is full, and filled_ need not be looked at
  if (indexed) lru_remove(block);
  --count_[indexed ? kCached : kFree], ++count_[kActive];
  count_written(indexed ? block_tokens_ : filled(block));
}

void BlockPool::drop_reference(int32_t block) {
  Block& b = at(block);
  XPYD_CHECK(b.references > 0, "block " + std::to_string(block));
  if (--b.references > 0 || b.held()) return;
  --count_[kActive];
  retire(block);
}

void BlockPool::add_hold(int32_t block, Hold hold) {
  Block& b = at(block);
  XPYD_CHECK((b.references > 0 || b.held()) && b.*hold < INT16_MAX, "block " + std::to_string(block));
  const bool held = b.held();
  ++(b.*hold);
  if (held) return;
  --count_[kActive], ++count_[kInTransfer];
}

void BlockPool::drop_hold(int32_t block, Hold hold) {
  Block& b = at(block);
  XPYD_CHECK(b.*hold > 0, "block " + std::to_string(block));
  --(b.*hold);
  if (b.held()) return;
  --count_[kInTransfer];
  if (b.references > 0)
    ++count_[kActive];
  else
    retire(block);
}

void BlockPool::retire(int32_t block) {
  if (at(block).node.uid != 0) {
    count_written(-block_tokens_);
    ++count_[kCached];
    lru_append(block);
    shed();
  } else {
    count_written(-filled(block));
    ++count_[kFree];
    source_->release(block);
  }
}

void BlockPool::forget(int32_t block) {
  lru_remove(block);
  index_->erase(block);
  --count_[kCached], ++count_[kFree];
}

void BlockPool::evict_oldest() {
  const int32_t block = oldest_;
  forget(block);
  source_->release(block);
}

void BlockPool::shed() {
  while (oldest_ >= 0 && n_blocks_ - count_[kFree] > share_) evict_oldest();
}

void BlockPool::poison(int32_t block) {  // all ones is a NaN in every float format
  for (const auto& [l, memory] : places_.ranks) {
    size_t bytes = size_t(l.block_tokens) * l.token_stride();
    int planes = l.order == KvOrder::layer_major ? 2 * l.shape.n_layers : 1;
    for (int p = 0; p < planes; ++p) std::memset(memory.get() + l.offset(block, p / 2, p % 2, 0, 0), 0xff, bytes);
  }
}

bool BlockPool::allocate(int n, std::vector<int32_t>& out, int64_t& evictions) {
  const size_t first = out.size(), end = first + size_t(n);
  {
    Lock lock(mutex_);
    source_->claim(n, out);
    size_t claimed = out.size();
    // Of what is cached here, that which others hold, too, gives no room: it stays.
    for (int32_t block = oldest_; out.size() < end && block >= 0; block = at(block).newer)
      if (source_->alone(block)) out.push_back(block);
    if (out.size() < end) out.resize(claimed);
    for (size_t i = claimed; i < out.size(); ++i) {
      forget(out[i]);
      ++evictions;
      if (source_->recycle(out[i])) out[claimed++] = out[i];  // else a late taker has come in between
    }
    if (claimed < end) {
      while (claimed > first) source_->release(out[--claimed]);
      out.resize(first);
      return false;
    }
    for (size_t i = first; i < end; ++i) {
      filled_[size_t(out[i])] = 0;
      add_reference(out[i]);
    }
    shed();
  }
  if (poison_)
    for (size_t i = first; i < end; ++i) poison(out[i]);
  return true;
}

void BlockPool::add_references(std::span<const int32_t> blocks) {
  Lock lock(mutex_);
  for (int32_t block : blocks) {
    XPYD_CHECK(state(block) != kFree, "block " + std::to_string(block));
    add_reference(block);
  }
}

void BlockPool::release(std::span<const int32_t> blocks) {
  if (blocks.empty()) return;
  Lock lock(mutex_);
  for (size_t i = blocks.size(); i-- > 0;) drop_reference(blocks[i]);
}

int BlockPool::users(int32_t block) const {
  Lock lock(mutex_);
  return at(block).references + at(block).handovers;
}

bool BlockPool::indexed(int32_t block) const {
  Lock lock(mutex_);
  return at(block).node.uid != 0;
}

void BlockPool::hold(std::span<const int32_t> blocks) {
  Lock lock(mutex_);
  for (int32_t block : blocks) add_hold(block, &Block::leases);
}

void BlockPool::unhold(std::span<const int32_t> blocks) {
  Lock lock(mutex_);
  for (size_t i = blocks.size(); i-- > 0;) drop_hold(blocks[i], &Block::leases);
}

void BlockPool::begin_handover(KvHandover& handover) {
  Lock lock(mutex_);
  handover.giver = source_->member();
  for (int32_t block : handover.blocks) {
    if (handover.between_processes()) handover.generations.push_back(source_->generation(block));
    add_hold(block, &Block::handovers);
    drop_reference(block);
  }
}

void BlockPool::discard(const KvHandover& handover) {
  XPYD_CHECK(handover.giver == source_->member());
  Lock lock(mutex_);
  for (size_t i = handover.blocks.size(); i-- > 0;) drop_hold(handover.blocks[i], &Block::handovers);
}

bool BlockPool::adopt(const KvHandover& handover) {
  const int bt = block_tokens_, n = int(handover.blocks.size());
  if (source_->member() < 0) {
    add_references(handover.blocks);
    discard(handover);
    return true;
  }
  if (handover.giver < 0 || handover.tokens < 0 || int(handover.generations.size()) != n ||
      n != (int64_t(handover.tokens) + bt - 1) / bt)
    return false;
  Lock lock(mutex_);
  for (int i = 0; i < n; ++i) {
    const int32_t block = handover.blocks[size_t(i)];
    if (block < 0 || block >= n_blocks_ || !source_->adopt(block, handover.generations[size_t(i)], handover.giver)) {
      while (i-- > 0) drop_reference(handover.blocks[size_t(i)]);
      return false;
    }
    if (at(block).node.uid == 0) {  // new here, or it was here and has been written to elsewhere
      const int tokens = std::min(bt, handover.tokens - i * bt);
      if (in_use(block)) count_written(tokens - filled(block));
      filled_[size_t(block)] = tokens;
    }
    add_reference(block);
  }
  shed();
  return true;
}

int BlockPool::match(std::span<const int32_t> tokens, uint64_t salt, int max_blocks) const {
  if (!index_) return 0;
  PrefixChain chain{.hash = salt};
  return index_->walk(tokens, max_blocks, chain, locked(), [](std::span<const int32_t>) {});
}

int BlockPool::acquire(std::span<const int32_t> tokens, uint64_t salt, int max_blocks, std::vector<int32_t>& out,
                       PrefixChain& chain) {
  chain = PrefixChain{.hash = salt};
  if (!index_) return 0;
  return index_->walk(tokens, max_blocks, chain, locked(), [&](std::span<const int32_t> blocks) {
    for (int32_t block : blocks) add_reference(block);  // so the next batch's chain stays intact
    out.insert(out.end(), blocks.begin(), blocks.end());
  });
}

void BlockPool::index(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain) {
  if (index_) index_->add(tokens, blocks, chain, locked());
}

void BlockPool::log_index(std::shared_ptr<PrefixLog> log) {
  if (index_) index_->log_to(std::move(log));
}

void BlockPool::clear_prefix_cache() {
  Lock lock(mutex_);
  while (oldest_ >= 0) evict_oldest();
}

KvStats BlockPool::stats() const {
  Lock lock(mutex_);
  KvStats stats = new_stats();
  // Others may have claimed and died between: never more than are not ours.
  stats.free = std::min(source_->count_free(), count_[kFree]);
  stats.elsewhere = count_[kFree] - stats.free;
  stats.capacity -= stats.elsewhere;
  stats.active = count_[kActive];
  stats.cached = count_[kCached];
  stats.in_transfer = count_[kInTransfer];
  stats.mappings = source_->member() < 0 ? int(places_.ranks.size()) : 1;  // what processes share is in one piece
  return stats;
}

void BlockPool::check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                                 bool complete) const {
  Lock lock(mutex_);
  XPYD_CHECK(int(references.size()) == n_blocks_ && int(leases.size()) == n_blocks_);
  std::vector<char> in_lru(size_t(n_blocks_), 0), held(size_t(n_blocks_), 0);
  for (int32_t b = oldest_, before = -1; b >= 0 || before != newest_; before = b, b = at(b).newer)
    XPYD_CHECK(b >= 0 && b < n_blocks_ && !in_lru[size_t(b)]++ && at(b).older == before, "LRU list");

  int count[kStates] = {};
  for (int32_t b = 0; b < n_blocks_; ++b) {
    auto which = [b] { return "block " + std::to_string(b); };  // only when a check fails
    const Block& block = at(b);
    const int referenced = references[size_t(b)], leased = leases[size_t(b)];
    XPYD_CHECK(complete ? block.references == referenced : block.references >= referenced, which());
    XPYD_CHECK(complete ? block.leases == leased : block.leases >= leased, which());
    XPYD_CHECK(block.handovers >= 0, which());
    const State s = state(b);
    ++count[s];
    held[size_t(b)] = s != kFree;
    XPYD_CHECK(bool(in_lru[size_t(b)]) == (s == kCached), which());
    if (block.node.uid != 0) XPYD_CHECK(filled(b) == block_tokens_, which());
  }
  for (int s = 0; s < kStates; ++s) XPYD_CHECK(count[s] == count_[s], "state " + std::to_string(s));
  source_->check_invariants(held);
  check_written(complete);
  if (index_) index_->check_invariants();
}

}  // namespace xpyd
