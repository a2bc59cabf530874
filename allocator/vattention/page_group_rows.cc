#include "allocator/vattention/page_group_rows.h"

#include <string>
#include <utility>

namespace xpyd::allocator {

namespace {

KvPlaces nowhere(const KvLayout& layout, const KvShards& shards) {
  return {layout, shards, std::vector<std::shared_ptr<std::byte>>(size_t(shards.n_ranks()))};
}

size_t row_bytes(const KvPlaces& places, const PageGroups& groups) {
  size_t planes = 0;
  for (const KvPlaces::Place& place : places.ranks) planes += size_t(vattention_planes(place.layout));
  return planes * groups.options().group_bytes;
}

}  // namespace

PageGroupRows::PageGroupRows(const KvLayout& layout, const KvShards& shards,
                             std::vector<std::shared_ptr<PageGroups>> groups)
    : KvPool(nowhere(layout, shards), row_bytes(nowhere(layout, shards), *groups[0])),
      groups_(std::move(groups)),
      rows_(size_t(n_blocks_)) {
  XPYD_CHECK(groups_.size() == places_.ranks.size());
  users_at(&rows_[0].users, sizeof(Row));
}

int32_t PageGroupRows::run_start() const {
  for (int32_t b = 0; b + kRun <= n_blocks_; b += kRun) {
    int n = 0;
    while (n < kRun && free(b + n)) ++n;
    if (n == kRun) return b;
  }
  int32_t row = 0;
  while (!free(row)) ++row;
  return row;
}

bool PageGroupRows::allocate(int n, std::vector<int32_t>& out) {
  Lock lock(mutex_);
  if (n > n_free()) return false;
  for (int i = 0; i < n; ++i) {
    int32_t row = out.empty() ? n_blocks_ : out.back() + 1;
    if (row >= n_blocks_ || !free(row)) row = run_start();
    filled_[size_t(row)] = 0;
    add_reference(row);
    out.push_back(row);
  }
  return true;
}

void PageGroupRows::set_idle(std::span<const int32_t> rows, bool idle) {
  if (rows.empty()) return;
  Lock lock(mutex_);
  for (int32_t row : rows) {
    if (idle) {
      ++at(row).idle;
      drop_reference(row);
    } else {
      add_reference(row);
      XPYD_CHECK(--at(row).idle >= 0, "row " + std::to_string(row));
    }
  }
}

void PageGroupRows::release_idle(std::span<const int32_t> rows) {
  Lock lock(mutex_);
  for (int32_t row : rows) {
    XPYD_CHECK(--at(row).idle >= 0, "row " + std::to_string(row));
    n_cached_ -= free(row);
  }
}

int PageGroupRows::n_unshared(std::span<const int32_t> rows) const {
  Lock lock(mutex_);
  int n = 0;
  const auto users = [&](const Row& r) { return r.users.references + r.idle + r.users.handovers; };
  while (n < int(rows.size()) && users(at(rows[size_t(n)])) <= 1) ++n;
  return n;
}

KvStats PageGroupRows::stats() const {
  Lock lock(mutex_);
  return count();
}

void PageGroupRows::check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                                     bool complete) const {
  Lock lock(mutex_);
  check_uses(references, leases, complete);
  for (int32_t row = 0; row < n_blocks_; ++row) XPYD_CHECK(at(row).idle >= 0, "row " + std::to_string(row));
}

void PageGroupRows::check_idle(std::span<const int32_t> idle, bool complete) const {
  Lock lock(mutex_);
  for (int32_t row = 0; row < n_blocks_; ++row) {
    const int marked = at(row).idle, own = idle[size_t(row)];
    XPYD_CHECK(complete ? marked == own : marked >= own, "row " + std::to_string(row));
  }
}

}  // namespace xpyd::allocator
