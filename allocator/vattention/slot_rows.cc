#include "allocator/vattention/slot_rows.h"

#include <algorithm>
#include <utility>

namespace xpyd::allocator {
namespace {

// Runs of neighbours that begin at row `from` or behind.
int64_t runs(const std::vector<int32_t>& rows, size_t from) {
  int64_t n = 0;
  for (size_t i = from; i < rows.size(); ++i) n += i == 0 || rows[i] != rows[i - 1] + 1;
  return n;
}

}  // namespace

SlotRows::SlotRows(RowPool& pool, std::vector<std::unique_ptr<VirtualRange>> ranges, const KvPlaces& slots,
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

// Its last job is done; rows that the system refused, idle ones, are given up. False: some were.
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

// These rows behind the slot, in use, instead of what is there. False: the system refuses; the slot has none.
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
  slot.shared = true;  // adopted ones may have been forked where they come from
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

}  // namespace xpyd::allocator
