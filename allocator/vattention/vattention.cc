// vattention: each sequence has contiguous virtual addresses for its longest length, and memory behind the part that it
// uses (Prabhu et al., ASPLOS'25). Kernels see contiguous memory. Only the end of one page-group row
// (page_group_rows.h) is wasted.
//
// A slot is a piece of the virtual range (slot_rows.h). When its sequence ends, its rows stay mapped (deferred
// reclamation, section 6.1.2), and their contents stay known (slot_contents.h). A sequence that begins with the same
// tokens maps the full rows a second time, continues in the slot, or copies (VattentionOptions::share). Any other
// sequence maps only the rows that its slot does not have yet.
#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "allocator/pool/pooled.h"
#include "allocator/vattention/slot_rows.h"

namespace xpyd::allocator {
namespace {

constexpr int kAheadTokens = 8;    // the next row of a decoding sequence is mapped this many tokens early
constexpr int kReclaimBelow = 10;  // percent of rows: with fewer free ones, idle slots give rows back

// A memory's share of the mappings that this process may have; 0: there is no limit. Beyond its limit the kernel
// refuses every mmap, also those of unmap() and malloc(), so some mappings are left to them.
int64_t most_mappings(const KvOptions& options) {
  const int64_t limit = options.vattention.on_card ? 0 : max_mappings();
  return (limit - limit / 32) / options.n_memories;
}

struct VattentionSequence : SequenceTokens {
  int32_t slot = -1;  // of virtual addresses
  void clear() { written = room = 0, slot = -1; }
};

class VattentionMemory final : public Pooled<VattentionSequence> {
  using Sequence = VattentionSequence;

 public:
  // `slots`: their layout, at the addresses of `ranges`.
  VattentionMemory(std::shared_ptr<KvPool> pool, const KvOptions& options, const KvPlaces& slots,
                   std::vector<std::unique_ptr<VirtualRange>> ranges)
      : Pooled(std::move(pool), options, "vattention", slots),
        row_tokens_(pool_->layout().block_tokens),
        token_bytes_(slots.layout(0).token_stride()),
        share_(options.prefix_cache ? options.vattention.share : KvShare::off),
        contents_(layout().n_blocks),
        row_pool_(dynamic_cast<PageGroupRows&>(*pool_)),
        rows_(row_pool_, std::move(ranges), places(), most_mappings(options), contents_) {}

  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override {
    SlotContents::Match match;
    int slot = -1;
    if (sharing()) {
      query_tokens_.fetch_add(int64_t(tokens.size()), std::memory_order_relaxed);
      match = contents_.find(tokens, salt, share_ == KvShare::takeover);
      if (match.slot >= 0) slot = attach(match, int(tokens.size()));
    }
    if (slot < 0) {
      match = {};
      slot = find_slot(-1);
      if (slot < 0) return Error{ErrorCode::unavailable, "no free KV slot"};
      clear(slot);
    }
    if (sharing()) contents_.begin(slot, tokens.first(size_t(match.tokens)), salt);
    hit_tokens_.fetch_add(match.tokens, std::memory_order_relaxed);
    return KvReservation{open(slot, match.tokens), match.tokens};
  }

  int probe(std::span<const int32_t> tokens, uint64_t salt) const override {
    return sharing() ? contents_.find(tokens, salt, share_ == KvShare::takeover).tokens : 0;
  }

  bool append(KvHandle handle, int n_tokens) override {
    Sequence& s = sequences_[handle];
    XPYD_CHECK(n_tokens >= 0);
    const int tokens = s.written + n_tokens;
    check_length(tokens);
    if (!rows_.grow(s.slot, rows_for(tokens))) return false;
    s.room = std::max(s.room, tokens);
    if (!options_.vattention.map_ahead) return true;
    const int limit = options_.max_sequence_tokens > 0 ? options_.max_sequence_tokens : s.room;
    rows_.grow_ahead(s.slot, rows_for(std::min(s.room + std::max(n_tokens, kAheadTokens), limit)));
    return true;
  }

  void commit(KvHandle handle, std::span<const int32_t> tokens) override {
    Sequence& s = sequences_[handle];
    add_written(s, rows_.rows(s.slot), tokens.size());
    if (sharing()) contents_.add(s.slot, tokens);
  }

  void rollback(KvHandle handle) override {
    Sequence& s = sequences_[handle];
    s.room = s.written;
    rows_.set_busy(s.slot, std::max(rows_for(s.room), leased_rows(s.slot)));
  }

  Result<KvHandle> fork(KvHandle handle) override {
    rollback(handle);
    const int written = sequences_[handle].written, donor = sequences_[handle].slot;
    const int slot = find_slot(-1);
    if (slot < 0 || !clone(slot, donor, written, 0)) return Error{ErrorCode::unavailable, "no free KV slot"};
    if (sharing()) contents_.begin_like(slot, donor);
    return open(slot, written);
  }

