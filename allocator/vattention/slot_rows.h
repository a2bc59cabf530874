// The rows of page groups behind each slot of virtual addresses (vattention): mapped when needed or a little before,
// shared between slots, kept when nobody needs them and given back when somebody does.
//
// A slot's rows are a prefix of its addresses. The first `busy` of them belong to its sequence, or to a lease; the
// others are idle: they stay mapped, the pool counts them as cached, and any slot that runs short gets them. A row may
// be behind several slots (alias), each with a reference; only full rows are shared, which nobody writes any more.
//
// Thread safety: the owner's thread; mappings() any.
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

// The thread that puts page groups behind one memory's addresses, in the order in which it is
// asked. What cannot wait its owner does itself, beside it: addresses of other slots are no matter.
//
// Thread safety: one owner, the memory's thread, calls everything.
class PageMapper {
 public:
  struct Job {
    int slot = 0;
    int first = 0;                                      // row of the slot
    std::vector<int32_t> rows;                          // of the pool, for slot rows first, first + 1, …
    enum { map, unmap, unmap_and_release } what = map;  // released: idle references
  };
  // `ranges`: the addresses of each rank; `slots`: of the virtual slots. All of it outlives the mapper.
  PageMapper(PageGroupRows& pool, std::span<const std::unique_ptr<VirtualRange>> ranges, const KvPlaces& slots);
  ~PageMapper();

  // In the background; gives a ticket.
  [[nodiscard]] uint64_t post(Job job);
  // Until that job is done. False: it was a map that the system refused; nothing of it is mapped.
  [[nodiscard]] bool wait(uint64_t ticket);
  // Now, on this thread, beside what is queued. Before: the last job of the same slot is done, and
  // so are those that unmap and release these rows: they are free.
  [[nodiscard]] bool run(const Job& job);
  void drain();  // until everything posted is done; counts as no wait
  // waited_jobs (those that the owner waited for, or did itself) and map_wait_seconds.
  VattentionStats stats() const;

 private:
  bool execute(const Job& job);
  struct Plane {
    VirtualRange& range;
    const KvLayout& slots;
    int index;  // on its rank
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
  uint64_t n_posted_ = 0, n_done_ = 0;  // jobs; a ticket is the number of its job
  std::set<uint64_t> failed_;           // tickets not yet waited for
  bool stop_ = false;
  VattentionStats stats_;
  std::thread thread_;
};

class SlotRows {
 public:
  // `ranges`: the addresses of each rank; `slots`: their layouts, which outlive the rows. What
  // `contents` knows of rows that are given back is truncated.
  SlotRows(PageGroupRows& pool, std::vector<std::unique_ptr<VirtualRange>> ranges, const KvPlaces& slots,
           bool map_ahead, SlotContents& contents);
  ~SlotRows();

  std::span<const int32_t> rows(int slot) const { return slots_[size_t(slot)].rows; }
  int busy(int slot) const { return slots_[size_t(slot)].busy; }
  // Rows [0, n), of those it has, are in use; those behind are idle.
  void set_busy(int slot, int n);
  // In use from now on, and not the victim of those that need idle slots' rows; or idle since now.
  void begin(int slot) { slots_[size_t(slot)].idle_since = kLive; }
  void end(int slot) { slots_[size_t(slot)].idle_since = ++clock_; }
  int64_t idle_since(int slot) const { return slots_[size_t(slot)].idle_since; }

  // Rows [0, n) are behind the slot and busy. False: there are not so many, or the system refuses
  // to map them; nothing has changed.
  [[nodiscard]] bool grow(int slot, int n);
  // The same in the background, idle, and only from rows that nobody has. False: not now.
  bool grow_ahead(int slot, int n);
  // The first n rows of `donor` are the first of `slot`, too, and busy there. Before: the donor has
  // them, full; what is behind the slot is idle and goes. False: the system refuses.
  [[nodiscard]] bool alias(int slot, int donor, int n);
  // Rows that another memory gave away. False: the system refuses; the slot has none.
  [[nodiscard]] bool adopt(int slot, std::span<const int32_t> rows) { return put(slot, rows); }
  // The first n rows with their references: nothing is behind the slot any more.
  std::vector<int32_t> take(int slot, int n);

  // Rows from `from` on that nobody shares, counted from the start: a sequence that writes from row
  // `from` on may keep those before.
  int unshared_from(int slot, int from) const;
  // The slot keeps its first `keep` rows; the others are unmapped in the background, then free. Before: they are idle.
  void give_back(int slot, int keep);
  // Free rows in the pool, taken from idle slots first, the longest idle first and from its end,
  // then from rows that sequences do not need yet. False: there are not so many.
  [[nodiscard]] bool make_free(int n_rows);
  // In the background, from slots but `except`, of sequences (`live`) what they do not need yet; gives the number of
  // rows.
  int reclaim(int n_rows, int except, bool live = false);
  int64_t reclaimed() const { return reclaimed_.load(std::memory_order_relaxed); }

  // Until rows [0, n) are in place.
  void wait(int slot, int n) const;
  void drain() const { mapper_.drain(); }

  // Mappings as the system counts them: runs of neighbours, in each plane of each rank.
  int64_t mappings() const { return runs_.load(std::memory_order_relaxed) * n_planes_; }
  VattentionStats stats() const;
  void count_references(std::vector<int32_t>& busy, std::vector<int32_t>& idle) const;  // adds, [rows of the pool]

 private:
  static constexpr int64_t kLive = LLONG_MAX;
  struct Slot {
    std::vector<int32_t> rows;
    int busy = 0;
    int64_t idle_since = 0;
    uint64_t job = 0;      // ticket of the last one, until somebody waited for it
    int first_of_job = 0;  // rows before it are in place
    bool shared = false;   // some of its rows may be
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
