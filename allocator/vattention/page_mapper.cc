#include "allocator/vattention/page_mapper.h"

#include "base/clock.h"

namespace xpyd::allocator {

PageMapper::PageMapper(RowPool& pool, std::span<const std::unique_ptr<VirtualRange>> ranges, const KvPlaces& slots)
    : pool_(pool), group_bytes_(pool.groups(0).options().group_bytes), n_rows_(pool.layout().n_blocks) {
  for (int rank = 0; rank < int(ranges.size()); ++rank)
    for (int plane = 0; plane < vattention_planes(slots.layout(rank)); ++plane)
      planes_.push_back({*ranges[size_t(rank)], slots.layout(rank), plane});
  thread_ = std::thread([this] { work(); });
}

PageMapper::~PageMapper() {
  drain();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  posted_.notify_one();
  thread_.join();
}

size_t PageMapper::offset(const Plane& plane, int slot, int row) const {
  return plane.slots.offset(slot, plane.index / 2, plane.index % 2, 0, 0) + size_t(row) * group_bytes_;
}

// Rows that are neighbours in the pool take one call per plane. All or nothing, on all ranks.
bool PageMapper::map_rows(const Job& job) {
  for (int begin = 0, n = int(job.rows.size()); begin < n;) {
    int end = begin + 1;
    while (end < n && job.rows[size_t(end)] == job.rows[size_t(end) - 1] + 1) ++end;
    for (size_t p = 0; p < planes_.size(); ++p) {
      const Plane& plane = planes_[p];
      const int group = plane.index * n_rows_ + job.rows[size_t(begin)];
      if (plane.range.map(offset(plane, job.slot, job.first + begin), group, end - begin)) continue;
      for (size_t q = 0; q < planes_.size(); ++q) unmap_rows(job, planes_[q], q < p ? end : begin);
      return false;
    }
    begin = end;
  }
  return true;
}

// The first n_rows of the job.
void PageMapper::unmap_rows(const Job& job, const Plane& plane, int n_rows) {
  if (n_rows > 0) plane.range.unmap(offset(plane, job.slot, job.first), n_rows);
}

bool PageMapper::execute(const Job& job) {
  if (job.rows.empty()) return true;
  if (job.what == Job::map) return map_rows(job);
  for (const Plane& plane : planes_) unmap_rows(job, plane, int(job.rows.size()));
  if (job.what == Job::unmap_and_release) pool_.release_idle(job.rows);
  return true;
}

void PageMapper::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    posted_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    const bool done = execute(job);
    lock.lock();
    ++n_done_;
    if (!done) failed_.insert(n_done_);
    finished_.notify_all();
  }
}

uint64_t PageMapper::post(Job job) {
  uint64_t ticket;
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(job));
    ticket = ++n_posted_;
  }
  posted_.notify_one();
  return ticket;
}

bool PageMapper::wait(uint64_t ticket) {
  std::unique_lock lock(mutex_);
  if (n_done_ < ticket) {
    const double start = RealClock().now();
    finished_.wait(lock, [&] { return n_done_ >= ticket; });
    stats_.map_wait_seconds += RealClock().now() - start;
    ++stats_.waited_jobs;
  }
  return failed_.erase(ticket) == 0;
}

void PageMapper::drain() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return n_done_ == n_posted_; });
}

bool PageMapper::run(const Job& job) {
  const double start = RealClock().now();
  const bool done = execute(job);
  std::lock_guard lock(mutex_);
  stats_.map_wait_seconds += RealClock().now() - start;
  ++stats_.waited_jobs;
  return done;
}

VattentionStats PageMapper::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace xpyd::allocator
