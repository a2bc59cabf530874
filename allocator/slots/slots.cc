// slots: contiguous memory whose slots keep their contents when their sequence ends (TurboMind's first generation,
// LlamaCacheManager). The next request of a conversation has the same salt and begins with the contents of a slot. It
// takes that slot over and computes only the new tokens. If no slot is free, the one whose sequence ended first is
// evicted. Its conversation must then compute its KV again.
#include <algorithm>
#include <atomic>
#include <mutex>

#include "allocator/pool/block_pool.h"
#include "allocator/pool/pooled.h"
#include "allocator/prefix/slot_contents.h"
#include "allocator/slots/slot_memory.h"

namespace xpyd::allocator {
namespace {

struct SlotSequence : SequenceTokens {
  int32_t slot = -1;  // a block of the pool
  void clear() { written = room = 0, slot = -1; }
};

// `keep` off: this is scheme contiguous, one slot of the maximum length per sequence, taken at its start. It is the
// baseline of PagedAttention (SOSP'23, section 3.1, "Orca (Max)"), and wastes up to max - length tokens.
class SlotsMemory final : public Pooled<SlotSequence> {
 public:
  SlotsMemory(std::shared_ptr<KvPool> pool, const KvOptions& options, const char* name, bool keep)
      : Pooled(std::move(pool), options, name),
        blocks_(dynamic_cast<BlockPool&>(*pool_)),
        keep_(keep),
        contents_(layout().n_blocks),
        slots_(size_t(layout().n_blocks)),
        chunk_(keep ? options.slot_chunk : 0),
        n_backed_(chunk_ > 0 ? 0 : layout().n_blocks) {
    XPYD_CHECK(options.max_sequence_tokens == layout().block_tokens);
  }
  ~SlotsMemory() override {
    for (int32_t i = 0; i < layout().n_blocks; ++i)
      if (slots_[size_t(i)].idle) pool_->release({&i, 1});
    sequences_.for_each([this](const SlotSequence& s) { pool_->release({&s.slot, 1}); });
  }

  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override {
    if (keep_) query_tokens_.fetch_add(int64_t(tokens.size()), std::memory_order_relaxed);
    const SlotContents::Match match = contents_.find(tokens, salt, true);
    const KvHandle handle = match.slot >= 0 ? take_over(match.slot, match.tokens) : add();
    if (handle == kNoKv) return no_slot();
    hit_tokens_.fetch_add(match.tokens, std::memory_order_relaxed);
    contents_.begin(slot_of(handle), tokens.first(size_t(match.tokens)), salt);
    return KvReservation{handle, match.tokens};
  }

  int probe(std::span<const int32_t> tokens, uint64_t salt) const override {
    return contents_.find(tokens, salt, true).tokens;
  }

  bool append(KvHandle handle, int n_tokens) override {
    SlotSequence& s = sequences_[handle];
    XPYD_CHECK(n_tokens >= 0);
    check_length(s.written + n_tokens);
    s.room = std::max(s.room, s.written + n_tokens);
    return true;
  }

  void commit(KvHandle handle, std::span<const int32_t> tokens) override {
    SlotSequence& s = sequences_[handle];
    add_written(s, {&s.slot, 1}, tokens.size());
    if (keep_) contents_.add(s.slot, tokens);
  }

  void rollback(KvHandle handle) override {
    SlotSequence& s = sequences_[handle];
    s.room = s.written;
  }

  Result<KvHandle> fork(KvHandle handle) override {
    rollback(handle);
    const KvHandle child_handle = add();
    if (child_handle == kNoKv) return no_slot();
    const SlotSequence& parent = sequences_[handle];
    SlotSequence& child = sequences_[child_handle];
    copy_tokens(child.slot, parent.slot, parent.written);
    child.written = child.room = parent.written;
    pool_->set_written({&child.slot, 1}, child.written);
    contents_.begin_like(child.slot, parent.slot);
    return child_handle;
  }

  void free(KvHandle handle) override {
    const int32_t slot = slot_of(handle);
    if (!keep_ || sequences_[handle].written == 0) {
      contents_.truncate(slot, 0);
      return Pooled::free(handle);
    }
    sequences_.remove(handle);
    std::lock_guard lock(slots_mutex_);
    slots_[size_t(slot)] = {slots_[size_t(slot)].pins, true, ++clock_};
    if (slots_[size_t(slot)].pins == 0) contents_.end(slot);
  }

  // A lease protects the slot that it reads: no other sequence takes the slot. A lease that begins after the slot's
  // last token protects nothing.
  KvLease pin(KvHandle handle, int token_begin, int token_end) override {
    std::lock_guard lock(slots_mutex_);
    const KvLease lease = Pooled::pin(handle, token_begin, token_end);
    for (int32_t slot : leases_[lease]) ++slots_[size_t(slot)].pins;
    return lease;
  }
  void unpin(KvLease lease) override {
    std::lock_guard lock(slots_mutex_);
    for (int32_t slot : leases_[lease])
      if (--slots_[size_t(slot)].pins == 0 && slots_[size_t(slot)].idle) contents_.end(slot);
    Pooled::unpin(lease);
  }

  KvView view(KvHandle handle, int rank) const override {
    return {base(rank), &places().layout(rank), nullptr, slot_of(handle)};
  }

  void clear_prefix_cache() override { contents_.clear_idle(); }  // the slots stay evictable