  void free(KvHandle handle) override {
    const int slot = sequences_[handle].slot;
    sequences_.remove(handle);
    rows_.end(slot);
    let_go(slot);
  }

  // A lease holds the blocks. It holds the slot too, because a transfer reads by address.
  KvLease pin(KvHandle handle, int token_begin, int token_end) override {
    XPYD_CHECK(0 <= token_begin && token_begin < token_end);
    const KvLease lease = Pooled::pin(handle, 0, token_end);
    if (size_t(lease) >= lease_slots_.size()) lease_slots_.resize(size_t(lease) + 1, -1);
    lease_slots_[size_t(lease)] = sequences_[handle].slot;
    return lease;
  }

  void unpin(KvLease lease) override {
    Pooled::unpin(lease);
    const int slot = std::exchange(lease_slots_[size_t(lease)], -1);
    if (!rows_.live(slot)) let_go(slot);  // otherwise the sequence's next rollback gives back the rest
  }

  KvView view(KvHandle handle, int rank) const override {
    const Sequence& s = sequences_[handle];
    rows_.wait(s.slot, rows_for(s.room));
    return {base(rank), &places().layout(rank), nullptr, s.slot};
  }

  void clear_prefix_cache() override { contents_.clear_idle(); }

  KvStats stats() const override {
    KvStats stats = Pooled::stats();
    stats.evictions = rows_.reclaimed();
    stats.vattention = rows_.stats();
    stats.mapped_bytes = (stats.capacity - stats.free) * int64_t(pool_->block_bytes());
    stats.mappings = rows_.mappings();
    return stats;
  }

  void check_invariants(bool complete) const override {
    rows_.drain();
    Pooled::check_invariants(complete);
    std::vector<int32_t> references(size_t(row_pool_.layout().n_blocks), 0), idle = references;
    rows_.count_references(references, idle);
    row_pool_.check_idle(idle, complete);
    for (int i = 0; i < layout().n_blocks; ++i) {
      XPYD_CHECK(rows_.live(i) || rows_.busy(i) == leased_rows(i));
      XPYD_CHECK(contents_.size(i) <= int(rows_.rows(i).size()) * row_tokens_);
    }
  }

 private:
  int rows_for(int tokens) const { return (tokens + row_tokens_ - 1) / row_tokens_; }
  // Returns the rows whose bytes all belong to the first `tokens` tokens. Sequences that share them never write there.
  int full_rows(int tokens) const { return int(size_t(tokens) * token_bytes_ / options_.vattention.page_group_bytes); }
  bool sharing() const { return share_ != KvShare::off; }
  // The first rows of the slot that leases hold.
  int leased_rows(int slot) const {
    size_t n = 0;
    for (size_t lease = 0; lease < lease_slots_.size(); ++lease)
      if (lease_slots_[lease] == slot) n = std::max(n, leases_[KvLease(lease)].size());
    return int(n);
  }
  bool usable(int slot) const { return !rows_.live(slot) && leased_rows(slot) == 0; }

  // Returns the first idle slot without contents. Contents may still be used, and losing only their end when rows run
  // short is better than losing the slot. So a slot with contents comes second, and the one that ended first goes
  // first. -1: no slot is idle.
  int find_slot(int except) const {
    int oldest = -1;
    for (int i = 0; i < layout().n_blocks; ++i) {
      if (i == except || !usable(i)) continue;
      if (contents_.size(i) == 0) return i;
      if (oldest < 0 || rows_.idle_since(i) < rows_.idle_since(oldest)) oldest = i;
    }
    return oldest;
  }

  // Starts a sequence in an idle slot whose first rows hold its first `tokens` tokens.
  KvHandle open(int slot, int tokens) {
    const KvHandle handle = sequences_.add();
    Sequence& s = sequences_[handle];
    s.slot = slot;
    s.written = s.room = tokens;
    rows_.begin(slot);
    return handle;
  }

  // Forgets the contents of an idle slot. The slot keeps its rows, except those that others share.
  void clear(int slot) {
    rows_.give_back(slot, rows_.unshared_from(slot, 0));
    contents_.truncate(slot, 0);
    pool_->set_written(rows_.rows(slot), 0);
  }

  // The slot has lost its sequence. If no lease needs it, it keeps its rows for the next sequence, unless free rows run
  // short.
  void let_go(int slot) {
    const int leased = leased_rows(slot);
    rows_.set_busy(slot, leased);
    if (leased > 0) return;
    contents_.end(slot);
    rows_.reclaim(pool_->layout().n_blocks * kReclaimBelow / 100 - pool_->stats().free);
  }

  void check_sequence(const Sequence& s) const override {
    XPYD_CHECK(s.slot >= 0 && rows_.live(s.slot));
    XPYD_CHECK(rows_.busy(s.slot) >= rows_for(s.room));
    XPYD_CHECK(contents_.size(s.slot) == (sharing() ? s.written : 0));
    // Nobody else uses the rows that it writes next.
    XPYD_CHECK(rows_.unshared_from(s.slot, full_rows(s.written)) == int(rows_.rows(s.slot).size()));
  }

