// slots: contiguous memory whose slots keep what they hold when their sequence ends (TurboMind's first generation,
// LlamaCacheManager). The next turn of a conversation, a prompt with the same salt that begins with what the slot
// holds, takes the slot over and computes only what is new. Without a free slot the one that ended first is evicted;
// its sequence comes back by computing it again.
//
// Memory stands behind all slots from the start, or is given to slot_chunk of them at a time (LlamaCacheManager's
// cache_chunk_size) when a sequence comes for which those so far have no room; it stays.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "allocator/prefix/slot_contents.h"
#include "allocator/slots/contiguous.h"

namespace xpyd::allocator {
namespace {

class SlotsMemory final : public ContiguousMemory {
 public:
  SlotsMemory(std::shared_ptr<KvPool> pool, const KvOptions& options)
      : ContiguousMemory(std::move(pool), options, "slots"),
        contents_(layout().n_blocks),
        slots_(size_t(layout().n_blocks)),
        chunk_(options.slot_chunk),
        n_backed_(chunk_ > 0 ? 0 : layout().n_blocks) {}
  ~SlotsMemory() override {
    for (int32_t i = 0; i < layout().n_blocks; ++i)
      if (slots_[size_t(i)].idle) pool_->release({&i, 1});
  }

  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override {
    query_tokens_.fetch_add(int64_t(tokens.size()), std::memory_order_relaxed);
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

  void written(KvHandle handle, std::span<const int32_t> tokens) override {
    ContiguousMemory::written(handle, tokens);
    contents_.add(slot_of(handle), tokens);
  }

  Result<KvHandle> fork(KvHandle handle) override {
    Result<KvHandle> child = ContiguousMemory::fork(handle);
    if (child) contents_.begin_like(slot_of(child.value()), slot_of(handle));
    return child;
  }

  void free(KvHandle handle) override {
    const int32_t slot = slot_of(handle);
    if (sequences_[handle].written == 0) {
      contents_.truncate(slot, 0);
      return ContiguousMemory::free(handle);
    }
    sequences_.remove(handle);
    std::lock_guard lock(slots_mutex_);
    slots_[size_t(slot)] = {slots_[size_t(slot)].pins, true, ++clock_};
    if (slots_[size_t(slot)].pins == 0) contents_.end(slot);
  }

  // What a lease reads stays as it is: its slot is taken by nobody. A lease of what begins behind
  // the slot's last token has none.
  KvLease pin(KvHandle handle, int token_begin, int token_end) override {
    std::lock_guard lock(slots_mutex_);
    const KvLease lease = ContiguousMemory::pin(handle, token_begin, token_end);
    for (int32_t slot : leases_[lease]) ++slots_[size_t(slot)].pins;
    return lease;
  }
  void unpin(KvLease lease) override {
    std::lock_guard lock(slots_mutex_);
    for (int32_t slot : leases_[lease])
      if (--slots_[size_t(slot)].pins == 0 && slots_[size_t(slot)].idle) contents_.end(slot);
    ContiguousMemory::unpin(lease);
  }

  KvHandover hand_over(KvHandle handle) override {
    contents_.truncate(slot_of(handle), 0);
    return ContiguousMemory::hand_over(handle);
  }

  KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) override {
    const KvHandle handle = ContiguousMemory::adopt(handover, tokens, salt);
    if (handle != kNoKv) contents_.begin(slot_of(handle), tokens.first(size_t(handover.tokens)), salt);
    return handle;
  }

  void clear_prefix_cache() override { contents_.clear_idle(); }  // the slots are evictable as before

  KvStats stats() const override {
    KvStats stats = ContiguousMemory::stats();
    if (chunk_ > 0) stats.mapped_bytes = int64_t(n_backed_) * int64_t(pool_->block_bytes());
    return stats;
  }

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

