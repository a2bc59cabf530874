// vattention: every sequence has contiguous virtual addresses for its longest length, and memory
// behind the part that it uses (Prabhu et al., ASPLOS'25). Kernels see contiguous memory; what is
// left of waste is the end of one row of page groups (page_mapper.h).
//
// A slot is a piece of the virtual range. Its rows stay mapped when its sequence ends (deferred
// reclamation, section 6.1.2): the next sequence that takes the slot maps only what it needs beyond
// them. Rows of idle slots are what the pool's stats call cached: unmapped when others need them,
// the longest idle first.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>
#include <utility>

#include "allocator/page_mapper.h"
#include "allocator/pooled.h"

namespace xpyd {
namespace {

constexpr int kAheadTokens = 8;    // of a decoding sequence: its next row is mapped so much earlier
constexpr int kEagerRows = 2;      // kept mapped on one idle slot for the next arrival
constexpr int kReclaimBelow = 10;  // percent of the rows free: idle slots give rows back

int planes_of(const KvOptions& o) {
  return o.order == KvOrder::layer_major ? 2 * o.shape.n_layers : 1;
}
// Bytes of one token in one plane.
size_t plane_token_bytes(const KvOptions& o) {
  return o.shape.token_bytes() / size_t(planes_of(o));
}

class VattentionMemory final : public PooledMemory {
 public:
  VattentionMemory(std::shared_ptr<BlockPool> pool, const KvOptions& options)
      : PooledMemory(std::move(pool), options),
        layout_(vattention_slots(options)),
        row_tokens_(pool_->layout().block_tokens),
        range_(reserve_range()),
        mapper_(*pool_, *range_, layout_),
        slots_(size_t(options.max_sequences)) {
    prepare_idle_slot();
  }
  ~VattentionMemory() override {
    mapper_.drain();
    for (const Slot& slot : slots_) pool_->release(slot.rows);
  }

  const char* name() const override { return "vattention"; }
  const KvLayout& layout() const override { return layout_; }

  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override;
  int probe(std::span<const int32_t> tokens, uint64_t salt) const override;
  bool append(KvHandle handle, int n_tokens) override;
  void written(KvHandle handle, std::span<const int32_t> tokens) override;
  void trim(KvHandle handle) override { sequences_[handle].room = sequences_[handle].written; }
  Result<KvHandle> fork(KvHandle handle) override;
  void free(KvHandle handle) override;
  KvLease pin(KvHandle handle) override;
  void unpin(KvLease lease) override;
  KvHandover hand_over(KvHandle handle) override;
  KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) override;
  KvView view(KvHandle handle) const override;
  bool tail_shared(KvHandle) const override { return false; }
  KvStats stats() const override;
  void clear_prefix_cache() override {}  // there is none: idle rows are only room
  void check_invariants(bool complete) const override {
    mapper_.drain();
    PooledMemory::check_invariants(complete);
  }

 private:
  // Virtual addresses of one sequence. While it is live its rows are in the sequence's table.
  struct Slot {
    bool live = false;
    int pins = 0;               // leases on its addresses: it stays as it is
    std::vector<int32_t> rows;  // of an idle slot: mapped, referenced
    uint64_t mapping = 0;       // ticket of the last job
    int mapping_from = 0;       // rows of that job, if it is a map
    int64_t idle_since = 0;
  };

  std::unique_ptr<VirtualRange> reserve_range() const;
  int rows_for(int tokens) const { return (tokens + row_tokens_ - 1) / row_tokens_; }
  bool usable(const Slot& slot) const { return !slot.live && slot.pins == 0; }
  int find_slot(int rows) const;
  int oldest_idle(int except) const;
  KvHandle take_slot(int slot);
  void give_back(int slot, int keep);
  void give_back_idle();
  bool make_free(int n_rows);
  bool settle(Slot& slot, std::vector<int32_t>& rows);
  bool grow(Sequence& s, int n_rows);
  void grow_ahead(Sequence& s, int tokens);
  bool map_ahead(int slot, std::vector<int32_t>& rows, int more);
  void prepare_idle_slot();
  void reclaim(int n_rows, int except);
  void retire(int slot);
  void reclaim_ahead();
  std::byte* data() const override { return range_->data(); }
  void count_references(std::vector<int32_t>& references) const override;
  void check_sequence(const Sequence& s) const override;

