// contiguous: one slot of the maximum length per sequence, taken when it starts: what PagedAttention was written
// against (SOSP'23, section 3.1, "Orca (Max)"). Plain addresses, and up to max - length tokens wasted.
//
// slots: the same memory, whose slots keep what they hold when their sequence ends (TurboMind's first generation,
// LlamaCacheManager). The next turn of a conversation, a prompt with the same salt that begins with what the slot
// holds, takes the slot over and computes only what is new. Without a free slot the one that ended first is evicted;
// its sequence comes back by computing it again.
#include <algorithm>
#include <mutex>
#include <utility>

#include "allocator/block_pool.h"
#include "allocator/pooled.h"
#include "allocator/slot_contents.h"

namespace xpyd::allocator {
namespace {

Error no_slot() { return {ErrorCode::unavailable, "no free KV slot"}; }

class ContiguousMemory final : public PooledMemory {
 public:
  ContiguousMemory(std::shared_ptr<KvPool> pool, const KvOptions& options, const char* name, bool keeps)
      : PooledMemory(std::move(pool), options, name),
        blocks_(dynamic_cast<BlockPool&>(*pool_)),
        keeps_(keeps),
        contents_(layout().n_blocks),
        slots_(size_t(layout().n_blocks)) {
    XPYD_CHECK(options.max_sequence_tokens == layout().block_tokens);
  }
  ~ContiguousMemory() override {
    for (int32_t i = 0; i < layout().n_blocks; ++i)
      if (slots_[size_t(i)].idle) pool_->release({&i, 1});
  }

  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override {
    SlotContents::Match match;
    if (keeps_) {
      query_tokens_.fetch_add(int64_t(tokens.size()), std::memory_order_relaxed);
      match = contents_.find(tokens, salt, true);
    }
    const KvHandle handle = match.slot >= 0 ? take_over(match.slot, match.tokens) : add();
    if (handle == kNoKv) return no_slot();
    hit_tokens_.fetch_add(match.tokens, std::memory_order_relaxed);
    if (keeps_) contents_.begin(sequences_[handle].table[0], tokens.first(size_t(match.tokens)), salt);
    return KvReservation{handle, match.tokens};
  }

  int probe(std::span<const int32_t> tokens, uint64_t salt) const override {
    return keeps_ ? contents_.find(tokens, salt, true).tokens : 0;
  }

  bool append(KvHandle handle, int n_tokens) override {
    Sequence& s = sequences_[handle];
    XPYD_CHECK(n_tokens >= 0);
    check_length(s.written + n_tokens);
    s.room = std::max(s.room, s.written + n_tokens);
    return true;
  }

  void written(KvHandle handle, std::span<const int32_t> tokens) override {
    Sequence& s = sequences_[handle];
    add_written(s, s.table, tokens.size());
    if (keeps_) contents_.add(s.table[0], tokens);
  }

  void trim(KvHandle handle) override {
    Sequence& s = sequences_[handle];
    s.room = s.written;
  }

  Result<KvHandle> fork(KvHandle handle) override {
    trim(handle);
    KvHandle child_handle = add();
    if (child_handle == kNoKv) return no_slot();
    const Sequence& parent = sequences_[handle];
    Sequence& child = sequences_[child_handle];
    copy_tokens(child.table[0], parent.table[0], parent.written);
    child.written = child.room = parent.written;
    pool_->set_written(child.table, child.written);
    if (keeps_) contents_.begin_like(child.table[0], parent.table[0]);
    return child_handle;
  }

  void free(KvHandle handle) override {
    if (!keeps_ || sequences_[handle].written == 0) {
      if (keeps_) contents_.truncate(sequences_[handle].table[0], 0);
      return PooledMemory::free(handle);
    }
    const int32_t slot = sequences_[handle].table[0];
    sequences_.remove(handle);
    std::lock_guard lock(slots_mutex_);
    slots_[size_t(slot)] = {slots_[size_t(slot)].pins, true, ++clock_};
    if (slots_[size_t(slot)].pins == 0) contents_.end(slot);
  }

  // What a lease reads stays as it is: its slot is taken by nobody. A lease of what begins behind
  // the slot's last token has none.
  KvLease pin(KvHandle handle, int token_begin, int token_end) override {
    std::lock_guard lock(slots_mutex_);
    const KvLease lease = PooledMemory::pin(handle, token_begin, token_end);
    for (int32_t slot : leases_[lease]) ++slots_[size_t(slot)].pins;
    return lease;
  }
  void unpin(KvLease lease) override {
    std::lock_guard lock(slots_mutex_);
    for (int32_t slot : leases_[lease])
      if (--slots_[size_t(slot)].pins == 0 && slots_[size_t(slot)].idle) contents_.end(slot);
    PooledMemory::unpin(lease);
  }

