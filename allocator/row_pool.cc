#include "allocator/row_pool.h"

#include <string>
#include <utility>

namespace xpyd {

int vattention_planes(const KvLayout& layout) {
  return layout.order == KvOrder::layer_major ? 2 * layout.shape.n_layers : 1;
}

int vattention_planes(const KvOptions& o) { return vattention_planes(KvLayout{o.shape, o.order}); }

int vattention_row_tokens(const KvOptions& o) {
  const size_t token = o.shape.token_bytes() / size_t(vattention_planes(o));  // of one plane
  return token == 0 ? 0 : int(o.vattention.page_group_bytes / token);
}

size_t vattention_row_bytes(const KvOptions& o) { return size_t(vattention_planes(o)) * o.vattention.page_group_bytes; }

// A change of one row: keeps the counts and the free list. Between, only the row's one owner may be
// writing to it, and then it is in use before and after.
class RowPool::Change {
 public:
  Change(RowPool& pool, int32_t row) : pool_(pool), row_(row), before_(pool.state(row)), used_(pool.in_use(row)) {}
  ~Change() {
    const State now = pool_.state(row_);
    const bool used = pool_.in_use(row_);
    if (used != used_) pool_.count_written((used ? 1 : -1) * pool_.filled(row_));
    --pool_.count_[before_], ++pool_.count_[now];
    if (before_ != kFree && now == kFree) pool_.push_free(row_);
  }
  Change(const Change&) = delete;

