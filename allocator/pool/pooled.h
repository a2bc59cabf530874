// What the memory schemes over a KvPool have in common: handles, leases, hand-over, counters,
// recount. A scheme adds how a sequence's tokens are laid on blocks.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/handle_table.h"
#include "allocator/kv_memory.h"
#include "allocator/kv_pool.h"
#include "allocator/prefix/block_index.h"
#include "allocator/schemes.h"
#include "base/device/device.h"

namespace xpyd::allocator {

class PooledMemory : public KvMemory, public KvHandoff, public KvLeases, public KvCache {
 public:
  // `places`: of the views, where it is not the pool. `escrow`: of a scheme that counts room which is set aside.
  PooledMemory(std::shared_ptr<KvPool> pool, const KvOptions& options, const char* name,
               std::optional<KvPlaces> places = {}, KvEscrow* escrow = nullptr);
  ~PooledMemory() override;

  void free(KvHandle handle) override;
  using KvMemory::pin;
  KvLease pin(KvHandle handle, int token_begin, int token_end) override;
  void unpin(KvLease lease) override;
  KvHandover hand_over(KvHandle handle) override;
  void discard(KvHandover handover) override;
  int written_tokens(KvHandle handle) const override { return sequences_[handle].written; }
  std::span<const int32_t> blocks(KvHandle handle) const override { return table_of(sequences_[handle]); }
  KvStats stats() const override;
  std::vector<KvState> states() const override { return pool_->states(); }
  void clear_prefix_cache() override { pool_->clear_prefix_cache(); }
  void check_invariants(bool complete) const override;

 protected:
  struct Sequence {
    std::vector<int32_t> table;  // its blocks, one reference each
    int written = 0;             // tokens
    int room = 0;                // tokens that may be written without another append
    int32_t slot = -1;           // vattention
    // paged:
    int escrow = 0;             // blocks that are set aside for it
    bool maybe_shared = false;  // the block of the next token may have other users
    PrefixChain chain;          // end of the chain of its full blocks
    std::vector<int32_t> tail;  // tokens after the last full block
    void clear();
  };
  // The blocks of its room, or of what it was given (paged, contiguous).
  virtual std::span<const int32_t> table_of(const Sequence& sequence) const { return sequence.table; }
  virtual void check_sequence(const Sequence& sequence) const = 0;
  virtual void count_references(std::vector<int32_t>& references) const;  // of this memory
  // The pool's, as this memory's owner should see it.
  virtual KvStats pool_stats() const { return pool_->stats(); }
  // Where a block holds more than its tokens: for those still to come (contiguous, slots), or
  // because it is not smaller.
  virtual bool reserves() const { return false; }
  KvLease hold(std::span<const int32_t> table, int token_begin, int token_end);  // pin() of it
  void check_length(int tokens) const;  // of one sequence, against options.max_sequence_tokens
  // adopt() of blocks: the sequence has them, written and no more.
  KvHandle add_adopted(const KvHandover& handover, std::span<const int32_t> tokens);
  // Counts the next n tokens, which are in place. Before: there is room for them.
  void add_written(Sequence& sequence, std::span<const int32_t> table, size_t n);
  // The first n_tokens of one block onto another. Done when it returns: the source may be given up.
  void copy_tokens(int32_t to_block, int32_t from_block, int n_tokens);

  const std::shared_ptr<KvPool> pool_;
  const KvOptions options_;
  DeviceQueue& queue_;
  std::vector<Copy> copies_;  // reused
  HandleTable<Sequence> sequences_;
  HandleTable<std::vector<int32_t>> leases_;  // blocks of each
  // Written by the owner's thread, read by any.
  std::atomic<int64_t> query_tokens_{0}, hit_tokens_{0}, evictions_{0}, cow_copies_{0};
};

// What the rows of most schemes are made of: a block is tokens in that memory.
size_t bytes_of_tokens(const KvOptions& options, int tokens);
Status nothing_more(const KvOptions& options);  // is asked of them
Result<std::shared_ptr<KvPool>> make_blocks(const PoolPlan& plan, bool prefix_index);

}  // namespace xpyd::allocator
