#include "allocator/vattention/slot_rows.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace xpyd::allocator {
namespace {

// Returns the number of runs of adjacent rows that begin at index `from` or later.
int64_t runs(const std::vector<int32_t>& rows, size_t from) {
  int64_t n = 0;
  for (size_t i = from; i < rows.size(); ++i) n += i == 0 || rows[i] != rows[i - 1] + 1;
  return n;
}

}  // namespace

SlotRows::SlotRows(PageGroupRows& pool, std::vector<std::unique_ptr<VirtualRange>> ranges, const KvPlaces& slots,
                   bool map_ahead, SlotContents& contents)
    : pool_(pool),
      row_tokens_(pool.layout().block_tokens),
      n_planes_(int(pool.block_bytes() / pool.groups(0).options().group_bytes)),
      map_ahead_(map_ahead),
      contents_(contents),
      ranges_(std::move(ranges)),
      mapper_(pool, ranges_, slots),
      slots_(size_t(slots.whole.n_blocks)) {}

SlotRows::~SlotRows() {
  mapper_.drain();
  for (int i = 0; i < int(slots_.size()); ++i) {
    set_busy(i, INT_MAX);
    pool_.release(slots_[size_t(i)].rows);
  }
}

void SlotRows::set_busy(int index, int n) {
  Slot& slot = slots_[size_t(index)];
  n = std::min(n, int(slot.rows.size()));
  const auto part = [&](int from, int to) {
    return std::span<const int32_t>(slot.rows).subspan(size_t(from), size_t(to - from));
  };
  if (n > slot.busy) pool_.set_idle(part(slot.busy, n), false);
  if (n < slot.busy) pool_.set_idle(part(n, slot.busy), true);
  slot.busy = n;
}

void SlotRows::added(Slot& slot, size_t from) { runs_.fetch_add(runs(slot.rows, from), std::memory_order_relaxed); }

std::vector<int32_t> SlotRows::cut(Slot& slot, int keep) {
  runs_.fetch_sub(runs(slot.rows, size_t(keep)), std::memory_order_relaxed);
  std::vector<int32_t> gone(slot.rows.begin() + keep, slot.rows.end());
  slot.rows.resize(size_t(keep));
  if (keep == 0) slot.shared = false;
  return gone;
}

void SlotRows::post(Slot& slot, PageMapper::Job job) {
  slot.first_of_job = job.first;
  slot.job = mapper_.post(std::move(job));
}

// Waits for the slot's last job, and drops the idle rows that the system refused to map. False: there were such rows.
bool SlotRows::settle(Slot& slot) {
  if (mapper_.wait(std::exchange(slot.job, 0))) return true;
  pool_.release_idle(cut(slot, slot.first_of_job));
  return false;
}

void SlotRows::wait(int index, int n) const {
  const Slot& slot = slots_[size_t(index)];
  if (slot.job != 0 && n > slot.first_of_job) mapper_.drain();
}

bool SlotRows::grow(int index, int n) {
  Slot& slot = slots_[size_t(index)];
  const int busy = slot.busy;
  if (n <= busy) return true;
  if (slot.job != 0 && n > slot.first_of_job) settle(slot);
  const int have = int(slot.rows.size()), more = n - have;
  set_busy(index, n);
  if (more <= 0) return true;
  if (!make_free(more) || !pool_.allocate(more, slot.rows)) {
    set_busy(index, busy);
    return false;
  }
  PageMapper::Job job{.slot = index, .first = have, .rows = {slot.rows.begin() + have, slot.rows.end()}};
  if (mapper_.run(job)) {
    added(slot, size_t(have));
    slot.busy = n;
    return true;
  }
  pool_.release(job.rows);
  slot.rows.resize(size_t(have));
  set_busy(index, busy);
  give_back_idle();
  return false;
}

bool SlotRows::grow_ahead(int index, int n) {
  Slot& slot = slots_[size_t(index)];
  if (!map_ahead_ || n <= int(slot.rows.size()) || !settle(slot)) return false;
  const int have = int(slot.rows.size()), more = n - have;
  if (pool_.stats().free < more + pool_.layout().n_blocks / 20) return false;
  if (!pool_.allocate(more, slot.rows)) return false;
  PageMapper::Job job{.slot = index, .first = have, .rows = {slot.rows.begin() + have, slot.rows.end()}};
  pool_.set_idle(job.rows, true);
  added(slot, size_t(have));
  post(slot, std::move(job));
  return true;
}

// Replaces the slot's rows by these, busy. False: the system refuses, and the slot has no rows.
bool SlotRows::put(int index, std::span<const int32_t> rows) {
  give_back(index, 0);
  Slot& slot = slots_[size_t(index)];
  settle(slot);
  PageMapper::Job job{.slot = index, .rows = {rows.begin(), rows.end()}};
  if (!mapper_.run(job)) {
    give_back_idle();
    return false;
  }
  slot.rows = std::move(job.rows);
  slot.busy = int(slot.rows.size());
  slot.shared = true;  // adopted rows may have been forked before
  added(slot, 0);
  return true;
}

