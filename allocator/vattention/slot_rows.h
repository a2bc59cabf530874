// SlotRows: the page-group rows (page_group_rows.h) behind each slot of virtual addresses. A row is mapped when it is
// needed or a little before. Slots may share rows, and keep rows that nobody needs until another slot needs them.
//
// The rows of a slot cover the start of its addresses. The first `busy` of them belong to its sequence, or to a lease.
// The others are idle: they stay mapped, the pool counts them as cached, and any slot that runs short can get them. A
// row may be behind several slots (alias), with a reference each. Only full rows are shared; nobody writes them.
//
// A second thread maps ahead and unmaps, in the order of its jobs. The owner maps urgent rows itself at the same time,
// because different slots have different addresses.
//
// Thread safety: the owner's thread; any thread may call mappings(), reclaimed() and stats().
#pragma once

#include <atomic>
#include <climits>
#include <future>
#include <memory>
#include <span>
#include <vector>

#include "allocator/prefix/slot_contents.h"
#include "allocator/vattention/page_group_rows.h"
#include "base/job_thread.h"

namespace xpyd::allocator {

class SlotRows {
 public:
  // `ranges`: the addresses of each rank. `slots`: their layouts, which outlive this object. `most_mappings`: limit of
  // mappings(); 0: none. `contents` is truncated when rows are given back.
  SlotRows(PageGroupRows& pool, std::vector<std::unique_ptr<VirtualRange>> ranges, const KvPlaces& slots,
           int64_t most_mappings, SlotContents& contents);
  ~SlotRows();

  std::span<const int32_t> rows(int slot) const { return slots_[size_t(slot)].rows; }
  int busy(int slot) const { return slots_[size_t(slot)].busy; }
  // Makes the slot's rows [0, n) busy, as far as it has them, and the others idle.
  void set_busy(int slot, int n);
  // begin() marks a slot as a sequence's, so that its rows are reclaimed last. end() marks it as idle from now on.
  void begin(int slot) { slots_[size_t(slot)].idle_since = kLive; }
  void end(int slot) { slots_[size_t(slot)].idle_since = ++clock_; }
  bool live(int slot) const { return slots_[size_t(slot)].idle_since == kLive; }
  int64_t idle_since(int slot) const { return slots_[size_t(slot)].idle_since; }

  // Maps rows [0, n) behind the slot and makes them busy. False: there are too few rows, or too few mappings are left;
  // the slot is as before, but others may have lost idle rows.
  [[nodiscard]] bool grow(int slot, int n);
  // Maps up to row n in the background, as idle rows, if 5 % of the rows stay free.
  void grow_ahead(int slot, int n);
  // Maps the first n rows of `donor` as the first rows of `slot` too, busy there. Requires: the donor has these rows,
  // and they are full. The slot's rows so far must be idle, and are given back. False: too few mappings are left.
  [[nodiscard]] bool alias(int slot, int donor, int n);

  // Returns the end of the run of rows from `from` on that nobody else shares. A sequence that writes from row `from`
  // on may keep the rows before that end.
  int unshared_from(int slot, int from) const;
  // Cuts the slot to its first `keep` rows. The others, which must be idle, are unmapped in the background, then free.
  void give_back(int slot, int keep);
  // Gives back up to n_rows idle rows, in the background, and returns their number. `live`: also the idle rows of
  // sequences.
  int reclaim(int n_rows, bool live = false);
  int64_t reclaimed() const { return reclaimed_.load(std::memory_order_relaxed); }

  void wait(int slot, int n) const;  // waits until rows [0, n) are mapped
  void drain() const { thread_.drain(); }

  // The number of mappings as the system counts them: runs of adjacent rows, in each plane of each rank.
  int64_t mappings() const { return runs_.load(std::memory_order_relaxed) * int64_t(planes_.size()); }
  VattentionStats stats() const;
  void count_references(std::vector<int32_t>& busy, std::vector<int32_t>& idle) const;  // adds to [rows of the pool]

 private:
  static constexpr int64_t kLive = LLONG_MAX;
  struct Slot {
    std::vector<int32_t> rows;
    int busy = 0;
    int64_t idle_since = 0;
    std::future<bool> job;  // its last job, until it has been waited for
    int first_of_job = 0;   // the rows before this one are mapped
  };
  struct Plane {
    VirtualRange& range;
    const KvLayout& slots;
    int index;  // number of the plane on its rank
  };

  bool map(int slot, int first, const std::vector<int32_t>& rows);
  bool map_now(int slot, int first, const std::vector<int32_t>& rows);
  void unmap(const Plane& plane, int slot, int first, int n_rows);
  size_t offset(const Plane& plane, int slot, int row) const;
  bool settle(Slot& slot);
  std::vector<int32_t> cut(Slot& slot, int keep);
  [[nodiscard]] bool make_free(int n_rows);
  int victim(bool live) const;

  PageGroupRows& pool_;
  const int row_tokens_;
  const size_t group_bytes_;
  SlotContents& contents_;
  const std::vector<std::unique_ptr<VirtualRange>> ranges_;
  std::vector<Plane> planes_;  // of all ranks
  std::vector<Slot> slots_;
  const int64_t most_runs_;
  std::atomic<int64_t> runs_{0}, reclaimed_{0}, map_calls_{0}, unmap_calls_{0};
  mutable std::atomic<double> wait_s_{0};  // the owner's thread writes it
  int64_t clock_ = 0;
  mutable JobThread thread_;  // last, so that its jobs end before what they use goes
};

}  // namespace xpyd::allocator
