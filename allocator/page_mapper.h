// The thread that puts page groups behind one memory's addresses, in the order in which it is
// asked. What cannot wait its owner does itself, beside it: addresses of other slots are no matter.
// A row is what one sequence needs for its next T tokens: one group for each plane, that is for
// each (layer, K or V) in layer_major and one in all in token_major ("tensor slicing", vAttention
// section 8.2). Group of (plane, row r) = plane * n_rows + r, so that neighbouring rows are
// neighbours in every plane and one call maps them together.
//
// Thread safety: one owner, the memory's thread, calls everything.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "allocator/block_pool.h"
#include "base/page_groups.h"

namespace xpyd {

class PageMapper {
 public:
  struct Job {
    int slot = 0;
    int first = 0;                                      // row of the slot
    std::vector<int32_t> rows;                          // of the pool, for slot rows first, first + 1, …
    enum { map, unmap, unmap_and_release } what = map;  // released: idle references
  };
  // Cumulative. `stall`: the owner waited for a job, or did it itself.
  struct Stats {
    int64_t owner_jobs = 0, waits = 0;
    double stall_seconds = 0;
  };

  // `layout`: of the virtual slots. The pool outlives the mapper.
  PageMapper(BlockPool& pool, VirtualRange& range, const KvLayout& layout);
  ~PageMapper();

  // In the background; gives a ticket.
  [[nodiscard]] uint64_t post(Job job);
  // Until that job is done. False: it was a map that the system refused; nothing of it is mapped.
  [[nodiscard]] bool wait(uint64_t ticket);
  // Now, on this thread, beside what is queued. Before: the last job of the same slot is done, and
  // so are those that unmap and release these rows: they are free.
  [[nodiscard]] bool run(const Job& job);
  void drain();  // until everything posted is done; counts as no wait
  Stats stats() const;

 private:
  bool execute(const Job& job);
  bool map_rows(const Job& job);
  void unmap_rows(const Job& job, int planes, int n_rows);
  size_t offset(int plane, int slot, int row) const;
  void work();

  BlockPool& pool_;
  VirtualRange& range_;
  const KvLayout layout_;
  const size_t group_bytes_;
  const int n_planes_, n_rows_;

  mutable std::mutex mutex_;
  std::condition_variable posted_, finished_;
  std::deque<Job> queue_;
  uint64_t n_posted_ = 0, n_done_ = 0;  // jobs; a ticket is the number of its job
  std::set<uint64_t> failed_;           // tickets not yet waited for
  bool stop_ = false;
  Stats stats_;
  std::thread thread_;
};

}  // namespace xpyd
