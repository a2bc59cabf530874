// BlockPool: the physical KV memory, equal blocks with reference counts, an LRU of the cached ones,
// and the prefix index over them. One pool may serve several KvMemory on several threads.
//
// A block is in one state, decided by three facts:
//   in_transfer  held by a lease or a hand-over (holds > 0)
//   active       referenced by a sequence, not held
//   cached       neither, but indexed: in the LRU list, evictable
//   free         none of these: in the free list
//
// Where processes share the blocks (block_ledger.h), each has a pool of its own over them, and what
// is none of the first three it does not hold: `elsewhere`. It claims from the ledger what it
// allocates, and gives back at once what is nobody's here. Cached blocks it keeps for itself as
// long as all that it holds is no more than its share of the pool; beyond, the least recently used
// goes first.
//
// Contiguous memory keeps what it can do without in its own slots and marks these references idle;
// a block whose references are all idle counts as cached, too, though only its owners can free it.
//
// A block in use (active or in_transfer) is filled with `written` tokens: stats() knows what of the
// pool holds KV, a block that several sequences share counted once.
//
// Thread safety: every function locks for itself, and stats() is a consistent snapshot. KV bytes
// are not locked: only a block's owner writes it, at tokens that nobody else reads yet.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "allocator/block_ledger.h"
#include "allocator/kv_layout.h"
#include "allocator/kv_memory.h"
#include "allocator/kv_shards.h"
#include "allocator/prefix_index.h"
#include "allocator/prefix_log.h"
#include "base/memory.h"
#include "base/page_groups.h"

namespace xpyd {

class BlockPool {
 public:
  // `memory`: layout.pool_bytes() at least. `hash_mask`: see PrefixIndex.
  BlockPool(const KvLayout& layout, std::shared_ptr<std::byte> memory, bool prefix_cache,
            uint64_t hash_mask = ~uint64_t{0});
  // Blocks that processes share. `share`: of them, what this one may hold with cached ones among
  // it.
  BlockPool(const KvLayout& layout, std::shared_ptr<std::byte> memory, bool prefix_cache,
            std::unique_ptr<BlockLedger> ledger, int share);
  // Blocks of page groups, which have an address only while somebody maps them (vattention).
  BlockPool(const KvLayout& layout, std::shared_ptr<PageGroups> page_groups);

  // Under instances of several ranks a block has its bytes in as many memories, each of its rank's
  // shape; layout() is of the blocks as one rank would have them. Before any use, on a pool
  // without memory of its own.
  void put_on_ranks(const KvShards& shards, std::vector<std::shared_ptr<std::byte>> memories);

  const KvLayout& layout() const { return layout_; }
  std::byte* data(int rank = 0) const { return ranks_.empty() ? memory_.get() : ranks_[size_t(rank)].memory.get(); }
  int n_ranks() const { return ranks_.empty() ? 1 : int(ranks_.size()); }
  const KvShards* shards() const { return shards_ ? &*shards_ : nullptr; }  // null: one rank
  const KvLayout& rank_layout(int rank) const { return ranks_.empty() ? layout_ : ranks_[size_t(rank)].layout; }
  PageGroups* page_groups() const { return page_groups_.get(); }  // null: data() is the memory
  bool prefix_cache() const { return index_ != nullptr; }
  const PrefixIndex* prefix_index() const { return index_.get(); }  // null without; unlocked: benches

  // What the index finds from now on, and what it loses. Before any use.
  void log_index(std::shared_ptr<PrefixLog> log) { log_ = std::move(log); }

  // Appends n blocks of one reference each to `out`: free ones first (last freed first), then
  // cached ones, least recently used first; adds the number of those to `evictions`. False: fewer
  // than n are available, and nothing has changed. (Of a ledger: cached blocks that others hold,
  // too, are not available.)
  [[nodiscard]] bool allocate(int n, std::vector<int32_t>& out, int64_t& evictions);

  // As allocate(), of free blocks only, each one after out.back() where that is free, so that runs
  // of neighbours can be mapped as one; a new run begins where the next kRun blocks are free.
  [[nodiscard]] bool allocate_run(int n, std::vector<int32_t>& out);

  void add_references(std::span<const int32_t> blocks);
  // Drops one reference of each, the last block first, so that tails become the oldest of the LRU.
  void release(std::span<const int32_t> blocks);
  // Sequences that may write after the tokens of this block: references and hand-overs, leases not.
  int users(int32_t block) const;
  // Leading blocks that have no other user than the caller.
  int n_unshared(std::span<const int32_t> blocks) const;

  // One reference of each becomes idle, or is in use again.
  void set_idle(std::span<const int32_t> blocks, bool idle);
  void release_idle(std::span<const int32_t> blocks);  // release() of idle references

  // The last of `blocks` hold the KV of n more tokens, which begin at token `from` of them all.
  // Before: the caller references them, not as idle, and is the only one who writes there.
  void add_written(std::span<const int32_t> blocks, int from, int n);
  // The blocks hold `n` tokens together and no more.
  void set_written(std::span<const int32_t> blocks, int n);
  bool indexed(int32_t block) const;

  // A lease's hold: beyond references.
  void hold(std::span<const int32_t> blocks);
  void unhold(std::span<const int32_t> blocks);

