// vattention: every sequence has contiguous virtual addresses for its longest length, and memory
// behind the part that it uses (Prabhu et al., ASPLOS'25). Kernels see contiguous memory; what is
// left of waste is the end of one row of page groups (page_mapper.h).
//
// A slot is a piece of the virtual range (slot_rows.h). Its rows stay mapped when its sequence ends (deferred
// reclamation, section 6.1.2), and so does what they hold (slot_contents.h): a sequence that begins alike maps the full
// rows a second time, goes on in the slot, or copies (VattentionOptions::share); any other maps only what it needs
// beyond the rows of the slot it takes.
#include "allocator/vattention/vattention.h"

namespace xpyd::allocator {
namespace {

constexpr int kAheadTokens = 8;    // of a decoding sequence: its next row is mapped so much earlier
constexpr int kEagerRows = 2;      // kept mapped on one idle slot for the next arrival
constexpr int kReclaimBelow = 10;  // percent of the rows free: idle slots give rows back

}  // namespace

// Slots without contents first: of them the best fit, that is the fewest mapped rows that are
// enough, else the most. What others hold may yet be wanted, and to lose only the end of it, when
// rows run short, is better than to take the slot: then the one that ended first. -1: none is idle.
int VattentionMemory::find_slot(int rows, int except) const {
  int best = -1, its = 0, oldest = -1;
  for (int i = 0; i < layout().n_blocks; ++i) {
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
  add_written(s, rows_.rows(s.slot), tokens.size());
  if (sharing()) contents_.add(s.slot, tokens);
}

void VattentionMemory::trim(KvHandle handle) {
  Sequence& s = sequences_[handle];
  s.room = s.written;
  set_busy(s.slot, rows_for(s.room));
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

// Nobody needs the slot any more. It keeps its rows for the next sequence, unless free rows run short.
void VattentionMemory::ended(int slot) {
  if (options_.keep_idle) {
    contents_.end(slot);
    rows_.reclaim(pool_->layout().n_blocks * kReclaimBelow / 100 - pool_->stats().free, find_slot(kEagerRows, -1));
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
  XPYD_CHECK(0 <= token_begin && token_begin < token_end);
  const KvLease lease = hold(blocks(handle), 0, token_end);
  const int index = sequences_[handle].slot;
  if (size_t(lease) >= lease_slots_.size()) lease_slots_.resize(size_t(lease) + 1, -1);
  lease_slots_[size_t(lease)] = index;
  Slot& slot = slots_[size_t(index)];
  ++slot.pins;
  slot.pinned_rows = std::max(slot.pinned_rows, int(leases_[lease].size()));
  return lease;
}

void VattentionMemory::unpin(KvLease lease) {
  PooledMemory::unpin(lease);
  const int index = std::exchange(lease_slots_[size_t(lease)], -1);
  Slot& slot = slots_[size_t(index)];
  --slot.pins;
  slot.pinned_rows = 0;
  for (size_t other = 0; other < lease_slots_.size(); ++other)
    if (lease_slots_[other] == index)
      slot.pinned_rows = std::max(slot.pinned_rows, int(leases_[KvLease(other)].size()));
  if (!slot.live) let_go(index);  // else its next trim gives up what it does not need
}

// The rows travel; what they were mapped at is unmapped before the slot is used again.
KvHandover VattentionMemory::hand_over(KvHandle handle) {
  const Sequence& s = sequences_[handle];
  const int slot = s.slot;
  XPYD_CHECK(slots_[size_t(slot)].pins == 0, "a sequence with leases on its addresses is handed over");
  KvHandover handover{rows_.take(slot, rows_for(s.written)), s.written};
  pool_->begin_handover(handover);
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
  XPYD_CHECK(pool_->adopt(handover));
  if (sharing()) contents_.begin(slot, tokens.first(size_t(handover.tokens)), salt);
  return open(slot, handover.tokens);
}

KvView VattentionMemory::view(KvHandle handle, int rank) const {
  const Sequence& s = sequences_[handle];
  rows_.wait(s.slot, rows_for(s.room));
  return {base(rank), &places().layout(rank), nullptr, s.slot};
}

KvStats VattentionMemory::stats() const {
  KvStats stats = PooledMemory::stats();
  stats.evictions = rows_.reclaimed();
  stats.vattention = rows_.stats();
  stats.mapped_bytes = (stats.capacity - stats.free) * int64_t(pool_->block_bytes());
  stats.mappings = rows_.mappings();
  return stats;
}

void VattentionMemory::check_invariants(bool complete) const {
  rows_.drain();
  PooledMemory::check_invariants(complete);
  std::vector<int32_t> references(size_t(row_pool_.layout().n_blocks), 0), idle = references;
  rows_.count_references(references, idle);
  row_pool_.check_idle(idle, complete);
  for (int i = 0; i < layout().n_blocks; ++i) {
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

}  // namespace xpyd::allocator