  std::span<const int32_t> table_of(const Sequence& s) const override {
    XPYD_CHECK(rows_for(s.room) <= int(rows_.rows(s.slot).size()));
    return rows_.rows(s.slot).first(size_t(rows_for(s.room)));
  }
  void count_references(std::vector<int32_t>& references) const override {
    std::vector<int32_t> idle(references.size(), 0);
    rows_.count_references(references, idle);
  }

  // Sharing. A prompt that begins with the contents of another slot maps that slot's full rows a second time, continues
  // in the slot if its sequence has ended, or copies (VattentionOptions::share). A fork maps or copies.

  // Returns a slot that holds match.tokens tokens of the matched prefix; -1: the match cannot be used.
  int attach(SlotContents::Match& match, int n_tokens) {
    const bool idle = usable(match.slot);
    // If the prompt continues exactly at the donor's end, using the donor itself loses nothing.
    const bool whole = idle && match.tokens == contents_.size(match.slot);
    if (share_ != KvShare::takeover && !whole) {
      const int slot = find_slot(match.slot);
      if (slot >= 0 && clone(slot, match.slot, match.tokens, n_tokens)) return slot;
    }
    return idle && take_over(match) ? match.slot : -1;
  }

  // Continues the idle slot after its first match.tokens tokens. The row in which they end will be written. If others
  // use that row, the match is cut to the row before. False: no such cut is possible.
  bool take_over(SlotContents::Match& match) {
    const int slot = match.slot, full = full_rows(match.tokens);
    const int own = rows_.unshared_from(slot, full);
    if (own < rows_for(match.tokens)) {
      if (full == 0 || options_.vattention.page_group_bytes % token_bytes_ != 0) return false;
      match.tokens = full * row_tokens_;
    }
    rows_.give_back(slot, own);
    rows_.set_busy(slot, rows_for(match.tokens));
    pool_->set_written(rows_.rows(slot).subspan(size_t(full)), match.tokens - full * row_tokens_);
    return true;
  }

  // Puts the first `tokens` tokens of `donor` into the idle slot: full rows by a second mapping (alias), the rest by a
  // copy. A row never needs copy-on-write, because KV is only appended: a full row has no byte left to write, and the
  // row of the next token is never shared. `room`: tokens that will be asked for next; the clone is refused if they
  // would not fit. False: there are too few rows, and the slot is empty.
  bool clone(int slot, int donor, int tokens, int room) {
    const int shared = share_ == KvShare::alias ? full_rows(tokens) : 0;
    const int donor_busy = rows_.busy(donor);
    rows_.set_busy(donor, std::max(donor_busy, rows_for(tokens)));  // so that nobody reclaims them now
    const KvStats stats = pool_->stats();
    bool done = stats.free + stats.cached >= rows_for(std::max(tokens, room)) - shared;
    if (done) {
      clear(slot);
      if (shared > 0) done = rows_.alias(slot, donor, shared);
      done = done && rows_.grow(slot, rows_for(tokens));
      if (done) {
        rows_.wait(donor, rows_for(tokens));
        copy_bytes(slot, donor, size_t(shared) * options_.vattention.page_group_bytes, size_t(tokens) * token_bytes_);
        pool_->set_written(rows_.rows(slot).subspan(size_t(shared)), tokens - shared * row_tokens_);
      } else {
        rows_.set_busy(slot, 0);
        clear(slot);
      }
    }
    rows_.set_busy(donor, donor_busy);
    return done;
  }

  // Copies bytes [begin, end) of each plane of a slot, on all ranks.
  void copy_bytes(int to, int from, size_t begin, size_t end) {
    copies_.clear();
    if (begin == end) return;
    for (int rank = 0; rank < n_ranks(); ++rank) {
      const KvLayout& slots = places().layout(rank);
      for (int p = 0; p < vattention_planes(slots); ++p)
        copies_.push_back({base(rank) + slots.offset(from, p / 2, p % 2, 0, 0) + begin,
                           base(rank) + slots.offset(to, p / 2, p % 2, 0, 0) + begin, end - begin});
    }
    queue_.copy(copies_, true);
    queue_.wait();
  }

  const int row_tokens_;
  const size_t token_bytes_;  // bytes of one token in one plane, equal on every rank
  const KvShare share_;
  SlotContents contents_;
  PageGroupRows& row_pool_;
  SlotRows rows_;
  std::vector<int> lease_slots_;  // by lease: the slot whose first rows it holds; -1: no such lease
};

}  // namespace

std::unique_ptr<KvMemory> memory_over_rows(std::shared_ptr<KvPool> pool, const KvOptions& options,
                                           const KvPlaces& slots, std::vector<std::unique_ptr<VirtualRange>> ranges) {
  return std::make_unique<VattentionMemory>(std::move(pool), options, slots, std::move(ranges));
}

}  // namespace xpyd::allocator