  const KvLayout layout_;          // of the slots: block = slot
  std::atomic<int> idle_rows_{0};  // of usable slots, and those that are being given back
  const int row_tokens_;
  const std::unique_ptr<VirtualRange> range_;
  mutable PageMapper mapper_;
  std::vector<Slot> slots_;
  std::vector<int32_t> lease_slots_;  // by lease
  int64_t clock_ = 0;
};

std::unique_ptr<VirtualRange> VattentionMemory::reserve_range() const {
  Result<std::unique_ptr<VirtualRange>> range = pool_->page_groups()->reserve(layout_.pool_bytes());
  XPYD_CHECK(range.ok(), range.ok() ? "" : range.error().message);
  return std::move(range).value();
}

// Best fit: the idle slot with the fewest mapped rows that are enough; where none has enough, the
// one with the most. -1: none is idle.
int VattentionMemory::find_slot(int rows) const {
  int best = -1;
  for (int i = 0; i < int(slots_.size()); ++i) {
    if (!usable(slots_[size_t(i)])) continue;
    if (best < 0) {
      best = i;
      continue;
    }
    const int mine = int(slots_[size_t(i)].rows.size()),
              its = int(slots_[size_t(best)].rows.size());
    const bool better = mine >= rows ? its < rows || mine < its : its < rows && mine > its;
    if (better) best = i;
  }
  return best;
}

int VattentionMemory::oldest_idle(int except) const {
  int oldest = -1;
  for (int i = 0; i < int(slots_.size()); ++i) {
    const Slot& slot = slots_[size_t(i)];
    if (i == except || !usable(slot) || slot.rows.empty()) continue;
    if (oldest < 0 || slot.idle_since < slots_[size_t(oldest)].idle_since) oldest = i;
  }
  return oldest;
}

KvHandle VattentionMemory::take_slot(int index) {
  Slot& slot = slots_[size_t(index)];
  const KvHandle handle = sequences_.add();
  Sequence& s = sequences_[handle];
  settle(slot, slot.rows);
  idle_rows_.fetch_sub(int(slot.rows.size()), std::memory_order_relaxed);
  s.table.swap(slot.rows);
  s.slot = index;
  slot.live = true;
  return handle;
}

// Its last map is done; rows that the system refused are given up. False: some were.
bool VattentionMemory::settle(Slot& slot, std::vector<int32_t>& rows) {
  if (mapper_.wait(std::exchange(slot.mapping, 0))) return true;
  const std::span<const int32_t> refused = std::span(rows).subspan(size_t(slot.mapping_from));
  pool_->release(refused);
  if (usable(slot)) idle_rows_.fetch_sub(int(refused.size()), std::memory_order_relaxed);
  rows.resize(size_t(slot.mapping_from));
  return false;
}

// An idle slot keeps its first `keep` rows; the others are unmapped in the background, then free.
void VattentionMemory::give_back(int index, int keep) {
  Slot& slot = slots_[size_t(index)];
  settle(slot, slot.rows);
  if (keep >= int(slot.rows.size())) return;
  PageMapper::Job job{.slot = index, .first = keep, .what = PageMapper::Job::unmap_and_release};
  job.rows.assign(slot.rows.begin() + keep, slot.rows.end());
  job.released = &idle_rows_;  // until then they are on their way to whoever asks
  slot.rows.resize(size_t(keep));
  slot.mapping = mapper_.post(std::move(job));
  slot.mapping_from = keep;
}

// The system refuses mappings: those of idle slots are given back, so that the next try may
// succeed.
void VattentionMemory::give_back_idle() {
  for (int oldest; (oldest = oldest_idle(-1)) >= 0;) give_back(oldest, 0);
}

// Free rows in the pool, taken from idle slots if need be. False: there are not so many.
bool VattentionMemory::make_free(int n_rows) {
  const int free = pool_->stats().free;
  if (free + idle_rows_.load(std::memory_order_relaxed) < n_rows) return false;
  if (free >= n_rows) return true;
  reclaim(n_rows - free, -1);
  mapper_.drain();  // a row is free when it is unmapped
  return pool_->stats().free >= n_rows;
}

bool VattentionMemory::grow(Sequence& s, int n_rows) {
  Slot& slot = slots_[size_t(s.slot)];
  if (slot.mapping != 0 && n_rows <= slot.mapping_from) return true;  // what is under way can wait
  settle(slot, s.table);
  const int have = int(s.table.size()), more = n_rows - have;
  if (more <= 0) return true;
  if (!make_free(more) || !pool_->allocate_run(more, s.table)) return false;
  PageMapper::Job job{.slot = s.slot, .first = have};
  job.rows.assign(s.table.begin() + have, s.table.end());
  if (mapper_.run(job)) return true;
  pool_->release(job.rows);
  s.table.resize(size_t(have));
  give_back_idle();
  return false;
}

// Maps in the background what the next steps need, from rows that are free anyway.
void VattentionMemory::grow_ahead(Sequence& s, int tokens) {
  if (!options_.map_ahead) return;
  const int limit = options_.max_sequence_tokens > 0 ? options_.max_sequence_tokens : tokens;
  const int have = int(s.table.size()), more = rows_for(std::min(tokens, limit)) - have;
  map_ahead(s.slot, s.table, more);
}

// False: nothing is under way.
bool VattentionMemory::map_ahead(int index, std::vector<int32_t>& rows, int more) {
  Slot& slot = slots_[size_t(index)];
  if (more <= 0 || !settle(slot, rows)) return false;
  if (pool_->stats().free < more + pool_->layout().n_blocks / 20) return false;
  const int have = int(rows.size());
  if (!pool_->allocate_run(more, rows)) return false;
  PageMapper::Job job{.slot = index, .first = have};
  job.rows.assign(rows.begin() + have, rows.end());
  slot.mapping = mapper_.post(std::move(job));
  slot.mapping_from = have;
  return true;
}

// Eager allocation (section 6.1.2): one idle slot has rows before anybody asks.
void VattentionMemory::prepare_idle_slot() {
  if (!options_.map_ahead || !options_.keep_idle) return;
  const int best = find_slot(kEagerRows);
  if (best < 0) return;
  Slot& slot = slots_[size_t(best)];
  const int have = int(slot.rows.size()),
            more = std::min(kEagerRows, rows_for(options_.max_sequence_tokens)) - have;
  if (!map_ahead(best, slot.rows, more)) return;
  slot.idle_since = ++clock_;
  idle_rows_.fetch_add(more, std::memory_order_relaxed);
}

// An idle slot keeps its rows for the next sequence, unless free rows run short.
void VattentionMemory::retire(int index) {
  if (options_.keep_idle) return reclaim_ahead();
  give_back(index, 0);
  mapper_.drain();  // others may be waiting for them
}

void VattentionMemory::reclaim_ahead() {
  const int wanted = pool_->layout().n_blocks * kReclaimBelow / 100;
  reclaim(wanted - pool_->stats().free, find_slot(kEagerRows));
}

// Idle slots but `except` give n_rows back, the longest idle first, if they have so many.
void VattentionMemory::reclaim(int n_rows, int except) {
  while (n_rows > 0) {
    const int oldest = oldest_idle(except);
    if (oldest < 0) return;
    const int has = int(slots_[size_t(oldest)].rows.size()), gives = std::min(has, n_rows);
    give_back(oldest, has - gives);
    evictions_.fetch_add(gives, std::memory_order_relaxed);
    n_rows -= gives;
  }
}

Result<KvReservation> VattentionMemory::reserve(std::span<const int32_t> tokens, uint64_t) {
  const int slot = find_slot(rows_for(int(tokens.size())));
  if (slot < 0) return Error{ErrorCode::unavailable, "no free KV slot"};
  const KvHandle handle = take_slot(slot);
  prepare_idle_slot();
  return KvReservation{handle, 0};
}

int VattentionMemory::probe(std::span<const int32_t>, uint64_t) const { return 0; }

bool VattentionMemory::append(KvHandle handle, int n_tokens) {
  Sequence& s = sequences_[handle];
  XPYD_CHECK(n_tokens >= 0);
  const int tokens = s.written + n_tokens;
  check_length(tokens);
  if (!grow(s, rows_for(tokens))) return false;
  s.room = std::max(s.room, tokens);
  grow_ahead(s, s.room + std::max(n_tokens, kAheadTokens));
  return true;
}

void VattentionMemory::written(KvHandle handle, std::span<const int32_t> tokens) {
  Sequence& s = sequences_[handle];
  XPYD_CHECK(s.written + int64_t(tokens.size()) <= s.room, "written without room");
  s.written += int(tokens.size());
}

Result<KvHandle> VattentionMemory::fork(KvHandle handle) {
  trim(handle);
  const int written = sequences_[handle].written, index = find_slot(rows_for(written));
  const Error none{ErrorCode::unavailable, "no free KV slot"};
  if (index < 0) return none;
  const KvHandle child_handle = take_slot(index);
  Sequence& child = sequences_[child_handle];
  if (!grow(child, rows_for(written))) {
    free(child_handle);
    return none;
  }
  view(handle);  // its rows are mapped
  copy_tokens(index, sequences_[handle].slot, written);
  child.written = child.room = written;
  return child_handle;
}

void VattentionMemory::free(KvHandle handle) {
  Sequence& s = sequences_[handle];
  const int index = s.slot;
  Slot& slot = slots_[size_t(index)];
  settle(slot, s.table);
  slot.live = false;
  slot.rows.swap(s.table);
  slot.idle_since = ++clock_;
  s.table.clear();
  sequences_.remove(handle);
  if (slot.pins > 0) return;
  idle_rows_.fetch_add(int(slot.rows.size()), std::memory_order_relaxed);
  retire(index);
}

// A lease holds the blocks and, since what reads them goes by address, the slot.
KvLease VattentionMemory::pin(KvHandle handle) {
  const KvLease lease = PooledMemory::pin(handle);
  if (size_t(lease) >= lease_slots_.size()) lease_slots_.resize(size_t(lease) + 1);
  lease_slots_[size_t(lease)] = sequences_[handle].slot;
  ++slots_[size_t(sequences_[handle].slot)].pins;
  return lease;
}

void VattentionMemory::unpin(KvLease lease) {
  PooledMemory::unpin(lease);
  const int index = lease_slots_[size_t(lease)];
  Slot& slot = slots_[size_t(index)];
  if (--slot.pins > 0 || slot.live) return;
  idle_rows_.fetch_add(int(slot.rows.size()), std::memory_order_relaxed);
  retire(index);
}

// The rows travel; what they were mapped at is unmapped before the slot is used again.
KvHandover VattentionMemory::hand_over(KvHandle handle) {
  Sequence& s = sequences_[handle];
  const int index = s.slot;
  Slot& slot = slots_[size_t(index)];
  XPYD_CHECK(slot.pins == 0, "a sequence with leases on its addresses is handed over");
  settle(slot, s.table);
  const int keep = rows_for(s.written);
  // Room without tokens does not travel: it is idle, and given back.
  slot.rows.assign(s.table.begin(), s.table.end());
  idle_rows_.fetch_add(int(slot.rows.size()) - keep, std::memory_order_relaxed);
  s.table.resize(size_t(keep));
  KvHandover handover{s.table, s.written};
  pool_->begin_handover(s.table);
  sequences_.remove(handle);
  slot.live = false;
  give_back(index, keep);
  PageMapper::Job job{.slot = index, .first = 0, .what = PageMapper::Job::unmap};
  job.rows.assign(slot.rows.begin(), slot.rows.end());
  slot.rows.clear();
  slot.mapping_from = 0;
  slot.mapping = mapper_.post(std::move(job));
  return handover;
}

KvHandle VattentionMemory::adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t) {
  XPYD_CHECK(int(tokens.size()) >= handover.tokens);
  const int index = find_slot(0);  // one that gives up the least
  if (index >= 0) give_back(index, 0);
  if (index < 0 || !mapper_.run({.slot = index, .first = 0, .rows = handover.blocks})) {
    give_back_idle();
    discard(std::move(handover));
    return kNoKv;
  }
  KvHandle handle = kNoKv;
  Sequence& s = add_adopted(handover, handle);
  Slot& slot = slots_[size_t(index)];
  s.slot = index;
  slot.live = true;
  slot.mapping = 0;
  return handle;
}

