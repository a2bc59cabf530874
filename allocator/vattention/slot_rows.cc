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

// Returns the runs for which `most` mappings suffice. Behind a slot's last run there is one more mapping, without memory.
int64_t runs_within(int64_t most, int64_t n_planes, int64_t n_slots) {
  return most == 0 ? LLONG_MAX : most / n_planes - std::min(n_slots, most / n_planes / 2);
}

}  // namespace

SlotRows::SlotRows(PageGroupRows& pool, std::vector<std::unique_ptr<VirtualRange>> ranges, const KvPlaces& slots,
                   int64_t most_mappings, SlotContents& contents)
    : pool_(pool),
      row_tokens_(pool.layout().block_tokens),
      group_bytes_(pool.groups(0).options().group_bytes),
      contents_(contents),
      ranges_(std::move(ranges)),
      slots_(size_t(slots.whole.n_blocks)),
      most_runs_(runs_within(most_mappings, int64_t(pool.block_bytes() / group_bytes_), slots.whole.n_blocks)) {
  for (int rank = 0; rank < int(ranges_.size()); ++rank)
    for (int plane = 0; plane < vattention_planes(slots.layout(rank)); ++plane)
      planes_.push_back({*ranges_[size_t(rank)], slots.layout(rank), plane});
}

SlotRows::~SlotRows() {
  drain();
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

std::vector<int32_t> SlotRows::cut(Slot& slot, int keep) {
  runs_.fetch_sub(runs(slot.rows, size_t(keep)), std::memory_order_relaxed);
  std::vector<int32_t> gone(slot.rows.begin() + keep, slot.rows.end());
  slot.rows.resize(size_t(keep));
  return gone;
}

// Waits for the slot's last job, and drops the idle rows that the system refused to map. False: there were such rows.
bool SlotRows::settle(Slot& slot) {
  if (!slot.job.valid()) return true;
  wait(int(&slot - slots_.data()), INT_MAX);
  if (slot.job.get()) return true;  // `job` is empty now
  pool_.release_idle(cut(slot, slot.first_of_job));
  return false;
}

void SlotRows::wait(int index, int n) const {
  const Slot& slot = slots_[size_t(index)];
  if (!slot.job.valid() || n <= slot.first_of_job) return;
  if (slot.job.wait_for(std::chrono::seconds(0)) == std::future_status::ready) return;
  const double start = RealClock().now();
  slot.job.wait();
  wait_s_ = wait_s_ + RealClock().now() - start;
}

bool SlotRows::grow(int index, int n) {
  Slot& slot = slots_[size_t(index)];
  const int busy = slot.busy;
  if (n <= busy) return true;
  if (n > slot.first_of_job) settle(slot);
  const int have = int(slot.rows.size()), more = n - have;
  set_busy(index, n);
  if (more <= 0) return true;
  if (!make_free(more) || !pool_.allocate(more, slot.rows)) {
    set_busy(index, busy);
    return false;
  }
  if (map_now(index, have, {slot.rows.begin() + have, slot.rows.end()})) {
    slot.busy = n;
    return true;
  }
  pool_.release(std::span<const int32_t>(slot.rows).subspan(size_t(have)));
  slot.rows.resize(size_t(have));
  set_busy(index, busy);
  reclaim(INT_MAX);  // idle slots give back their mappings, so that the next try may succeed
  return false;
}

void SlotRows::grow_ahead(int index, int n) {
  Slot& slot = slots_[size_t(index)];
  if (n <= int(slot.rows.size()) || !settle(slot)) return;
  const int have = int(slot.rows.size()), more = n - have;
  if (runs_.load() + more > most_runs_ || pool_.stats().free < more + pool_.layout().n_blocks / 20) return;
  if (!pool_.allocate(more, slot.rows)) return;
  std::vector<int32_t> rows(slot.rows.begin() + have, slot.rows.end());
  pool_.set_idle(rows, true);
  runs_.fetch_add(runs(slot.rows, size_t(have)), std::memory_order_relaxed);
  slot.first_of_job = have;
  slot.job = thread_.post([this, index, have, rows = std::move(rows)] { return map(index, have, rows); });
}

bool SlotRows::alias(int index, int donor, int n) {
  wait(donor, n);
  give_back(index, 0);
  Slot& slot = slots_[size_t(index)];
  settle(slot);
  const std::span<const int32_t> shared = rows(donor).first(size_t(n));
  slot.rows.assign(shared.begin(), shared.end());
  if (!map_now(index, 0, slot.rows)) {
    slot.rows.clear();
    reclaim(INT_MAX);
    return false;
  }
  slot.busy = n;
  pool_.add_references(slot.rows);
  return true;
}

int SlotRows::unshared_from(int index, int from) const {
  const Slot& slot = slots_[size_t(index)];
  const int n = int(slot.rows.size());
  return from >= n ? n : from + pool_.n_unshared(std::span<const int32_t>(slot.rows).subspan(size_t(from)));
}

void SlotRows::give_back(int index, int keep) {
  Slot& slot = slots_[size_t(index)];
  contents_.truncate(index, keep * row_tokens_);
  if (keep >= int(slot.rows.size())) return;
  settle(slot);
  if (keep >= int(slot.rows.size())) return;
  XPYD_CHECK(keep >= slot.busy, "rows in use are given back");
  slot.first_of_job = keep;
  slot.job = thread_.post([this, index, keep, rows = cut(slot, keep)] {
    for (const Plane& plane : planes_) unmap(plane, index, keep, int(rows.size()));
    pool_.release_idle(rows);
    return true;
  });
}

// Reclaiming rows (vAttention section 6.1.2): first from idle slots, the longest idle first and from its end; then the
// rows that sequences do not need yet.

// Frees rows until the pool has n_rows free ones. False: there are not so many.
bool SlotRows::make_free(int n_rows) {
  for (;;) {
    const KvStats stats = pool_.stats();
    if (stats.free >= n_rows) return true;
    if (stats.free + stats.cached < n_rows) return false;
    reclaim(n_rows - stats.free, true);
    const double start = RealClock().now();
    drain();  // a row is free once it is unmapped
    wait_s_ = wait_s_ + RealClock().now() - start;
  }
}

int SlotRows::reclaim(int n_rows, bool live) {
  int given = 0;
  while (given < n_rows) {
    const int i = victim(live);
    if (i < 0) break;
    const int has = int(slots_[size_t(i)].rows.size()), gives = std::min(has - slots_[size_t(i)].busy, n_rows - given);
    give_back(i, has - gives);
    given += gives;
  }
  reclaimed_.fetch_add(given, std::memory_order_relaxed);
  return given;
}

// Returns the slot that gives rows back next. `live`: slots of sequences too, which give what they do not need yet.
int SlotRows::victim(bool live) const {
  int oldest = -1;
  for (int i = 0; i < int(slots_.size()); ++i) {
    const Slot& slot = slots_[size_t(i)];
    if (slot.busy == int(slot.rows.size()) || (slot.idle_since == kLive && !live)) continue;
    if (oldest < 0 || slot.idle_since < slots_[size_t(oldest)].idle_since) oldest = i;
  }
  return oldest;
}

VattentionStats SlotRows::stats() const { return {map_calls_.load(), unmap_calls_.load(), wait_s_.load()}; }

void SlotRows::count_references(std::vector<int32_t>& busy, std::vector<int32_t>& idle) const {
  int64_t counted = 0;
  for (const Slot& slot : slots_) {
    XPYD_CHECK(slot.busy >= 0 && slot.busy <= int(slot.rows.size()));
    counted += runs(slot.rows, 0);
    for (size_t i = 0; i < slot.rows.size(); ++i) ++(int(i) < slot.busy ? busy : idle)[size_t(slot.rows[i])];
  }
  XPYD_CHECK(counted == runs_.load());
}

// ---- Calls to the system.

size_t SlotRows::offset(const Plane& plane, int slot, int row) const {
  return plane.slots.offset(slot, plane.index / 2, plane.index % 2, 0, 0) + size_t(row) * group_bytes_;
}

// Maps adjacent rows with one call per plane. Maps all rows, on all ranks, or none.
bool SlotRows::map(int slot, int first, const std::vector<int32_t>& rows) {
  for (int begin = 0, n = int(rows.size()); begin < n;) {
    int end = begin + 1;
    while (end < n && rows[size_t(end)] == rows[size_t(end) - 1] + 1) ++end;
    for (size_t p = 0; p < planes_.size(); ++p) {
      const Plane& plane = planes_[p];
      const int group = plane.index * pool_.layout().n_blocks + rows[size_t(begin)];
      map_calls_.fetch_add(1, std::memory_order_relaxed);
      if (plane.range.map(offset(plane, slot, first + begin), group, end - begin)) continue;
      for (size_t q = 0; q < planes_.size(); ++q) unmap(planes_[q], slot, first, q < p ? end : begin);
      return false;
    }
    begin = end;
  }
  return true;
}

// Maps on this thread, and counts runs and time. False: the limit of mappings is reached, or the system refuses.
bool SlotRows::map_now(int index, int first, const std::vector<int32_t>& rows) {
  const int64_t more = runs(slots_[size_t(index)].rows, size_t(first));
  const double start = RealClock().now();
  const bool mapped = runs_.load() + more <= most_runs_ && map(index, first, rows);
  wait_s_ = wait_s_ + RealClock().now() - start;
  if (mapped) runs_.fetch_add(more, std::memory_order_relaxed);
  return mapped;
}

void SlotRows::unmap(const Plane& plane, int slot, int first, int n_rows) {
  if (n_rows == 0) return;
  unmap_calls_.fetch_add(1, std::memory_order_relaxed);
  plane.range.unmap(offset(plane, slot, first), n_rows);
}

}  // namespace xpyd::allocator
