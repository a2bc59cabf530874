// The parts of BlockPool that depend on other processes: a hand-over, which the giver's words in the ledger decide
// (block_ledger.h), and statistics, in which others hold a part of the blocks.
#include <cstring>
#include <string>

#include "allocator/pool/block_pool.h"

namespace xpyd::allocator {

void BlockPool::sign(KvHandover& handover) {
  handover.giver = source_->member();
  if (!handover.between_processes()) return;
  for (int32_t block : handover.blocks) handover.generations.push_back(source_->generation(block));
}

void BlockPool::discard(const KvHandover& handover) {
  XPYD_CHECK(handover.giver == source_->member());
  KvPool::discard(handover);
}

bool BlockPool::adopt(const KvHandover& handover) {
  const int bt = block_tokens_, n = int(handover.blocks.size());
  if (source_->member() < 0) return KvPool::adopt(handover);
  if (handover.giver < 0 || handover.tokens < 0 || int(handover.generations.size()) != n ||
      n != (int64_t(handover.tokens) + bt - 1) / bt)
    return false;
  Lock lock(mutex_);
  for (int i = 0; i < n; ++i) {
    const int32_t block = handover.blocks[size_t(i)];
    if (block < 0 || block >= n_blocks_ || !source_->share(block, handover.generations[size_t(i)], handover.giver)) {
      while (i-- > 0) drop_reference(handover.blocks[size_t(i)]);
      return false;
    }
    if (at(block).node.uid == 0) {  // new here, or another process has written to it since
      const int tokens = std::min(bt, handover.tokens - i * bt);
      if (at(block).users.any()) written_ += tokens - filled(block);
      filled_[size_t(block)] = tokens;
    }
    add_reference(block);
  }
  shed();
  return true;
}

KvStats BlockPool::stats() const {
  Lock lock(mutex_);
  KvStats stats = count();
  stats.reserved_blocks = reserved_;
  // Other members may claim blocks, or die, between two reads. The sum never exceeds the blocks that are not held here.
  stats.free = std::min(source_->count_free(), n_free());
  stats.elsewhere = n_free() - stats.free;
  stats.capacity -= stats.elsewhere;
  stats.mappings = source_->member() < 0 ? int(places_.ranks.size()) : 1;  // memory that processes share is one mapping
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
  XPYD_CHECK(reserved_ >= 0 && (!complete || source_->member() >= 0 || spare() >= 0),
             "more blocks are reserved than the pool has");
  source_->check_invariants(held);
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
