// vattention: every sequence has contiguous virtual addresses for its longest length, and memory
// behind the part that it uses (Prabhu et al., ASPLOS'25). Kernels see contiguous memory; what is
// left of waste is the end of one row of page groups (page_mapper.h).
//
// A slot is a piece of the virtual range (slot_rows.h). Its rows stay mapped when its sequence ends
// (deferred reclamation, section 6.1.2), and so does what they hold (slot_contents.h): a sequence
// that begins alike maps the full rows a second time, goes on in the slot, or copies
// (KvOptions::share); any other maps only what it needs beyond the rows of the slot it takes.
#include <algorithm>
#include <numeric>
#include <utility>

#include "allocator/pooled.h"
#include "allocator/slot_rows.h"

namespace xpyd {
namespace {

constexpr int kAheadTokens = 8;    // of a decoding sequence: its next row is mapped so much earlier
constexpr int kEagerRows = 2;      // kept mapped on one idle slot for the next arrival
constexpr int kReclaimBelow = 10;  // percent of the rows free: idle slots give rows back

int planes_of(const KvOptions& o) { return o.order == KvOrder::layer_major ? 2 * o.shape.n_layers : 1; }
// Bytes of one token in one plane.
size_t plane_token_bytes(const KvOptions& o) { return o.shape.token_bytes() / size_t(planes_of(o)); }

class VattentionMemory final : public PooledMemory {
 public:
  VattentionMemory(std::shared_ptr<BlockPool> pool, const KvOptions& options)
      : PooledMemory(std::move(pool), options),
        layout_(vattention_slots(options)),
        row_tokens_(pool_->layout().block_tokens),
        share_(options.prefix_cache ? options.share : KvShare::off),
        contents_(layout_.n_blocks),
        rows_(*pool_, layout_, options, contents_),
        slots_(size_t(layout_.n_blocks)) {
    prepare_idle_slot();
  }

  const char* name() const override { return "vattention"; }
  const KvLayout& layout() const override { return layout_; }
  std::byte* base() const override { return rows_.data(); }

  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override;
  int probe(std::span<const int32_t> tokens, uint64_t salt) const override;
  bool append(KvHandle handle, int n_tokens) override;
  void written(KvHandle handle, std::span<const int32_t> tokens) override;
  void trim(KvHandle handle) override;
  Result<KvHandle> fork(KvHandle handle) override;
  void free(KvHandle handle) override;
  KvLease pin(KvHandle handle, int token_begin, int token_end) override;
  void unpin(KvLease lease) override;
  KvHandover hand_over(KvHandle handle) override;
  KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) override;
  KvView view(KvHandle handle) const override;
  bool tail_shared(KvHandle) const override { return false; }
  KvStats stats() const override;
  void clear_prefix_cache() override { contents_.clear_idle(); }
  void check_invariants(bool complete) const override;

 private:
  struct Slot {
    bool live = false;
    int pins = 0;         // leases on its addresses: …
    int pinned_rows = 0;  // … these stay as they are
  };

  int rows_for(int tokens) const { return (tokens + row_tokens_ - 1) / row_tokens_; }
  // Rows all of whose bytes belong to the first `tokens` tokens: who shares them never writes
  // there.
  int full_rows(int tokens) const {
    return int(size_t(tokens) * plane_token_bytes(options_) / options_.page_group_bytes);
  }
  bool sharing() const { return share_ != KvShare::off; }
  bool usable(int slot) const { return !slots_[size_t(slot)].live && slots_[size_t(slot)].pins == 0; }
  void set_busy(int slot, int rows) { rows_.set_busy(slot, std::max(rows, slots_[size_t(slot)].pinned_rows)); }
  int find_slot(int rows, int except) const;
  KvHandle open(int slot, int tokens);
  void clear(int slot);
  bool take_over(SlotContents::Match& match);
  bool clone(int slot, int donor, int tokens, int room);
  void copy_bytes(int to, int from, size_t begin, size_t end);
  int attach(SlotContents::Match& match, int n_tokens);
  void let_go(int slot);
  void ended(int slot);
  void prepare_idle_slot();
  std::span<const int32_t> table_of(const Sequence& s) const override {
    XPYD_CHECK(rows_for(s.room) <= int(rows_.rows(s.slot).size()));
    return rows_.rows(s.slot).first(size_t(rows_for(s.room)));
  }
  void count_references(std::vector<int32_t>& references, std::vector<int32_t>& idle) const override {
    rows_.count_references(references, idle);
  }
  void check_sequence(const Sequence& s) const override;

