#include "allocator/vattention/row_pool.h"

#include <string>
#include <utility>

namespace xpyd::allocator {

int vattention_planes(const KvLayout& layout) {
  return layout.order == KvOrder::layer_major ? 2 * layout.shape.n_layers : 1;
}

int vattention_planes(const KvOptions& o) { return vattention_planes(KvLayout{o.shape, o.order}); }

int vattention_row_tokens(const KvOptions& o) {
  const size_t token = o.shape.token_bytes() / size_t(vattention_planes(o));  // of one plane
  return token == 0 ? 0 : int(o.vattention.page_group_bytes / token);
}

size_t vattention_row_bytes(const KvOptions& o) { return size_t(vattention_planes(o)) * o.vattention.page_group_bytes; }

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

RowPool::RowPool(const KvLayout& layout, const KvShards& shards, std::vector<std::shared_ptr<PageGroups>> groups)
    : KvPool(nowhere(layout, shards), row_bytes(nowhere(layout, shards), *groups[0])),
      groups_(std::move(groups)),
      rows_(size_t(n_blocks_)) {
  XPYD_CHECK(groups_.size() == places_.ranks.size());
  for (int32_t row = n_blocks_ - 1; row >= 0; --row) push_free(row);  // taken in ascending order
  users_at(&rows_[0].users, sizeof(Row));
}

void RowPool::push_free(int32_t row) {
  Row& r = at(row);
  r.before = -1, r.after = free_head_;
  if (free_head_ >= 0) at(free_head_).before = row;
  free_head_ = row;
}

void RowPool::take_free(int32_t row) {
  const Row& r = at(row);
  (r.before < 0 ? free_head_ : at(r.before).after) = r.after;
  if (r.after >= 0) at(r.after).before = r.before;
}

int64_t RowPool::begin_use(std::span<const int32_t> rows) {
  int64_t tokens = 0;
  for (int32_t row : rows) {
    n_cached_ -= cached(row);
    tokens += filled(row);
  }
  return tokens;
}

int64_t RowPool::end_use(std::span<const int32_t> rows) {
  int64_t tokens = 0;
  for (int32_t row : rows) {
    if (cached(row))
      ++n_cached_;
    else
      push_free(row);
    tokens += filled(row);
  }
  return tokens;
}

int32_t RowPool::run_start() const {
  for (int32_t b = 0; b + kRun <= n_blocks_; b += kRun) {
    int n = 0;
    while (n < kRun && free(b + n)) ++n;
    if (n == kRun) return b;
  }
  return free_head_;
}

bool RowPool::allocate(int n, std::vector<int32_t>& out) {
  Lock lock(mutex_);
  if (n > n_free()) return false;
  for (int i = 0; i < n; ++i) {
    int32_t row = out.empty() ? n_blocks_ : out.back() + 1;
    if (row >= n_blocks_ || !free(row)) row = run_start();
    take_free(row);
    filled_[size_t(row)] = 0;
    add_reference(row);
    out.push_back(row);
  }
  return true;
}

void RowPool::set_idle(std::span<const int32_t> rows, bool idle) {
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

void RowPool::release_idle(std::span<const int32_t> rows) {
  Lock lock(mutex_);
  for (size_t i = rows.size(); i-- > 0;) {
    XPYD_CHECK(--at(rows[i]).idle >= 0, "row " + std::to_string(rows[i]));
    if (!free(rows[i])) continue;
    --n_cached_;
    push_free(rows[i]);
  }
}

int RowPool::n_unshared(std::span<const int32_t> rows) const {
  Lock lock(mutex_);
  int n = 0;
  const auto users = [&](const Row& r) { return r.users.references + r.idle + r.users.handovers; };
  while (n < int(rows.size()) && users(at(rows[size_t(n)])) <= 1) ++n;
  return n;
}

KvStats RowPool::stats() const {
  Lock lock(mutex_);
  return count();
}

void RowPool::check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                               bool complete) const {
  Lock lock(mutex_);
  check_uses(references, leases, complete);
  std::vector<char> in_free(size_t(n_blocks_), 0);
  for (int32_t row = free_head_, before = -1; row >= 0; before = row, row = at(row).after)
    XPYD_CHECK(row < n_blocks_ && !in_free[size_t(row)]++ && at(row).before == before, "free list");
  for (int32_t row = 0; row < n_blocks_; ++row)
    XPYD_CHECK(at(row).idle >= 0 && bool(in_free[size_t(row)]) == free(row), "row " + std::to_string(row));
}

void RowPool::check_idle(std::span<const int32_t> idle, bool complete) const {
  Lock lock(mutex_);
  for (int32_t row = 0; row < n_blocks_; ++row) {
    const int marked = at(row).idle, own = idle[size_t(row)];
    XPYD_CHECK(complete ? marked == own : marked >= own, "row " + std::to_string(row));
  }
}

}  // namespace xpyd::allocator
