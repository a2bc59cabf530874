// SlotRows: the page-group rows (page_group_rows.h) behind each slot of virtual addresses. A row is mapped when it is
// needed or a little before. Slots may share rows, and keep rows that nobody needs until another slot needs them.
//
// The rows of a slot cover the start of its addresses. The first `busy` of them belong to its sequence, or to a lease.
// The others are idle: they stay mapped, the pool counts them as cached, and any slot that runs short can get them. A
// row may be behind several slots (alias), with a reference each. Only full rows are shared; nobody writes them.
//
// Thread safety: the owner's thread; any thread may call mappings(), reclaimed() and stats().
#pragma once

#include <atomic>
#include <climits>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "allocator/prefix/slot_contents.h"
#include "allocator/vattention/page_group_rows.h"

namespace xpyd::allocator {

// PageMapper: a thread that maps and unmaps page groups behind one memory's addresses, in the order of its jobs. The
// owner runs urgent jobs itself at the same time, because different slots have different addresses.
//
// Thread safety: one owner, the memory's thread, calls everything; any thread may call stats().
class PageMapper {
 public:
  struct Job {
    int slot = 0;
    int first = 0;                                      // the first row in the slot
    std::vector<int32_t> rows;                          // rows of the pool, for slot rows first, first + 1, …
    enum { map, unmap, unmap_and_release } what = map;  // unmap_and_release also drops idle references
  };
  // `ranges`: the addresses of each rank. `slots`: the layout of the virtual slots. All three outlive the mapper.
  PageMapper(PageGroupRows& pool, std::span<const std::unique_ptr<VirtualRange>> ranges, const KvPlaces& slots);
  ~PageMapper();

  // Queues the job, and returns its ticket.
  [[nodiscard]] uint64_t post(Job job);
  // Waits until that job is done. False: it was a map that the system refused, and none of it is mapped.
  [[nodiscard]] bool wait(uint64_t ticket);
  // Runs the job now, on this thread, beside the queue. Requires: the last job of the same slot is done, and so are all
  // jobs that unmap and release these rows, because the rows were free.
  [[nodiscard]] bool run(const Job& job);
  void drain();  // waits until every posted job is done; not counted as a wait
  // Gives waited_jobs (jobs that the owner waited for or ran itself) and map_wait_seconds.
  VattentionStats stats() const;

 private:
  bool execute(const Job& job);
  struct Plane {
    VirtualRange& range;
    const KvLayout& slots;
    int index;  // number of the plane on its rank
  };
  bool map_rows(const Job& job);
  void unmap_rows(const Job& job, const Plane& plane, int n_rows);
  size_t offset(const Plane& plane, int slot, int row) const;
  void work();

  PageGroupRows& pool_;
  std::vector<Plane> planes_;  // of all ranks
  const size_t group_bytes_;
  const int n_rows_;

  mutable std::mutex mutex_;
  std::condition_variable posted_, finished_;
  std::deque<Job> queue_;
  uint64_t n_posted_ = 0, n_done_ = 0;  // numbers of jobs; a ticket is the number of its job
  std::set<uint64_t> failed_;           // tickets not yet waited for
  bool stop_ = false;
  VattentionStats stats_;
  std::thread thread_;
};

class SlotRows {
 public:
  // `ranges`: the addresses of each rank. `slots`: their layouts, which outlive this object. `contents` is truncated
  // when rows are given back.
  SlotRows(PageGroupRows& pool, std::vector<std::unique_ptr<VirtualRange>> ranges, const KvPlaces& slots,
           bool map_ahead, SlotContents& contents);
  ~SlotRows();

  std::span<const int32_t> rows(int slot) const { return slots_[size_t(slot)].rows; }
  int busy(int slot) const { return slots_[size_t(slot)].busy; }
  // Makes the slot's rows [0, n) busy, as far as it has them, and the others idle.
  void set_busy(int slot, int n);
  // begin() marks a slot as a sequence's, so that its rows are reclaimed last. end() marks it as idle from now on.
  void begin(int slot) { slots_[size_t(slot)].idle_since = kLive; }
  void end(int slot) { slots_[size_t(slot)].idle_since = ++clock_; }
  int64_t idle_since(int slot) const { return slots_[size_t(slot)].idle_since; }

  // Maps rows [0, n) behind the slot and makes them busy. False: there are too few rows, or the system refuses to map
  // them; the slot is as before, but others may have lost idle rows.
  [[nodiscard]] bool grow(int slot, int n);
  // Maps up to row n in the background, as idle rows, if 5 % of the rows stay free. False: not possible now.
  bool grow_ahead(int slot, int n);
  // Maps the first n rows of `donor` as the first rows of `slot` too, busy there. Requires: the donor has these rows,
  // and they are full. The slot's rows so far must be idle, and are given back. False: the system refuses.
  [[nodiscard]] bool alias(int slot, int donor, int n);
  // Maps rows that another memory handed over. False: the system refuses, and the slot has no rows.
  [[nodiscard]] bool adopt(int slot, std::span<const int32_t> rows) { return put(slot, rows); }
  // Returns the first n rows with their references, and leaves the slot without rows.
  std::vector<int32_t> take(int slot, int n);

  // Returns the end of the run of rows from `from` on that nobody else shares. A sequence that writes from row `from`
  // on may keep the rows before that end.
  int unshared_from(int slot, int from) const;
  // Cuts the slot to its first `keep` rows. The others, which must be idle, are unmapped in the background, then free.
  void give_back(int slot, int keep);
  // Frees rows until the pool has n_rows free ones: first rows of idle slots, of the longest idle slot first and from
  // its end, then rows that sequences do not need yet. False: there are not so many.
  [[nodiscard]] bool make_free(int n_rows);
  // Gives back up to n_rows idle rows of slots other than `except`, in the background, and returns their number.
  // `live`: also the idle rows of sequences.
  int reclaim(int n_rows, int except, bool live = false);
  int64_t reclaimed() const { return reclaimed_.load(std::memory_order_relaxed); }

  // Waits until rows [0, n) are mapped.
  void wait(int slot, int n) const;
  void drain() const { mapper_.drain(); }

  // The number of mappings as the system counts them: runs of adjacent rows, in each plane of each rank.
  int64_t mappings() const { return runs_.load(std::memory_order_relaxed) * n_planes_; }
  VattentionStats stats() const;
  void count_references(std::vector<int32_t>& busy, std::vector<int32_t>& idle) const;  // adds to [rows of the pool]

 private:
  static constexpr int64_t kLive = LLONG_MAX;
  struct Slot {
    std::vector<int32_t> rows;
    int busy = 0;
    int64_t idle_since = 0;
    uint64_t job = 0;      // ticket of its last job, until it has been waited for
    int first_of_job = 0;  // the rows before this one are mapped
    bool shared = false;   // some of its rows may be shared
  };

  bool put(int slot, std::span<const int32_t> rows);
  bool settle(Slot& slot);
  void added(Slot& slot, size_t from);
  std::vector<int32_t> cut(Slot& slot, int keep);
  void post(Slot& slot, PageMapper::Job job);
  void give_back_idle();
  int victim(int except, bool live) const;

  PageGroupRows& pool_;
  const int row_tokens_, n_planes_;
  const bool map_ahead_;
  SlotContents& contents_;
  const std::vector<std::unique_ptr<VirtualRange>> ranges_;
  mutable PageMapper mapper_;
  std::vector<Slot> slots_;
  std::atomic<int64_t> runs_{0}, reclaimed_{0};
  int64_t clock_ = 0;
  uint64_t last_release_ = 0;  // ticket
};

}  // namespace xpyd::allocator
