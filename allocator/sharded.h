// The KV memory of an instance on several ranks (kv_shards.h): a sequence has the same blocks, the
// same slot and the same cached tokens on each, so that there is one block table, and everything
// above sees one memory.
//
// Where blocks lie in memory that is there, one pool has one set of block ids, and each block its
// bytes on every rank (BlockPool::put_on_ranks); several memories may draw from it.
//
// Where a block is page groups (vattention), each rank has a memory of its own, with its own pool
// of its own shape, and all of them do the same at the same time: ShardedMemory. Nothing is agreed
// upon: the scheme decides by what was asked of it and by nothing else, so equal memories that are
// asked alike decide alike, which is checked at every step. Where the system takes part (addresses
// refused by the kernel) and does so for one rank only, that aborts.
//
// Thread safety: as KvMemory: one owner, the engine's thread. Ranks read and write bytes at views.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "allocator/kv_memory.h"
#include "allocator/kv_shards.h"

namespace xpyd {

class PrefixLog;  // prefix_log.h

// What each rank's memory would be. `options` are of the whole instance: the model's shape, and the
// bytes of all ranks' pools together, which get equally many blocks.
struct ShardedPlan {
  KvLayout whole;                   // of the blocks as one rank would have them
  std::vector<KvOptions> of_ranks;  // [n_ranks]
};
// Of one rank: plan_pool(). Errors name the option that cannot be met, as plan_pool()'s do.
Result<ShardedPlan> plan_sharded(const std::string& scheme, const KvOptions& options, const KvShards& shards);

// Allocates and touches the pools. Without page groups it is the scheme's memory itself. Before:
// plan_sharded() takes the options. Error `unavailable`: the device has not that much memory.
// `log`: of what its prefix index finds.
Result<std::unique_ptr<KvMemory>> make_sharded(const std::string& scheme, const KvOptions& options,
                                               const KvShards& shards, std::shared_ptr<PrefixLog> log = nullptr);

// The one pool of such ranks: make_block_pool() on one. Errors as make_sharded()'s. Before:
// plan_sharded() takes the options, and the scheme has no page groups, or one rank.
Result<std::shared_ptr<BlockPool>> make_ranked_pool(const std::string& scheme, const KvOptions& options,
                                                    const KvShards& shards);

class ShardedMemory final : public KvMemory {
 public:
  // Before: the memories are of one scheme, new, and have equally many blocks of equally many
  // tokens.
  ShardedMemory(std::vector<std::unique_ptr<KvMemory>> ranks, const KvShards& shards, const KvShape& whole);

  const char* name() const override { return ranks_[0]->name(); }
  // The model's shape; its addresses are nobody's. Views have those of their rank.
  const KvLayout& layout() const override { return whole_; }
  std::byte* base() const override { return ranks_[0]->base(); }
  std::byte* rank_base(int rank) const override { return ranks_[size_t(rank)]->base(); }
  int n_ranks() const override { return int(ranks_.size()); }
  const KvShards* shards() const override { return &shards_; }
  KvView rank_view(KvHandle handle, int rank) const override { return ranks_[size_t(rank)]->view(handle); }

  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override;
  int probe(std::span<const int32_t> tokens, uint64_t salt) const override { return ranks_[0]->probe(tokens, salt); }
  bool append(KvHandle handle, int n_tokens) override;
  void written(KvHandle handle, std::span<const int32_t> tokens) override;
  void trim(KvHandle handle) override;
  Result<KvHandle> fork(KvHandle handle) override;
  void free(KvHandle handle) override;
  using KvMemory::pin;
  KvLease pin(KvHandle handle, int token_begin, int token_end) override;
  void unpin(KvLease lease) override;
  // Nobody shares these pools (disagg/cluster.h, check_shared_pool).
  KvHandover hand_over(KvHandle) override { no_handover(); }
  KvHandle adopt(KvHandover, std::span<const int32_t>, uint64_t) override { no_handover(); }
  void discard(KvHandover) override { no_handover(); }
  KvView view(KvHandle handle) const override { return rank_view(handle, 0); }
  int written_tokens(KvHandle handle) const override { return ranks_[0]->written_tokens(handle); }
  std::span<const int32_t> blocks(KvHandle handle) const override { return ranks_[0]->blocks(handle); }
  bool tail_shared(KvHandle handle) const override { return ranks_[0]->tail_shared(handle); }
  // Blocks and tokens of one rank; bytes and calls of all.
  KvStats stats() const override;
  void clear_prefix_cache() override;
  void check_invariants(bool complete) const override;

 private:
  // f(memory) of every rank: all give the same.
  template <class F>
  auto each(F&& f);
  void check_alike(KvHandle handle) const;
  [[noreturn]] static void no_handover() {
    check_failed("memories of page groups on several ranks share no pool", __FILE__, __LINE__, "");
  }

  std::vector<std::unique_ptr<KvMemory>> ranks_;
  const KvShards shards_;
  KvLayout whole_;
  std::vector<bool> live_;  // by handle
};

}  // namespace xpyd
