// The thread that puts page groups behind one memory's addresses, in the order in which it is
// asked. What cannot wait its owner does itself, beside it: addresses of other slots are no matter.
//
// Thread safety: one owner, the memory's thread, calls everything.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "allocator/vattention/row_pool.h"

namespace xpyd::allocator {

class PageMapper {
 public:
  struct Job {
    int slot = 0;
    int first = 0;                                      // row of the slot
    std::vector<int32_t> rows;                          // of the pool, for slot rows first, first + 1, …
    enum { map, unmap, unmap_and_release } what = map;  // released: idle references
  };
  // `ranges`: the addresses of each rank; `slots`: of the virtual slots. All of it outlives the mapper.
  PageMapper(RowPool& pool, std::span<const std::unique_ptr<VirtualRange>> ranges, const KvPlaces& slots);
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

  RowPool& pool_;
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

}  // namespace xpyd::allocator
