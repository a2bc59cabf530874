#include "allocator/kv_pool.h"

#include <algorithm>
#include <string>
#include <utility>

namespace xpyd::allocator {

KvPool::KvPool(KvPlaces places, size_t block_bytes)
    : places_(std::move(places)),
      n_blocks_(places_.whole.n_blocks),
      block_tokens_(places_.whole.block_tokens),
      block_bytes_(block_bytes),
      filled_(size_t(n_blocks_), 0) {
  XPYD_CHECK(n_blocks_ > 0 && block_tokens_ > 0);
  count_[kUnused] = n_blocks_;
}

template <class F>
void KvPool::change(int32_t block, F&& f) {
  Users& users = of(block);
  const State before = state(users);
  XPYD_CHECK(f(users) && users.references >= 0 && users.leases >= 0 && users.handovers >= 0,
             "block " + std::to_string(block));
  const State now = state(users);
  if (before == now) return;
  --count_[before], ++count_[now];
  if (before == kUnused) written_ += filled(block), begin_use(block);
  if (now == kUnused) written_ -= filled(block), end_use(block);
}

void KvPool::add_reference(int32_t block) {
  change(block, [](Users& users) { return ++users.references > 0; });
}

void KvPool::drop_reference(int32_t block) {
  change(block, [](Users& users) { return --users.references >= 0; });
}

void KvPool::add_references(std::span<const int32_t> blocks) {
  Lock lock(mutex_);
  for (int32_t block : blocks) {
    XPYD_CHECK(of(block).any() || cached(block), "block " + std::to_string(block));
    add_reference(block);
  }
}

void KvPool::release(std::span<const int32_t> blocks) {
  Lock lock(mutex_);
  for (size_t i = blocks.size(); i-- > 0;) drop_reference(blocks[i]);
}

int KvPool::users(int32_t block) const {
  Lock lock(mutex_);
  return of(block).references + of(block).handovers;
}

bool KvPool::alone(int32_t block) const {
  Lock lock(mutex_);
  return of(block).references + of(block).handovers == 1 && of(block).leases == 0;
}

void KvPool::hold(std::span<const int32_t> blocks) {
  Lock lock(mutex_);
  for (int32_t block : blocks) change(block, [](Users& users) { return users.any() && users.leases++ < INT16_MAX; });
}

void KvPool::unhold(std::span<const int32_t> blocks) {
  Lock lock(mutex_);
  for (size_t i = blocks.size(); i-- > 0;) change(blocks[i], [](Users& users) { return --users.leases >= 0; });
}

void KvPool::begin_handover(const KvHandover& handover) {
  Lock lock(mutex_);
  for (int32_t block : handover.blocks)
    change(block, [](Users& users) { return --users.references >= 0 && users.handovers++ < INT16_MAX; });
}

void KvPool::adopt(const KvHandover& handover) {
  Lock lock(mutex_);
  for (int32_t block : handover.blocks)
    change(block, [](Users& users) { return ++users.references > 0 && --users.handovers >= 0; });
}

void KvPool::discard(const KvHandover& handover) {
  Lock lock(mutex_);
  for (size_t i = handover.blocks.size(); i-- > 0;)
    change(handover.blocks[i], [](Users& users) { return --users.handovers >= 0; });
}

void KvPool::add_written(std::span<const int32_t> blocks, int from, int n) {
  const int end = from + n;
  for (int token = from; token < end;) {
    const int block = token / block_tokens_, stop = std::min(end, (block + 1) * block_tokens_);
    std::atomic_ref(filled_[size_t(blocks[size_t(block)])])
        .store(stop - block * block_tokens_, std::memory_order_relaxed);
    token = stop;
  }
  written_outside_.fetch_add(n, std::memory_order_relaxed);
}

void KvPool::set_written(std::span<const int32_t> blocks, int n) {
  Lock lock(mutex_);
  for (int i = 0; i < int(blocks.size()); ++i) {
    const int32_t block = blocks[size_t(i)];
    const int tokens = std::clamp(n - i * block_tokens_, 0, block_tokens_);
    if (of(block).any()) written_ += tokens - filled(block);
    filled_[size_t(block)] = tokens;
  }
}

KvStats KvPool::count() const {
  KvStats stats;
  stats.capacity = n_blocks_;
  stats.free = n_free();
  stats.active = count_[kActive];
  stats.cached = n_cached_;
  stats.in_transfer = count_[kInTransfer];
  stats.block_tokens = block_tokens_;
  stats.written_bytes = (written_ + written_outside_.load(std::memory_order_relaxed)) * int64_t(places_.token_bytes());
  return stats;
}

std::vector<KvState> KvPool::states() const {
  constexpr int32_t kLockedFor = 4096;  // some microseconds
  std::vector<KvState> states(static_cast<size_t>(n_blocks_));
  for (int32_t first = 0; first < n_blocks_; first += kLockedFor) {
    Lock lock(mutex_);
    for (int32_t b = first; b < std::min(n_blocks_, first + kLockedFor); ++b) {
      const State use = state(of(b));
      states[size_t(b)] = use == kInTransfer ? KvState::in_transfer
                          : use == kActive   ? KvState::active
                          : cached(b)        ? KvState::cached
                                             : KvState::free;
    }
  }
  return states;
}

void KvPool::check_uses(std::span<const int32_t> references, std::span<const int32_t> leases, bool complete) const {
  XPYD_CHECK(int(references.size()) == n_blocks_ && int(leases.size()) == n_blocks_);
  int64_t written = 0;
  int counted[kStates] = {}, n_cached = 0;
  for (int32_t block = 0; block < n_blocks_; ++block) {
    const auto which = [block] { return "block " + std::to_string(block); };  // only when a check fails
    const Users& users = of(block);
    const int referenced = references[size_t(block)], leased = leases[size_t(block)], tokens = filled(block);
    XPYD_CHECK(complete ? users.references == referenced : users.references >= referenced, which());
    XPYD_CHECK(complete ? users.leases == leased : users.leases >= leased, which());
    XPYD_CHECK(users.handovers >= 0 && tokens >= 0 && tokens <= block_tokens_, which());
    ++counted[state(users)];
    if (users.any())
      written += tokens;
    else
      n_cached += cached(block);
  }
  for (int s = 0; s < kStates; ++s) XPYD_CHECK(counted[s] == count_[s], "state " + std::to_string(s));
  XPYD_CHECK(n_cached == n_cached_);
  if (complete) XPYD_CHECK(written == written_ + written_outside_.load());
}

}  // namespace xpyd::allocator