  // The next slots in order, which is the order of free ones that were never taken: the system gives a page when it is
  // touched. What is touched is theirs alone.
  void back_chunk() {
    const int begin = n_backed_, end = std::min(begin + chunk_, layout().n_blocks);
    const auto touch = [](std::byte* from, size_t bytes) {
      for (size_t at = 0; at < bytes; at += 4096) *reinterpret_cast<volatile std::byte*>(from + at) = std::byte{0};
    };
    for (int rank = 0; rank < n_ranks(); ++rank) {
      const KvLayout& own = places().layout(rank);
      const int planes = own.order == KvOrder::layer_major ? 2 * own.shape.n_layers : 1;
      for (int plane = 0; plane < planes; ++plane)
        touch(base(rank) + own.offset(begin, plane / 2, plane % 2, 0, 0),
              size_t(end - begin) * own.block_bytes() / size_t(planes));
    }
    n_backed_ = end;
  }

  // In a free slot, else in the one whose sequence ended first.
  KvHandle add() override {
    if (const KvHandle handle = ContiguousMemory::add(); handle != kNoKv) {
      while (slot_of(handle) >= n_backed_) back_chunk();
      return handle;
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

  std::vector<KvState> states() const override {
    std::lock_guard lock(slots_mutex_);
    std::vector<KvState> states = pool_->states();
    for (size_t i = 0; i < slots_.size(); ++i)
      if (slots_[i].idle && slots_[i].pins == 0) states[i] = KvState::cached;
    return states;
  }

  void count_references(std::vector<int32_t>& references) const override {
    PooledMemory::count_references(references);
    for (size_t i = 0; i < slots_.size(); ++i) references[i] += slots_[i].idle;
  }
  void check_sequence(const Sequence& s) const override {
    ContiguousMemory::check_sequence(s);
    XPYD_CHECK(!slots_[size_t(s.table[0])].idle && contents_.size(s.table[0]) == s.written);
  }

  SlotContents contents_;           // by block of the pool
  std::vector<Slot> slots_;         // the same
  mutable std::mutex slots_mutex_;  // idle and pins, for stats() of any thread
  int64_t clock_ = 0;
  const int chunk_;
  std::atomic<int> n_backed_;  // slots with memory behind them, the first ones
};

// Addresses without memory.
Result<std::shared_ptr<std::byte>> reserve_addresses(size_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED)
    return Error{ErrorCode::unavailable, std::to_string(bytes) + " bytes of addresses: " + std::strerror(errno)};
  ::madvise(at, bytes, MADV_NOHUGEPAGE);  // or a page of 2 MiB would back many slots at once
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(at), [bytes](std::byte* p) { ::munmap(p, bytes); });
}

Status check_chunks(const KvOptions& o) {
  if (o.slot_chunk <= 0) return ok();
  const char* why = o.device && o.device != &cpu_device()
                        ? "the pool is allocated as a whole, by its device or its transport"
                    : !o.rank_memory.empty() || o.pool_in_groups ? "the pool's memory is made elsewhere"
                    : !o.prefix_cache || !o.keep_idle
                        ? "it needs --prefix-cache blocks and a pool of the instance's own"
                        : nullptr;
  if (why) return invalid(std::string("--slot-prealloc: ") + why + ": expected all");
  return ok();
}

}  // namespace

// Where several memories share the pool, what one keeps another one lacks.
KvScheme slots_scheme() {
  KvScheme scheme = scheme_of_slots("slots",
                                    "TurboMind's first generation: slots of the maximum length, LRU over sequences",
                                    [](std::shared_ptr<KvPool> pool, const KvOptions& o) -> std::unique_ptr<KvMemory> {
                                      if (!o.prefix_cache || !o.keep_idle)
                                        return std::make_unique<ContiguousMemory>(std::move(pool), o, "slots");
                                      return std::make_unique<SlotsMemory>(std::move(pool), o);
                                    });
  scheme.check = check_chunks;
  scheme.make_pool = [](const PoolPlan& plan) -> Result<std::shared_ptr<KvPool>> {
    if (plan.of_ranks[0].slot_chunk <= 0) return make_blocks(plan, false);
    PoolPlan lazy = plan;
    std::vector<std::shared_ptr<std::byte>> memory;
    for (const KvOptions& own : plan.of_ranks) {
      Result<std::shared_ptr<std::byte>> addresses = reserve_addresses(own.pool_bytes);
      if (!addresses) return addresses.error();
      memory.push_back(std::move(addresses).value());
    }
    for (KvOptions& own : lazy.of_ranks) own.rank_memory = memory;
    return make_blocks(lazy, false);
  };
  return scheme;
}

}  // namespace xpyd::allocator
