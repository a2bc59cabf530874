// OffloadedMemory: any KvMemory with offload tiers below it (OffloadTiers). It copies the KV of a sequence out, block
// by block, while the sequence continues. If a prompt begins with tokens that a tier has, it copies their KV in while
// other sequences compute.
//
// Out: commit() starts a copy of every tier block that has become full and that the tiers lack. A lease keeps the
// block's bytes in place until the copy is done.
// In: reserve() takes room for the tokens that the tiers have beyond the memory's own hit, and starts copying. The
// reservation is `loading` until every block has arrived or one is lost. After a loss the sequence keeps the blocks
// before it, and computes the rest.
// Handles and leases are those of the memory beneath.
//
// Thread safety: as KvMemory.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "allocator/kv_memory.h"
#include "allocator/offload/offload_tiers.h"
#include "base/clock.h"
#include "base/device/device.h"

namespace xpyd::allocator {

// Puts options.tiers below `memory`. Errors name the option that cannot be met.
Result<std::unique_ptr<KvMemory>> make_offloaded(std::unique_ptr<KvMemory> memory, const KvOptions& options);

class OffloadedMemory final : public KvMemory, public KvLoader, public KvHandoff, public KvCache {
 public:
  OffloadedMemory(std::unique_ptr<KvMemory> memory, std::unique_ptr<OffloadTiers> tiers, Device& device, Clock& clock);
  ~OffloadedMemory() override;  // waits for copies under way

  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override;
  bool ready(KvHandle handle) override;
  int probe(std::span<const int32_t> tokens, uint64_t salt) const override { return memory_->probe(tokens, salt); }
  int matched_tokens(std::span<const int32_t> tokens, uint64_t salt) const override;
  bool poll() override;
  bool copying() const override { return !outs_.empty() || !loading_.empty() || tiers_->moving(); }
  bool append(KvHandle handle, int n_tokens) override;
  bool reserve_blocks(KvHandle handle, int n_tokens) override;
  void commit(KvHandle handle, std::span<const int32_t> tokens) override;
  void rollback(KvHandle handle) override;
  Result<KvHandle> fork(KvHandle handle) override;
  void free(KvHandle handle) override;
  KvHandover hand_over(KvHandle handle) override;
  KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) override;
  void discard(KvHandover handover) override { memory_->handoff().discard(std::move(handover)); }
  KvView view(KvHandle handle, int rank = 0) const override { return memory_->view(handle, rank); }
  KvHeld held(KvHandle handle) const override { return memory_->held(handle); }
  KvStats stats() const override;
  std::vector<KvState> states() const override { return memory_->states(); }
  void clear_prefix_cache() override;
  void check_invariants(bool complete) const override;

  void drain();  // waits until nothing is under way; sequences that were loading are then ready
  OffloadTiers& tiers() { return *tiers_; }

 private:
  // A load under way, of blocks [first_block, first_block + blocks.size()) of the sequence's tokens.
  struct Load {
    struct Piece {
      int64_t mark;
      size_t n_blocks;  // blocks that are complete with it
    };
    std::vector<int32_t> blocks;     // blocks of the tiers, pinned until their copy is done
    std::vector<bool> from_disk;     // [blocks]
    int first_block = 0, begin = 0;  // begin: tokens that were there before
    size_t copied = 0, arrived = 0;  // blocks whose copy has started; has ended
    size_t on_host = 0;              // blocks before the first that may not be on the host yet
    std::deque<Piece> pieces;        // started, not ended
    bool cut = false;                // no further copy starts: a block is lost, or the load is not wanted any more
    double start_s = 0;              // Clock
  };
  struct Sequence {
    bool loading = false, given_up = false;  // given_up: freed once no copy into it is under way
    bool kept_up = true;                     // its blocks up to the end of chain are in the tiers
    bool behind = false;                     // the tiers had no room for its next block: it is in behind_
    std::vector<int32_t> tokens;             // written tokens; while loading, up to the end of its last block
    uint64_t salt = 0;
    OffloadTiers::Chain chain;
    Load load;
  };
  struct Out {  // a copy out under way
    int64_t mark;
    KvLease lease;
    std::vector<int32_t> blocks;  // blocks of the tiers
    int64_t bytes = 0;
    double start_s = 0;  // Clock
  };

  Sequence& start(KvHandle handle, std::span<const int32_t> tokens, uint64_t salt);
  bool begin_load(KvHandle handle, KvReservation& reservation, std::span<const int32_t> tokens, uint64_t salt);
  void advance(KvHandle handle);
  bool copy_in(KvHandle handle);
  void finish_load(KvHandle handle);
  void cut(Load& load, size_t n);
  void store(KvHandle handle);
  void poll_out();
  void poll_in();
  void leave(KvHandle handle);
  size_t plan_copies(KvHandle handle, const KvView& host, int token_begin, int token_end, bool out);

  const std::unique_ptr<KvMemory> memory_;
  const std::unique_ptr<OffloadTiers> tiers_;
  const int block_tokens_;
  const size_t out_budget_;  // limit of blocks whose copy out is under way
  const std::unique_ptr<DeviceQueue> out_, in_;
  Clock& clock_;

  std::vector<Sequence> sequences_;  // by handle
  std::vector<KvHandle> loading_;    // in order of their start
  std::deque<Out> outs_;             // in order of their start
  size_t blocks_out_ = 0;            // blocks in outs_
  double found_out_s_ = 0;           // Clock: when the last ends of copies out were found
  std::vector<KvHandle> behind_;     // sequences that are `behind`
  // Reused.
  std::vector<int32_t> table_;
  std::vector<KvHandle> again_;
  std::vector<Copy> copies_;
};

}  // namespace xpyd::allocator
