// VattentionMemory: contiguous addresses with memory behind what is used. Its algorithm stands in vattention.cc, what
// sequences share of each other's rows in vattention_share.cc, what it asks of a system in vattention_plan.cc.
//
// Thread safety: as KvMemory.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "allocator/pool/pooled.h"
#include "allocator/vattention/slot_rows.h"

namespace xpyd::allocator {

class VattentionMemory final : public PooledMemory {
 public:
  // `slots`: at the addresses of `ranges`.
  VattentionMemory(std::shared_ptr<KvPool> pool, const KvOptions& options, const KvPlaces& slots,
                   std::vector<std::unique_ptr<VirtualRange>> ranges)
      : PooledMemory(std::move(pool), options, "vattention", slots),
        row_tokens_(pool_->layout().block_tokens),
        token_bytes_(slots.layout(0).token_stride()),
        share_(options.prefix_cache ? options.vattention.share : KvShare::off),
        contents_(layout().n_blocks),
        row_pool_(dynamic_cast<RowPool&>(*pool_)),
        rows_(row_pool_, std::move(ranges), places(), options.vattention.map_ahead, contents_),
        slots_(size_t(layout().n_blocks)) {
    prepare_idle_slot();
  }

  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override;
  int probe(std::span<const int32_t> tokens, uint64_t salt) const override;
  bool append(KvHandle handle, int n_tokens) override;
  void written(KvHandle handle, std::span<const int32_t> tokens) override;
  void trim(KvHandle handle) override;
  Result<KvHandle> fork(KvHandle handle) override;
  void free(KvHandle handle) override;
  KvLease pin(KvHandle handle, int token_begin, int token_end) override;
  void unpin(KvLease lease) override;
  KvHandover hand_over(KvHandle handle) override;
  KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) override;
  KvView view(KvHandle handle, int rank) const override;
  bool tail_shared(KvHandle) const override { return false; }
  KvStats stats() const override;
  void clear_prefix_cache() override { contents_.clear_idle(); }
  void check_invariants(bool complete) const override;

 private:
  struct Slot {
    bool live = false;
    int pins = 0;         // leases on its addresses: …
    int pinned_rows = 0;  // … these stay as they are
  };

  int rows_for(int tokens) const { return (tokens + row_tokens_ - 1) / row_tokens_; }
  // Rows all of whose bytes belong to the first `tokens` tokens: who shares them never writes there.
  int full_rows(int tokens) const { return int(size_t(tokens) * token_bytes_ / options_.vattention.page_group_bytes); }
  bool sharing() const { return share_ != KvShare::off; }
  bool usable(int slot) const { return !slots_[size_t(slot)].live && slots_[size_t(slot)].pins == 0; }
  void set_busy(int slot, int rows) { rows_.set_busy(slot, std::max(rows, slots_[size_t(slot)].pinned_rows)); }
  int find_slot(int rows, int except) const;
  KvHandle open(int slot, int tokens);
  void clear(int slot);
  bool take_over(SlotContents::Match& match);
  bool clone(int slot, int donor, int tokens, int room);
  void copy_bytes(int to, int from, size_t begin, size_t end);
  int attach(SlotContents::Match& match, int n_tokens);
  void let_go(int slot);
  void ended(int slot);
  void prepare_idle_slot();
  std::span<const int32_t> table_of(const Sequence& s) const override {
    XPYD_CHECK(rows_for(s.room) <= int(rows_.rows(s.slot).size()));
    return rows_.rows(s.slot).first(size_t(rows_for(s.room)));
  }
  void count_references(std::vector<int32_t>& references) const override {
    std::vector<int32_t> idle(references.size(), 0);
    rows_.count_references(references, idle);
  }
  void check_sequence(const Sequence& s) const override;

  const int row_tokens_;
  const size_t token_bytes_;  // of one token in one plane, on every rank
  const KvShare share_;
  SlotContents contents_;
  RowPool& row_pool_;
  SlotRows rows_;
  std::vector<Slot> slots_;
  std::vector<int> lease_slots_;  // by lease, whose rows are the slot's first ones; -1: there is no such lease
};

}  // namespace xpyd::allocator