  const KvLayout layout_;  // of the slots: block = slot
  const int row_tokens_;
  const KvShare share_;
  SlotContents contents_;
  SlotRows rows_;
  std::vector<Slot> slots_;
  struct Place {
    int slot = -1, rows = 0;  // its first so many
  };
  std::vector<Place> lease_places_;  // by lease; slot -1: there is no such lease
};

// Slots without contents first: of them the best fit, that is the fewest mapped rows that are
// enough, else the most. What others hold may yet be wanted, and to lose only the end of it, when
// rows run short, is better than to take the slot: then the one that ended first. -1: none is idle.
int VattentionMemory::find_slot(int rows, int except) const {
  int best = -1, its = 0, oldest = -1;
  for (int i = 0; i < layout_.n_blocks; ++i) {
    if (i == except || !usable(i)) continue;
    if (sharing() && contents_.size(i) > 0) {
      if (oldest < 0 || rows_.idle_since(i) < rows_.idle_since(oldest)) oldest = i;
      continue;
    }
    const int mine = rows_.unshared_from(i, 0);
    if (best < 0 || (mine >= rows ? its < rows || mine < its : its < rows && mine > its)) best = i, its = mine;
  }
  return best >= 0 ? best : oldest;
}

// A sequence in an idle slot whose first rows hold `tokens` tokens of it.
KvHandle VattentionMemory::open(int slot, int tokens) {
  const KvHandle handle = sequences_.add();
  Sequence& s = sequences_[handle];
  s.slot = slot;
  s.written = s.room = tokens;
  slots_[size_t(slot)].live = true;
  rows_.begin(slot);
  return handle;
}

// What is in an idle slot is no more; its rows stay, those that others use, too, are let go.
void VattentionMemory::clear(int slot) {
  rows_.give_back(slot, rows_.unshared_from(slot, 0));
  contents_.truncate(slot, 0);
  pool_->set_written(rows_.rows(slot), 0);
}

// The idle slot goes on from its first match.tokens tokens. The row in which they end will be
// written to: where others use it, they end with the row before. False: there is no such end.
bool VattentionMemory::take_over(SlotContents::Match& match) {
  const int slot = match.slot, full = full_rows(match.tokens);
  const int own = rows_.unshared_from(slot, full);
  if (own < rows_for(match.tokens)) {
    if (full == 0 || options_.page_group_bytes % plane_token_bytes(options_) != 0) return false;
    match.tokens = full * row_tokens_;
  }
  rows_.give_back(slot, own);
  set_busy(slot, rows_for(match.tokens));
  pool_->set_written(rows_.rows(slot).subspan(size_t(full)), match.tokens - full * row_tokens_);
  return true;
}

// Bytes [begin, end) of each plane of a slot.
void VattentionMemory::copy_bytes(int to, int from, size_t begin, size_t end) {
  copies_.clear();
  if (begin == end) return;
  for (int p = 0; p < planes_of(options_); ++p)
    copies_.push_back({base() + layout_.offset(from, p / 2, p % 2, 0, 0) + begin,
                       base() + layout_.offset(to, p / 2, p % 2, 0, 0) + begin, end - begin});
  queue_.copy(copies_, true);
  queue_.wait();
}

// The first `tokens` tokens of `donor` in the idle slot, too: full rows by a second mapping
// (alias), the rest copied. Copy-on-write of a row never happens: KV is only appended to, a full
// row has no byte left to write, and the row of the next token is never shared. `room`: tokens that
// will be asked for next; nothing is begun that they do not fit behind. False: no rows, and the
// slot is empty.
bool VattentionMemory::clone(int slot, int donor, int tokens, int room) {
  const int shared = share_ == KvShare::alias ? full_rows(tokens) : 0;
  const int donor_busy = rows_.busy(donor);
  rows_.set_busy(donor, std::max(donor_busy, rows_for(tokens)));  // nobody reclaims them now
  const KvStats stats = pool_->stats();
  bool done = stats.free + stats.cached >= rows_for(std::max(tokens, room)) - shared;
  if (done) {
    clear(slot);
    if (shared > 0) done = rows_.alias(slot, donor, shared);
    done = done && rows_.grow(slot, rows_for(tokens));
    if (done) {
      rows_.wait(donor, rows_for(tokens));
      copy_bytes(slot, donor, size_t(shared) * options_.page_group_bytes, size_t(tokens) * plane_token_bytes(options_));
      pool_->set_written(rows_.rows(slot).subspan(size_t(shared)), tokens - shared * row_tokens_);
    } else {
      set_busy(slot, 0);
      clear(slot);
    }
  }
  rows_.set_busy(donor, donor_busy);
  return done;
}

// A slot that holds match.tokens tokens of what `match` found; -1: it could not be used.
int VattentionMemory::attach(SlotContents::Match& match, int n_tokens) {
  const bool idle = usable(match.slot);
  // Nothing is lost if the donor goes on itself.
  const bool whole = idle && match.tokens == contents_.size(match.slot);
  if (share_ != KvShare::takeover && !whole) {
    const int slot = find_slot(0, match.slot);
    if (slot >= 0 && clone(slot, match.slot, match.tokens, n_tokens)) return slot;
  }
  return idle && take_over(match) ? match.slot : -1;
}

Result<KvReservation> VattentionMemory::reserve(std::span<const int32_t> tokens, uint64_t salt) {
  SlotContents::Match match;
  int slot = -1;
  if (sharing()) {
    query_tokens_.fetch_add(int64_t(tokens.size()), std::memory_order_relaxed);
    match = contents_.find(tokens, salt, share_ == KvShare::takeover);
    if (match.slot >= 0) slot = attach(match, int(tokens.size()));
  }
  if (slot < 0) {
    match = {};
    slot = find_slot(rows_for(int(tokens.size())), -1);
    if (slot < 0) return Error{ErrorCode::unavailable, "no free KV slot"};
    clear(slot);
  }
  if (sharing()) contents_.begin(slot, tokens.first(size_t(match.tokens)), salt);
  hit_tokens_.fetch_add(match.tokens, std::memory_order_relaxed);
  const KvHandle handle = open(slot, match.tokens);
  prepare_idle_slot();
  return KvReservation{handle, match.tokens};
}

int VattentionMemory::probe(std::span<const int32_t> tokens, uint64_t salt) const {
  return sharing() ? contents_.find(tokens, salt, share_ == KvShare::takeover).tokens : 0;
}

bool VattentionMemory::append(KvHandle handle, int n_tokens) {
  Sequence& s = sequences_[handle];
  XPYD_CHECK(n_tokens >= 0);
  const int tokens = s.written + n_tokens;
  check_length(tokens);
  if (!rows_.grow(s.slot, rows_for(tokens))) return false;
  s.room = std::max(s.room, tokens);
  const int limit = options_.max_sequence_tokens > 0 ? options_.max_sequence_tokens : s.room;
  rows_.grow_ahead(s.slot, rows_for(std::min(s.room + std::max(n_tokens, kAheadTokens), limit)));
  return true;
}

void VattentionMemory::written(KvHandle handle, std::span<const int32_t> tokens) {
  Sequence& s = sequences_[handle];
  XPYD_CHECK(s.written + int64_t(tokens.size()) <= s.room, "written without room");
  pool_->add_written(rows_.rows(s.slot), s.written, int(tokens.size()));
  s.written += int(tokens.size());
  if (sharing()) contents_.add(s.slot, tokens);
}

void VattentionMemory::trim(KvHandle handle) {
  Sequence& s = sequences_[handle];
  s.room = s.written;
  set_busy(s.slot, rows_for(s.room));
}

Result<KvHandle> VattentionMemory::fork(KvHandle handle) {
  trim(handle);
  const int written = sequences_[handle].written, donor = sequences_[handle].slot;
  const int slot = find_slot(rows_for(written), -1);
  if (slot < 0 || !clone(slot, donor, written, 0)) return Error{ErrorCode::unavailable, "no free KV slot"};
  if (sharing()) contents_.begin_like(slot, donor);
  return open(slot, written);
}

void VattentionMemory::free(KvHandle handle) {
  const int slot = sequences_[handle].slot;
  sequences_.remove(handle);
  slots_[size_t(slot)].live = false;
  rows_.end(slot);
  let_go(slot);
}

// A slot without a sequence: what no lease needs of it goes.
void VattentionMemory::let_go(int slot) {
  set_busy(slot, 0);
  if (slots_[size_t(slot)].pins == 0) return ended(slot);
  if (options_.keep_idle) return;
  rows_.give_back(slot, rows_.busy(slot));
  rows_.drain();
}

// Nobody needs the slot any more. It keeps its rows for the next sequence, unless free rows run
// short.
void VattentionMemory::ended(int slot) {
  if (options_.keep_idle) {
    contents_.end(slot);
    const int wanted = pool_->layout().n_blocks * kReclaimBelow / 100;
    rows_.reclaim(wanted - pool_->stats().free, find_slot(kEagerRows, -1));
  } else {
    rows_.give_back(slot, 0);
    rows_.drain();  // others may be waiting for them
  }
}

// Eager allocation (section 6.1.2): one idle slot has rows before anybody asks.
void VattentionMemory::prepare_idle_slot() {
  if (!options_.keep_idle) return;
  const int slot = find_slot(kEagerRows, -1);
  if (slot < 0 || contents_.size(slot) > 0) return;
  if (rows_.grow_ahead(slot, std::min(kEagerRows, rows_for(options_.max_sequence_tokens))))
    rows_.end(slot);  // the last one whose rows go to somebody else
}

// A lease holds the blocks and, since what reads them goes by address, the slot.
KvLease VattentionMemory::pin(KvHandle handle, int token_begin, int token_end) {
  const std::span<const int32_t> table = blocks(handle);
  XPYD_CHECK(0 <= token_begin && token_begin < token_end);
  const KvLease lease = hold(table, 0, token_end);
  if (size_t(lease) >= lease_places_.size()) lease_places_.resize(size_t(lease) + 1);
  const int index = sequences_[handle].slot, rows = std::min((token_end - 1) / row_tokens_ + 1, int(table.size()));
  lease_places_[size_t(lease)] = {index, rows};
  Slot& slot = slots_[size_t(index)];
  ++slot.pins;
  slot.pinned_rows = std::max(slot.pinned_rows, rows);
  return lease;
}

void VattentionMemory::unpin(KvLease lease) {
  PooledMemory::unpin(lease);
  const int index = std::exchange(lease_places_[size_t(lease)].slot, -1);
  Slot& slot = slots_[size_t(index)];
  --slot.pins;
  slot.pinned_rows = 0;
  for (const Place& place : lease_places_)
    if (place.slot == index) slot.pinned_rows = std::max(slot.pinned_rows, place.rows);
  if (!slot.live) let_go(index);  // else its next trim gives up what it does not need
}

// The rows travel; what they were mapped at is unmapped before the slot is used again.
KvHandover VattentionMemory::hand_over(KvHandle handle) {
  const Sequence& s = sequences_[handle];
  const int slot = s.slot;
  XPYD_CHECK(slots_[size_t(slot)].pins == 0, "a sequence with leases on its addresses is handed over");
  KvHandover handover{rows_.take(slot, rows_for(s.written)), s.written};
  pool_->begin_handover(handover.blocks);
  sequences_.remove(handle);
  slots_[size_t(slot)].live = false;
  contents_.truncate(slot, 0);
  rows_.end(slot);
  return handover;
}

KvHandle VattentionMemory::adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) {
  XPYD_CHECK(int(tokens.size()) >= handover.tokens);
  const int slot = find_slot(0, -1);  // one that gives up the least
  if (slot < 0 || !rows_.adopt(slot, handover.blocks)) {
    discard(std::move(handover));
    return kNoKv;
  }
  pool_->end_handover(handover.blocks, true);
  if (sharing()) contents_.begin(slot, tokens.first(size_t(handover.tokens)), salt);
  return open(slot, handover.tokens);
}

