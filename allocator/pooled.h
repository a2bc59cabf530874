// What the memory schemes over a BlockPool have in common: handles, leases, hand-over, counters,
// recount. A scheme adds how a sequence's tokens are laid on blocks.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "allocator/block_pool.h"
#include "allocator/handle_table.h"
#include "allocator/kv_memory.h"
#include "base/device.h"

namespace xpyd {

class PooledMemory : public KvMemory {
 public:
  PooledMemory(std::shared_ptr<BlockPool> pool, const KvOptions& options);
  ~PooledMemory() override;

  const KvLayout& layout() const override { return pool_->layout(); }
  std::byte* base() const override { return pool_->data(); }
  int n_ranks() const override { return pool_->n_ranks(); }
  const KvShards* shards() const override { return pool_->shards(); }
  std::byte* rank_base(int rank) const override { return rank == 0 ? base() : pool_->data(rank); }
  KvView rank_view(KvHandle handle, int rank) const override {
    KvView there = view(handle);
    if (rank > 0) there.pool = pool_->data(rank), there.layout = &pool_->rank_layout(rank);
    return there;
  }
  void free(KvHandle handle) override;
  using KvMemory::pin;
  KvLease pin(KvHandle handle, int token_begin, int token_end) override;
  void unpin(KvLease lease) override;
  KvHandover hand_over(KvHandle handle) override;
  void discard(KvHandover handover) override;
  int written_tokens(KvHandle handle) const override { return sequences_[handle].written; }
  std::span<const int32_t> blocks(KvHandle handle) const override { return table_of(sequences_[handle]); }
  KvStats stats() const override;
  void clear_prefix_cache() override { pool_->clear_prefix_cache(); }
  void check_invariants(bool complete) const override;

 protected:
  struct Sequence {
    std::vector<int32_t> table;  // its blocks, one reference each
    int written = 0;             // tokens
    int room = 0;                // tokens that may be written without another append
    int32_t slot = -1;           // vattention
    // paged:
    bool maybe_shared = false;  // the block of the next token may have other users
    PrefixChain chain;          // end of the chain of its full blocks
    std::vector<int32_t> tail;  // tokens after the last full block
    void clear();
  };
  // The blocks of its room, or of what it was given (paged, contiguous).
  virtual std::span<const int32_t> table_of(const Sequence& sequence) const { return sequence.table; }
  virtual void check_sequence(const Sequence& sequence) const = 0;
  // References of this memory, and which of them are marked idle.
  virtual void count_references(std::vector<int32_t>& references, std::vector<int32_t>& idle) const;
  // Where a block holds more than its tokens: for those still to come (contiguous, slots), or
  // because it is not smaller.
  virtual bool reserves() const { return false; }
  KvLease hold(std::span<const int32_t> table, int token_begin, int token_end);  // pin() of it
  void check_length(int tokens) const;  // of one sequence, against options.max_sequence_tokens
  // False: another process's, and not held there any more.
  [[nodiscard]] bool add_adopted(const KvHandover& handover, KvHandle& handle);
  // The first n_tokens of one block onto another. Done when it returns: the source may be given up.
  void copy_tokens(int32_t to_block, int32_t from_block, int n_tokens);

  const std::shared_ptr<BlockPool> pool_;
  const KvOptions options_;
  DeviceQueue& queue_;
  std::vector<Copy> copies_;  // reused
  HandleTable<Sequence> sequences_;
  HandleTable<std::vector<int32_t>> leases_;  // blocks of each
  // Written by the owner's thread, read by any.
  std::atomic<int64_t> query_tokens_{0}, hit_tokens_{0}, evictions_{0}, cow_copies_{0};
};

// The bytes of a pool of these options (pool_bytes, device, pool_in_groups). Error `unavailable`:
// the device has not that much memory.
Result<std::shared_ptr<std::byte>> make_pool_memory(const KvOptions& options);
// Whether it finds prefixes of prompts.
bool pool_has_prefix_cache(const KvScheme& scheme, const KvOptions& options);

std::unique_ptr<KvMemory> make_paged(std::shared_ptr<BlockPool> pool, const KvOptions& options);
std::unique_ptr<KvMemory> make_token(std::shared_ptr<BlockPool> pool, const KvOptions& options);
std::unique_ptr<KvMemory> make_contiguous(std::shared_ptr<BlockPool> pool, const KvOptions& options);
std::unique_ptr<KvMemory> make_slots(std::shared_ptr<BlockPool> pool, const KvOptions& options);
std::unique_ptr<KvMemory> make_vattention(std::shared_ptr<BlockPool> pool, const KvOptions& options);
// Tokens and bytes of one row of page groups, the block of vattention's pool. 0 tokens: a group
// does not hold one.
int vattention_row_tokens(const KvOptions& options);
size_t vattention_row_bytes(const KvOptions& options);
// The virtual slots of one memory.
KvLayout vattention_slots(const KvOptions& options);

}  // namespace xpyd