  // One reference of each block <-> one hold of a hand-over that is under way.
  void begin_handover(std::span<const int32_t> blocks);
  void end_handover(std::span<const int32_t> blocks, bool adopted);  // not adopted: gives it up

  // Of another process: a reference of each block, whose tokens are written. False: it is not what
  // that one holds, and nothing has changed.
  [[nodiscard]] bool adopt(const KvHandover& handover);
  const BlockLedger* ledger() const { return ledger_.get(); }  // null: the pool is this process's

  // Blocks of the longest indexed prefix, at most max_blocks. Does not touch the LRU order.
  int match(std::span<const int32_t> tokens, uint64_t salt, int max_blocks) const;

  // The same blocks with a reference each, appended to `out`; `chain` becomes the end of the match.
  int acquire(std::span<const int32_t> tokens, uint64_t salt, int max_blocks, std::vector<int32_t>& out,
              PrefixChain& chain);

  // Makes the full blocks [blocks.size()] of `tokens` [blocks.size() * block_tokens] findable, each
  // chained to the one before. No de-duplication: a block whose content is indexed already stays
  // unindexed, and the chain goes on from the indexed one.
  void index(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain);

  void clear_prefix_cache();  // cached blocks become free

  // capacity, states, block_tokens and written_bytes; the rest belongs to a KvMemory
  KvStats stats() const;
  size_t block_bytes() const { return block_bytes_; }
  int filled(int32_t block) const;  // tokens

  // Recounts the pool against one user's references, holds and idle references ([n_blocks] each).
  // `complete`: they are all there are, and must be equal; otherwise they are a lower bound. Aborts
  // on a difference.
  void check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                        std::span<const int32_t> idle, bool complete) const;

  // Fills every newly allocated block with NaN, so that KV read before it is written cannot look
  // right. On by default in sanitizer builds. Before any use.
  void poison_new_blocks(bool on) { poison_ = on; }

  // Memory of a pool beside its KV bytes.
  static size_t metadata_bytes(const KvLayout& layout, bool prefix_cache);

 private:
  static constexpr int kRun = 16;
  enum State : int { kFree, kActive, kCached, kInTransfer, kElsewhere, kStates };
  struct Block {
    PrefixIndex::Node node;
    int32_t references, holds;
    int32_t older,
        newer;  // neighbours in the LRU list while cached, in the free list while free; -1: end
  };
  struct Rank {
    KvLayout layout;
    std::shared_ptr<std::byte> memory;
  };
  class Lock;
  class Change;

  BlockPool(const KvLayout& layout, std::shared_ptr<std::byte> memory, bool prefix_cache, uint64_t hash_mask,
            std::unique_ptr<BlockLedger> ledger, int share);

  // Calls found_some(blocks), locked, for each batch of the longest indexed prefix.
  template <class F>
  int walk(std::span<const int32_t> tokens, int max_blocks, PrefixChain& chain, F&& found_some) const;
  State state(int32_t block) const;
  bool in_use(int32_t block) const;
  int tokens_in(int32_t block) const;
  void add_reference(int32_t block);
  void drop_reference(int32_t block);
  void add_hold(int32_t block);  // before: referenced or held
  void drop_hold(int32_t block);
  void retire(int32_t block);  // nobody's any more: to the LRU, or let go
  void let_go(int32_t block);  // to the free list, or to the ledger
  bool claim(int n, int64_t& evictions);
  void shed();  // cached blocks beyond the share
  void push_free(int32_t block);
  void take_free(int32_t block);  // from anywhere in the list
  int32_t run_start() const;
  void lru_append(int32_t block);
  void lru_remove(int32_t block);
  void forget(int32_t block);
  void evict(int32_t block);
  Block& at(int32_t block) const { return blocks_.as<Block>()[block]; }
  void poison(int32_t block);

  const KvLayout layout_;
  size_t block_bytes_, token_bytes_;         // on all ranks
  const std::shared_ptr<std::byte> memory_;  // the KV; null: the ranks have it
  std::optional<KvShards> shards_;
  std::vector<Rank> ranks_;
  std::shared_ptr<PageGroups> page_groups_;
  Buffer blocks_;  // Block [n_blocks]
  std::unique_ptr<PrefixIndex> index_;
  std::shared_ptr<PrefixLog> log_;  // null: nobody asks
  std::vector<int32_t> handovers_;  // [n_blocks]: of holds, how many are hand-overs
  std::vector<int32_t> idle_;       // [n_blocks]: of references, how many are idle; empty: none was
  int n_idle_ = 0;                  // blocks that are nobody's but idle ones'
  // [n_blocks]: tokens written; of an indexed block all. A writer of its own block need not lock.
  std::vector<int32_t> filled_;
  int64_t written_ = 0;                      // tokens in blocks in use, counted under the lock
  std::atomic<int64_t> written_outside_{0};  // and without
  int32_t free_head_ = -1;
  int32_t oldest_ = -1, newest_ = -1;  // LRU list
  int count_[kStates] = {};
  const std::unique_ptr<BlockLedger> ledger_;
  const int share_ = 0;
  std::vector<int32_t> claimed_;  // reused
  // Free blocks of the ledger, counted when its changes() were so many.
  mutable uint64_t counted_at_ = ~uint64_t{0};
  mutable int ledger_free_ = 0;
  bool poison_;
  mutable std::mutex mutex_;
};

}  // namespace xpyd