KvView VattentionMemory::view(KvHandle handle) const {
  const Sequence& s = sequences_[handle];
  const Slot& slot = slots_[size_t(s.slot)];
  // Rows mapped ahead may still be under way; those that hold tokens are not among them.
  if (slot.mapping != 0 && rows_for(s.room) > slot.mapping_from) mapper_.drain();
  return {range_->data(), &layout_, nullptr, s.slot};
}

KvStats VattentionMemory::stats() const {
  KvStats stats = PooledMemory::stats();
  const int idle = std::min(idle_rows_.load(std::memory_order_relaxed), stats.active);
  stats.active -= idle;
  stats.cached += idle;
  stats.map_calls = range_->calls.maps.load(std::memory_order_relaxed);
  stats.unmap_calls = range_->calls.unmaps.load(std::memory_order_relaxed);
  const PageMapper::Stats jobs = mapper_.stats();
  stats.waited_jobs = jobs.owner_jobs;
  stats.map_wait_seconds = jobs.stall_seconds;
  return stats;
}

void VattentionMemory::count_references(std::vector<int32_t>& references) const {
  int idle = 0;
  for (const Slot& slot : slots_) {
    if (slot.live) XPYD_CHECK(slot.rows.empty());
    for (int32_t row : slot.rows) ++references[size_t(row)];
    if (usable(slot)) idle += int(slot.rows.size());
  }
  XPYD_CHECK(idle == idle_rows_.load(std::memory_order_relaxed));
}