bool SlotRows::alias(int index, int donor, int n) {
  wait(donor, n);
  if (!put(index, rows(donor).first(size_t(n)))) return false;
  pool_.add_references(rows(index));
  slots_[size_t(donor)].shared = true;
  return true;
}

std::vector<int32_t> SlotRows::take(int index, int n) {
  Slot& slot = slots_[size_t(index)];
  settle(slot);
  set_busy(index, n);
  give_back(index, n);
  slot.busy = 0;
  std::vector<int32_t> rows = cut(slot, 0);
  post(slot, {.slot = index, .rows = rows, .what = PageMapper::Job::unmap});
  return rows;
}

int SlotRows::unshared_from(int index, int from) const {
  const Slot& slot = slots_[size_t(index)];
  const int n = int(slot.rows.size());
  if (!slot.shared || from >= n) return n;
  return from + pool_.n_unshared(std::span<const int32_t>(slot.rows).subspan(size_t(from)));
}

void SlotRows::give_back(int index, int keep) {
  Slot& slot = slots_[size_t(index)];
  contents_.truncate(index, keep * row_tokens_);
  if (keep >= int(slot.rows.size())) return;
  settle(slot);
  if (keep >= int(slot.rows.size())) return;
  XPYD_CHECK(keep >= slot.busy, "rows in use are given back");
  post(slot, {.slot = index, .first = keep, .rows = cut(slot, keep), .what = PageMapper::Job::unmap_and_release});
  last_release_ = slot.job;
}

// Reclaiming rows (vAttention section 6.1.2): first from idle slots, the longest idle first and from its end; then the
// rows that sequences do not need yet.

// The system has refused a mapping. Gives back those of idle slots, so that the next try may succeed.
void SlotRows::give_back_idle() {
  for (int i; (i = victim(-1, false)) >= 0;) give_back(i, slots_[size_t(i)].busy);
}

bool SlotRows::make_free(int n_rows) {
  for (;;) {
    const KvStats stats = pool_.stats();
    if (stats.free >= n_rows) return true;
    if (stats.free + stats.cached < n_rows) return false;
    const int given = reclaim(n_rows - stats.free, -1, true);
    (void)mapper_.wait(last_release_);                    // a row is free once it is unmapped
    if (given == 0) return pool_.stats().free >= n_rows;  // other memories have them
  }
}

int SlotRows::reclaim(int n_rows, int except, bool live) {
  int given = 0;
  while (given < n_rows) {
    const int i = victim(except, live);
    if (i < 0) break;
    const int has = int(slots_[size_t(i)].rows.size()), gives = std::min(has - slots_[size_t(i)].busy, n_rows - given);
    give_back(i, has - gives);
    given += gives;
  }
  reclaimed_.fetch_add(given, std::memory_order_relaxed);
  return given;
}

// Returns the slot that gives rows back next. `live`: slots of sequences too, which give what they do not need yet.
int SlotRows::victim(int except, bool live) const {
  int oldest = -1;
  for (int i = 0; i < int(slots_.size()); ++i) {
    const Slot& slot = slots_[size_t(i)];
    if (i == except || slot.busy == int(slot.rows.size())) continue;
    if (slot.idle_since == kLive && !live) continue;
    if (oldest < 0 || slot.idle_since < slots_[size_t(oldest)].idle_since) oldest = i;
  }
  return oldest;
}

VattentionStats SlotRows::stats() const {
  VattentionStats stats = mapper_.stats();
  for (const auto& range : ranges_) {
    stats.map_calls += range->calls.maps.load(std::memory_order_relaxed);
    stats.unmap_calls += range->calls.unmaps.load(std::memory_order_relaxed);
  }
  return stats;
}

void SlotRows::count_references(std::vector<int32_t>& busy, std::vector<int32_t>& idle) const {
  int64_t counted = 0;
  for (const Slot& slot : slots_) {
    XPYD_CHECK(slot.busy >= 0 && slot.busy <= int(slot.rows.size()));
    counted += runs(slot.rows, 0);
    for (size_t i = 0; i < slot.rows.size(); ++i) ++(int(i) < slot.busy ? busy : idle)[size_t(slot.rows[i])];
  }
  XPYD_CHECK(counted == runs_.load());
}

// ---- The mapping thread.

PageMapper::PageMapper(PageGroupRows& pool, std::span<const std::unique_ptr<VirtualRange>> ranges,
                       const KvPlaces& slots)
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

// Maps adjacent rows with one call per plane. Maps all of the job, on all ranks, or nothing.
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

// Unmaps the first n_rows of the job.
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