 private:
  RowPool& pool_;
  const int32_t row_;
  const State before_;
  const bool used_;
};

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
  count_[kFree] = n_blocks_;
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

RowPool::State RowPool::state(int32_t row) const {
  const Row& r = at(row);
  if (r.holds > 0) return kInTransfer;
  if (r.references > r.idle) return kActive;
  return r.references > 0 ? kIdle : kFree;
}

bool RowPool::in_use(int32_t row) const { return state(row) == kActive || state(row) == kInTransfer; }

int32_t RowPool::run_start() const {
  for (int32_t b = 0; b + kRun <= n_blocks_; b += kRun) {
    int n = 0;
    while (n < kRun && state(b + n) == kFree) ++n;
    if (n == kRun) return b;
  }
  return free_head_;
}

bool RowPool::allocate(int n, std::vector<int32_t>& out) {
  Lock lock(mutex_);
  if (n > count_[kFree]) return false;
  for (int i = 0; i < n; ++i) {
    int32_t row = out.empty() ? n_blocks_ : out.back() + 1;
    if (row >= n_blocks_ || state(row) != kFree) row = run_start();
    take_free(row);
    filled_[size_t(row)] = 0;
    const Change change(*this, row);
    at(row).references = 1;
    out.push_back(row);
  }
  return true;
}

void RowPool::add_references(std::span<const int32_t> rows) {
  Lock lock(mutex_);
  for (int32_t row : rows) {
    XPYD_CHECK(state(row) != kFree, "row " + std::to_string(row));
    const Change change(*this, row);
    ++at(row).references;
  }
}

void RowPool::release(std::span<const int32_t> rows) {
  Lock lock(mutex_);
  for (size_t i = rows.size(); i-- > 0;) {
    const Change change(*this, rows[i]);
    Row& r = at(rows[i]);
    XPYD_CHECK(--r.references >= r.idle, "row " + std::to_string(rows[i]));
  }
}

void RowPool::set_idle(std::span<const int32_t> rows, bool idle) {
  if (rows.empty()) return;
  Lock lock(mutex_);
  for (int32_t row : rows) {
    const Change change(*this, row);
    Row& r = at(row);
    r.idle += idle ? 1 : -1;
    XPYD_CHECK(r.idle >= 0 && r.idle <= r.references, "row " + std::to_string(row));
  }
}

void RowPool::release_idle(std::span<const int32_t> rows) {
  Lock lock(mutex_);
  for (size_t i = rows.size(); i-- > 0;) {
    const Change change(*this, rows[i]);
    Row& r = at(rows[i]);
    XPYD_CHECK(--r.idle >= 0 && --r.references >= 0, "row " + std::to_string(rows[i]));
  }
}

int RowPool::users(int32_t row) const {
  Lock lock(mutex_);
  return at(row).references + at(row).handovers;
}

int RowPool::n_unshared(std::span<const int32_t> rows) const {
  Lock lock(mutex_);
  int n = 0;
  while (n < int(rows.size()) && at(rows[size_t(n)]).references + at(rows[size_t(n)]).handovers <= 1) ++n;
  return n;
}

void RowPool::hold(std::span<const int32_t> rows) {
  Lock lock(mutex_);
  for (int32_t row : rows) {
    XPYD_CHECK(state(row) != kFree, "row " + std::to_string(row));
    const Change change(*this, row);
    ++at(row).holds;
  }
}

void RowPool::unhold(std::span<const int32_t> rows) {
  Lock lock(mutex_);
  for (size_t i = rows.size(); i-- > 0;) {
    const Change change(*this, rows[i]);
    XPYD_CHECK(--at(rows[i]).holds >= 0, "row " + std::to_string(rows[i]));
  }
}

void RowPool::begin_handover(KvHandover& handover) {
  Lock lock(mutex_);
  for (int32_t row : handover.blocks) {
    const Change change(*this, row);
    Row& r = at(row);
    XPYD_CHECK(--r.references >= r.idle, "row " + std::to_string(row));
    ++r.holds, ++r.handovers;
  }
}

bool RowPool::adopt(const KvHandover& handover) {
  add_references(handover.blocks);
  discard(handover);
  return true;
}

void RowPool::discard(const KvHandover& handover) {
  Lock lock(mutex_);
  for (size_t i = handover.blocks.size(); i-- > 0;) {
    const int32_t row = handover.blocks[i];
    const Change change(*this, row);
    XPYD_CHECK(--at(row).handovers >= 0, "row " + std::to_string(row) + " was not handed over");
    --at(row).holds;
  }
}

KvStats RowPool::stats() const {
  Lock lock(mutex_);
  KvStats stats = new_stats();
  stats.free = count_[kFree];
  stats.active = count_[kActive];
  stats.cached = count_[kIdle];
  stats.in_transfer = count_[kInTransfer];
  return stats;
}

void RowPool::check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                               bool complete) const {
  Lock lock(mutex_);
  XPYD_CHECK(int(references.size()) == n_blocks_ && int(leases.size()) == n_blocks_);
  std::vector<char> in_free(size_t(n_blocks_), 0);
  for (int32_t row = free_head_, before = -1; row >= 0; before = row, row = at(row).after)
    XPYD_CHECK(row < n_blocks_ && !in_free[size_t(row)]++ && at(row).before == before, "free list");
  int count[kStates] = {};
  for (int32_t row = 0; row < n_blocks_; ++row) {
    auto which = [row] { return "row " + std::to_string(row); };  // only when a check fails
    const Row& r = at(row);
    const int referenced = references[size_t(row)], held = leases[size_t(row)] + r.handovers;
    XPYD_CHECK(complete ? r.references == referenced : r.references >= referenced, which());
    XPYD_CHECK(complete ? r.holds == held : r.holds >= held, which());
    XPYD_CHECK(r.idle >= 0 && r.idle <= r.references, which());
    const State s = state(row);
    ++count[s];
    XPYD_CHECK(bool(in_free[size_t(row)]) == (s == kFree), which());
  }
  for (int s = 0; s < kStates; ++s) XPYD_CHECK(count[s] == count_[s], "state " + std::to_string(s));
  check_written(complete);
}

void RowPool::check_idle(std::span<const int32_t> idle, bool complete) const {
  Lock lock(mutex_);
  for (int32_t row = 0; row < n_blocks_; ++row) {
    const int marked = at(row).idle, own = idle[size_t(row)];
    XPYD_CHECK(complete ? marked == own : marked >= own, "row " + std::to_string(row));
  }
}

}  // namespace xpyd