  KvStats stats() const override {
    KvStats stats = Pooled::stats();
    if (chunk_ > 0) stats.mapped_bytes = int64_t(n_backed_) * int64_t(pool_->block_bytes());
    return stats;
  }

 private:
  struct Slot {
    int pins = 0;
    bool idle = false;  // its sequence has ended; any sequence that needs a slot may take it
    int64_t since = 0;
  };

  static Error no_slot() { return {ErrorCode::unavailable, "no free KV slot"}; }
  int32_t slot_of(KvHandle handle) const { return sequences_[handle].slot; }

  // Makes a sequence whose first `tokens` tokens are in that slot.
  KvHandle open(int32_t slot, int tokens) {
    const KvHandle handle = sequences_.add();
    SlotSequence& s = sequences_[handle];
    s.slot = slot, s.written = s.room = tokens;
    return handle;
  }

  KvHandle take_over(int32_t slot, int tokens) {
    {
      std::lock_guard lock(slots_mutex_);
      slots_[size_t(slot)].idle = false;
      pool_->set_written({&slot, 1}, tokens);
    }
    return open(slot, tokens);
  }

  // Makes an empty sequence in a free slot, or else in the slot whose sequence ended first. kNoKv: there is none. Slots
  // that were never used are taken in order.
  KvHandle add() {
    int64_t evictions = 0;
    taken_.clear();
    if (blocks_.allocate(1, taken_, evictions)) {
      while (taken_[0] >= n_backed_) {
        const int end = std::min(n_backed_ + chunk_, layout().n_blocks);
        touch_slots(places(), n_backed_, end);
        n_backed_ = end;
      }
      return open(taken_[0], 0);
    }
    int oldest = -1;
    for (int i = 0; i < layout().n_blocks; ++i) {
      const Slot& slot = slots_[size_t(i)];
      if (!slot.idle || slot.pins > 0) continue;
      if (oldest < 0 || slot.since < slots_[size_t(oldest)].since) oldest = i;
    }
    if (oldest < 0) return kNoKv;
    contents_.truncate(oldest, 0);
    evictions_.fetch_add(1, std::memory_order_relaxed);
    return take_over(oldest, 0);
  }

  // Only this memory references an idle slot, and it can give it up. So the slot counts as cached.
  KvStats pool_stats() const override {
    std::lock_guard lock(slots_mutex_);
    KvStats stats = pool_->stats();
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].idle || slots_[i].pins > 0) continue;
      --stats.active, ++stats.cached;
      stats.written_bytes -= pool_->filled(int32_t(i)) * int64_t(places().token_bytes());
    }
    return stats;
  }

  std::vector<KvState> states() const override {
    std::lock_guard lock(slots_mutex_);
    std::vector<KvState> states = pool_->states();
    for (size_t i = 0; i < slots_.size(); ++i)
      if (slots_[i].idle && slots_[i].pins == 0) states[i] = KvState::cached;
    return states;
  }

  void count_references(std::vector<int32_t>& references) const override {
    Pooled::count_references(references);
    for (size_t i = 0; i < slots_.size(); ++i) references[i] += slots_[i].idle;
  }
  bool reserves() const override { return true; }
  std::span<const int32_t> table_of(const SlotSequence& s) const override { return {&s.slot, 1}; }
  void check_sequence(const SlotSequence& s) const override {
    XPYD_CHECK(!slots_[size_t(s.slot)].idle && contents_.size(s.slot) == (keep_ ? s.written : 0));
  }

  BlockPool& blocks_;
  const bool keep_;
  SlotContents contents_;           // by block of the pool
  std::vector<Slot> slots_;         // by block of the pool
  mutable std::mutex slots_mutex_;  // guards idle and pins, for stats() from any thread
  int64_t clock_ = 0;
  std::vector<int32_t> taken_;  // reused
  const int chunk_;
  std::atomic<int> n_backed_;  // slots that have memory: [0, n_backed_)
};

// Makes the table row of a scheme whose blocks are slots.
KvScheme scheme_of_slots(const char* name, const char* source, decltype(KvScheme::make) make) {
  return {.name = name,
          .source = source,
          .unit = "slot",
          .block_tokens = [](const KvOptions& o) { return o.max_sequence_tokens; },
          .block_bytes = [](const KvOptions& o) { return bytes_of_tokens(o, o.max_sequence_tokens); },
          .check = nothing_more,
          .make_pool = [](const PoolPlan& plan) { return make_blocks(plan, false); },
          .make = make,
          .contiguous = true,
          .whole_slots = true};
}

}  // namespace

KvScheme contiguous_scheme() {
  return scheme_of_slots("contiguous", "SOSP'23 (PagedAttention) section 3.1: Orca (Max)",
                         [](std::shared_ptr<KvPool> pool, const KvOptions& o) -> std::unique_ptr<KvMemory> {
                           return std::make_unique<SlotsMemory>(std::move(pool), o, "contiguous", false);
                         });
}

KvScheme slots_scheme() {
  KvScheme scheme = scheme_of_slots("slots",
                                    "TurboMind's first generation: slots of the maximum length, LRU over sequences",
                                    [](std::shared_ptr<KvPool> pool, const KvOptions& o) -> std::unique_ptr<KvMemory> {
                                      return std::make_unique<SlotsMemory>(std::move(pool), o, "slots", o.prefix_cache);
                                    });
  scheme.check = check_chunks;
  scheme.make_pool = make_chunked_slots;
  return scheme;
}

}  // namespace xpyd::allocator
