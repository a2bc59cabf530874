// OffloadedMemory: any KvMemory with tiers below it (OffloadTiers). What a sequence has computed is copied out, block
// by block, while it goes on; a prompt that begins like one of these gets its KV copied in while others compute.
//
// Out: written() starts a copy of every tier block that has become full and that the tiers have not got; a lease keeps
// its bytes in place until the copy is done.
// In: reserve() takes room for what the tiers know beyond the memory's own hit, and starts copying; the reservation is
// `loading` until every block has arrived or one has not: then the sequence has what came before it, and the rest is
// computed. By layer (load_by_layer()): from the moment at which all blocks are on the host, what is not yet on its way
// comes layer by layer, each a copy of its own, in order; when the first is there the sequence can begin (arrival()). A
// block lies on the disk with all its layers together, under one checksum, so what comes from there comes whole as far
// as the host. Handles and leases are those of the memory beneath.
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

// `memory` with options.tiers below it. The errors name the option that cannot be met.
Result<std::unique_ptr<KvMemory>> make_offloaded(std::unique_ptr<KvMemory> memory, const KvOptions& options);

class OffloadedMemory final : public KvMemory,
                              public KvLoader,
                              public KvHandoff,
                              public KvCache,
                              public KvBlockReserver {
 public:
  OffloadedMemory(std::unique_ptr<KvMemory> memory, std::unique_ptr<OffloadTiers> tiers, Device& device, Clock& clock);
  ~OffloadedMemory() override;  // waits for the copies that are under way

  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override {
    return reserve(tokens, salt, /*may_compute=*/true);
  }
  Result<KvReservation> reserve_loaded(std::span<const int32_t> tokens, uint64_t salt) override {
    return reserve(tokens, salt, /*may_compute=*/false);
  }
  bool ready(KvHandle handle) override;
  void load_by_layer() override { by_layer_ = true; }
  std::shared_ptr<KvArrival> arrival(KvHandle handle) override;
  int probe(std::span<const int32_t> tokens, uint64_t salt) const override { return memory_->probe(tokens, salt); }
  int matched_tokens(std::span<const int32_t> tokens, uint64_t salt) const override;
  bool poll() override;
  bool copying() const override { return !outs_.empty() || !loading_.empty() || tiers_->moving(); }
  bool append(KvHandle handle, int n_tokens) override;
  bool reserve_blocks(KvHandle handle, int n_tokens) override;
  int reserved_blocks(KvHandle handle) const override { return memory_->reserved_blocks(handle); }
  void commit(KvHandle handle, std::span<const int32_t> tokens) override;
  void keep_private(KvHandle handle) override;
  void rollback(KvHandle handle) override;
  Result<KvHandle> fork(KvHandle handle) override;
  void free(KvHandle handle) override;
  void swap_out(KvHandle handle) override;
  void loads_if(Worth worth) override {
    if (tiers_->options().load_by_cost) worth_ = std::move(worth);
  }
  // vattention gives its addresses up: waits for the copies out of this sequence that are under way.
  KvHandover hand_over(KvHandle handle) override;
  KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) override;
  void discard(KvHandover handover) override { memory_->handoff().discard(std::move(handover)); }
  KvView view(KvHandle handle, int rank = 0) const override { return memory_->view(handle, rank); }
  int written_tokens(KvHandle handle) const override { return memory_->written_tokens(handle); }
  std::span<const int32_t> blocks(KvHandle handle) const override { return memory_->blocks(handle); }
  bool tail_shared(KvHandle handle) const override { return memory_->tail_shared(handle); }
  KvStats stats() const override;
  std::vector<KvState> states() const override { return memory_->states(); }
  void clear_prefix_cache() override;
  void check_invariants(bool complete) const override;

  void drain();  // until nothing is under way; sequences that were loading are ready
  OffloadTiers& tiers() { return *tiers_; }

 private:
  class Arrival;
  // KV on its way in: blocks [first_block, first_block + blocks.size()) of the sequence's tokens.
  struct Load {
    struct Piece {
      int64_t mark;
      size_t n_blocks;  // that are there with it
    };
    std::vector<int32_t> blocks;     // of the tiers, pinned until their copy is done
    std::vector<bool> from_disk;     // [blocks]
    int first_block = 0, begin = 0;  // begin: tokens that were there
    size_t copied = 0, arrived = 0;  // blocks whose copy has been started; is done
    size_t on_host = 0;              // blocks before the first that may not be there
    std::deque<Piece> pieces;        // started, not done
    bool by_layer = false;           // the last pieces are of a layer each
    bool cut = false;                // nothing more is started: a block is lost, or nobody wants it
    double start_s = 0, end_s = 0, waited_s = 0;
    std::shared_ptr<Arrival> arrival = {};  // that a sequence has which has begun
  };
  struct Sequence {
    bool loading = false, given_up = false;  // given up: freed when no copy into it is under way
    bool kept_up = true;                     // its blocks up to the end of chain are in the tiers
    bool when_swapped_out = false;           // it is an arrival that is not kept before (keep_arrivals)
    bool behind = false;                     // … and there was no room for the next: it stands in behind_
    std::vector<int32_t> tokens;             // written; of one that loads, up to its last block's end
    uint64_t salt = 0;
    OffloadTiers::Chain chain;
    int64_t last_out = -1;  // mark of its last copy out
    Load load;
  };
  struct Out {  // a copy out that is under way
    int64_t mark;
    KvLease lease;
    std::vector<int32_t> blocks;  // of the tiers
  };

  Sequence& start(KvHandle handle, std::span<const int32_t> tokens, uint64_t salt);
  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt, bool may_compute);
  bool begin_load(KvHandle handle, KvReservation& reservation, std::span<const int32_t> tokens, uint64_t salt,
                  bool may_compute);
  void advance(KvHandle handle);
  bool copy_in(KvHandle handle);
  int layers_here(const Load& load) const;
  void wait(KvHandle handle, int layer);
  void finish_load(KvHandle handle);
  bool pays(int from, int to, int tokens);
  void cut(Load& load, size_t n);
  void store(KvHandle handle);
  void poll_out();
  void poll_in();
  void leave(KvHandle handle);
  size_t plan_copies(KvHandle handle, const KvView& host, int token_begin, int token_end, KvRange layers, bool out);

  const std::unique_ptr<KvMemory> memory_;
  const std::unique_ptr<OffloadTiers> tiers_;
  const int block_tokens_;
  const bool addresses_go_;  // with a hand-over: page groups are mapped elsewhere then
  const size_t out_budget_;  // blocks whose copy out may be under way
  const std::unique_ptr<DeviceQueue> out_, in_;
  Clock& clock_;
  bool by_layer_ = false;
  Worth worth_;                 // null: whatever a tier has is loaded
  double token_s_ = 0;          // that a token's load takes, in the moving mean
  double forgot_s_ = 0;         // Clock: when it was last made shorter, as nothing was loaded
  double loaded_s_ = 0;         // Clock: the end of the last load
  int64_t loading_tokens_ = 0;  // under way

  std::vector<Sequence> sequences_;  // by handle
  std::vector<KvHandle> loading_;    // in order of arrival
  std::deque<Out> outs_;             // in order
  size_t blocks_out_ = 0;            // in outs_
  std::vector<KvHandle> behind_;     // those that are `behind`
  // Reused.
  std::vector<int32_t> table_;
  std::vector<KvHandle> again_;
  std::vector<Copy> copies_;
};

}  // namespace xpyd::allocator