KvView VattentionMemory::view(KvHandle handle) const {
  const Sequence& s = sequences_[handle];
  rows_.wait(s.slot, rows_for(s.room));
  return {base(), &layout_, nullptr, s.slot};
}

KvStats VattentionMemory::stats() const {
  KvStats stats = PooledMemory::stats();
  stats.evictions = rows_.reclaimed();
  stats.map_calls = rows_.calls().maps.load(std::memory_order_relaxed);
  stats.unmap_calls = rows_.calls().unmaps.load(std::memory_order_relaxed);
  stats.mapped_bytes = (stats.capacity - stats.free) * int64_t(pool_->block_bytes());
  stats.mappings = rows_.mappings();
  const PageMapper::Stats jobs = rows_.jobs();
  stats.waited_jobs = jobs.owner_jobs + jobs.waits;
  stats.map_wait_seconds = jobs.stall_seconds;
  return stats;
}

void VattentionMemory::check_invariants(bool complete) const {
  rows_.drain();
  PooledMemory::check_invariants(complete);
  for (int i = 0; i < layout_.n_blocks; ++i) {
    const Slot& slot = slots_[size_t(i)];
    XPYD_CHECK(slot.live || rows_.busy(i) == slot.pinned_rows);
    XPYD_CHECK(contents_.size(i) <= int(rows_.rows(i).size()) * row_tokens_);
  }
}

void VattentionMemory::check_sequence(const Sequence& s) const {
  XPYD_CHECK(s.slot >= 0 && slots_[size_t(s.slot)].live);
  XPYD_CHECK(rows_.busy(s.slot) >= rows_for(s.room));
  XPYD_CHECK(contents_.size(s.slot) == (sharing() ? s.written : 0));
  // Nobody else sees what it writes next.
  XPYD_CHECK(rows_.unshared_from(s.slot, full_rows(s.written)) == int(rows_.rows(s.slot).size()));
}

}  // namespace

int vattention_row_tokens(const KvOptions& o) {
  const size_t token = plane_token_bytes(o);
  return token == 0 ? 0 : int(o.page_group_bytes / token);
}

size_t vattention_row_bytes(const KvOptions& o) { return size_t(planes_of(o)) * o.page_group_bytes; }

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

std::unique_ptr<KvMemory> make_vattention(std::shared_ptr<BlockPool> pool, const KvOptions& options) {
  return std::make_unique<VattentionMemory>(std::move(pool), options);
}

}  // namespace xpyd