  KvHandover hand_over(KvHandle handle) override {
    if (keeps_) contents_.truncate(sequences_[handle].table[0], 0);
    return PooledMemory::hand_over(handle);
  }

  KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) override {
    const KvHandle handle = add_adopted(handover, tokens);
    if (handle == kNoKv) return kNoKv;
    XPYD_CHECK(handover.blocks.size() == 1);
    if (keeps_) contents_.begin(handover.blocks[0], tokens.first(size_t(handover.tokens)), salt);
    return handle;
  }

  KvView view(KvHandle handle, int rank) const override {
    return {base(rank), &places().layout(rank), nullptr, sequences_[handle].table[0]};
  }

  bool tail_shared(KvHandle) const override { return false; }
  void clear_prefix_cache() override { contents_.clear_idle(); }  // the slots are evictable as before

 private:
  struct Slot {
    int pins = 0;
    bool idle = false;  // its sequence has ended: whoever needs a slot can have it
    int64_t since = 0;
  };

  KvHandle take_over(int32_t slot, int tokens) {
    {
      std::lock_guard lock(slots_mutex_);
      slots_[size_t(slot)].idle = false;
      pool_->set_written({&slot, 1}, tokens);
    }
    const KvHandle handle = sequences_.add();
    Sequence& s = sequences_[handle];
    s.table.assign(1, slot);
    s.written = s.room = tokens;
    return handle;
  }

  // A slot that holds nothing: a free one, else the one whose sequence ended first.
  KvHandle add() {
    KvHandle handle = sequences_.add();
    int64_t evictions = 0;
    if (blocks_.allocate(1, sequences_[handle].table, evictions)) return handle;
    sequences_.remove(handle);
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

  // An idle slot is referenced by nobody but this memory, which can do without it: as good as cached.
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

  bool reserves() const override { return true; }
  void count_references(std::vector<int32_t>& references) const override {
    PooledMemory::count_references(references);
    for (size_t i = 0; i < slots_.size(); ++i) references[i] += slots_[i].idle;
  }
  void check_sequence(const Sequence& s) const override {
    XPYD_CHECK(s.table.size() == 1 && !slots_[size_t(s.table[0])].idle);
    XPYD_CHECK(contents_.size(s.table[0]) == (keeps_ ? s.written : 0));
  }

  BlockPool& blocks_;
  const bool keeps_;
  SlotContents contents_;           // by block of the pool
  std::vector<Slot> slots_;         // the same
  mutable std::mutex slots_mutex_;  // idle and pins, for stats() of any thread
  int64_t clock_ = 0;
};

KvScheme scheme_of_slots(const char* name, const char* source) {
  return {.name = name,
          .source = source,
          .unit = "slot",
          .block_tokens = [](const KvOptions& o) { return o.max_sequence_tokens; },
          .block_bytes = [](const KvOptions& o) { return bytes_of_tokens(o, o.max_sequence_tokens); },
          .check = nothing_more,
          .make_pool = [](const PoolPlan& plan) { return make_blocks(plan, false); },
          .contiguous = true,
          .whole_slots = true};
}

}  // namespace

KvScheme contiguous_scheme() {
  KvScheme scheme = scheme_of_slots("contiguous", "SOSP'23 (PagedAttention) section 3.1: Orca (Max)");
  scheme.make = [](std::shared_ptr<KvPool> pool, const KvOptions& o) -> std::unique_ptr<KvMemory> {
    return std::make_unique<ContiguousMemory>(std::move(pool), o, "contiguous", false);
  };
  return scheme;
}

// Where several memories share the pool, what one keeps another one lacks.
KvScheme slots_scheme() {
  KvScheme scheme = scheme_of_slots("slots",
                                    "TurboMind's first generation: slots of the maximum length, LRU over sequences");
  scheme.make = [](std::shared_ptr<KvPool> pool, const KvOptions& o) -> std::unique_ptr<KvMemory> {
    return std::make_unique<ContiguousMemory>(std::move(pool), o, "slots", o.prefix_cache && o.keep_idle);
  };
  return scheme;
}

}  // namespace xpyd::allocator