void VattentionMemory::check_sequence(const Sequence& s) const {
  XPYD_CHECK(s.slot >= 0 && slots_[size_t(s.slot)].live);
  XPYD_CHECK(int(s.table.size()) >= rows_for(s.room));
}

}  // namespace

int vattention_row_tokens(const KvOptions& o) {
  const size_t token = plane_token_bytes(o);
  return token == 0 ? 0 : int(o.page_group_bytes / token);
}

size_t vattention_row_bytes(const KvOptions& o) {
  return size_t(planes_of(o)) * o.page_group_bytes;
}

// A slot's planes are whole groups, one for each row of its longest sequence; where a group does
// not hold a whole number of tokens these are more than its bytes need. Its length is rounded up to
// where a token ends with a group.
KvLayout vattention_slots(const KvOptions& o) {
  const size_t group = o.page_group_bytes, token = plane_token_bytes(o);
  const int row_tokens = vattention_row_tokens(o);
  const size_t rows = size_t((o.max_sequence_tokens + row_tokens - 1) / row_tokens);
  const size_t step = std::lcm(group, token);
  const size_t bytes = (rows * group + step - 1) / step * step;
  return {o.shape, o.order, int(bytes / token), o.max_sequences};
}

std::unique_ptr<KvMemory> make_vattention(std::shared_ptr<BlockPool> pool,
                                          const KvOptions& options) {
  return std::make_unique<VattentionMemory>(std::move(pool), options);
}

}  // namespace xpyd
