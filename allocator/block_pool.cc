#include "allocator/block_pool.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "base/spin.h"
#include "base/status.h"

namespace xpyd {

// Critical sections last a few microseconds at most, while parking a thread and waking it across
// cores costs tens of them: a waiter spins for about that long before it parks.
class BlockPool::Lock {
 public:
  explicit Lock(std::mutex& mutex) : mutex_(mutex) {
    for (int spin = 0; spin < 500; ++spin) {
      if (mutex_.try_lock()) return;
      cpu_relax();
    }
    mutex_.lock();
  }
  ~Lock() { mutex_.unlock(); }
  Lock(const Lock&) = delete;

 private:
  std::mutex& mutex_;
};

BlockPool::BlockPool(const KvLayout& layout, std::shared_ptr<std::byte> memory, bool prefix_cache, uint64_t hash_mask)
    : BlockPool(layout, std::move(memory), prefix_cache, hash_mask, nullptr, 0) {}

BlockPool::BlockPool(const KvLayout& layout, std::shared_ptr<std::byte> memory, bool prefix_cache,
                     std::unique_ptr<BlockLedger> ledger, int share)
    : BlockPool(layout, std::move(memory), prefix_cache, ~uint64_t{0}, std::move(ledger), share) {
  XPYD_CHECK(ledger_->n_blocks() == layout.n_blocks && ledger_->slot() >= 0 && share > 0);
}

BlockPool::BlockPool(const KvLayout& layout, std::shared_ptr<std::byte> memory, bool prefix_cache, uint64_t hash_mask,
                     std::unique_ptr<BlockLedger> ledger, int share)
    : layout_(layout),
      block_bytes_(layout.block_bytes()),
      token_bytes_(layout.shape.token_bytes()),
      memory_(std::move(memory)),
      blocks_(size_t(layout.n_blocks) * sizeof(Block)),
      handovers_(size_t(layout.n_blocks), 0),
      filled_(size_t(layout.n_blocks), 0),
      ledger_(std::move(ledger)),
      share_(share),
      poison_(std::string_view(XPYD_BUILD_MODE) != "release") {
  XPYD_CHECK(layout.n_blocks > 0 && layout.block_tokens > 0);
  if (prefix_cache)
    index_ = std::make_unique<PrefixIndex>(layout.n_blocks, layout.block_tokens, hash_mask, &at(0).node, sizeof(Block));
  for (int32_t b = layout.n_blocks - 1; b >= 0; --b) {  // taken in ascending order: runs coalesce
    at(b) = {{}, 0, 0, -1, -1};
    if (!ledger_) push_free(b);
  }
  count_[ledger_ ? kElsewhere : kFree] = layout.n_blocks;
}

BlockPool::BlockPool(const KvLayout& layout, std::shared_ptr<PageGroups> page_groups)
    : BlockPool(layout, std::shared_ptr<std::byte>(), false) {
  page_groups_ = std::move(page_groups);
  const size_t planes = layout.order == KvOrder::layer_major ? 2 * size_t(layout.shape.n_layers) : 1;
  block_bytes_ = planes * page_groups_->options().group_bytes;
  poison_ = false;
}

void BlockPool::put_on_ranks(const KvShards& shards, std::vector<std::shared_ptr<std::byte>> memories) {
  XPYD_CHECK(!memory_ && !page_groups_ && ranks_.empty() && int(memories.size()) == shards.n_ranks());
  shards_ = shards;
  block_bytes_ = token_bytes_ = 0;
  for (int rank = 0; rank < shards.n_ranks(); ++rank) {
    KvLayout own = layout_;
    own.shape = rank_shape(layout_.shape, shards, rank);
    block_bytes_ += own.block_bytes();
    token_bytes_ += own.shape.token_bytes();
    ranks_.push_back({own, std::move(memories[size_t(rank)])});
  }
}

void BlockPool::push_free(int32_t block) {
  Block& b = at(block);
  b.older = -1, b.newer = free_head_;
  if (free_head_ >= 0) at(free_head_).older = block;
  free_head_ = block;
}

void BlockPool::take_free(int32_t block) {
  Block& b = at(block);
  (b.older < 0 ? free_head_ : at(b.older).newer) = b.newer;
  if (b.newer >= 0) at(b.newer).older = b.older;
}

size_t BlockPool::metadata_bytes(const KvLayout& layout, bool prefix_cache) {
  size_t bytes = size_t(layout.n_blocks) * (sizeof(Block) + 2 * sizeof(int32_t));
  if (prefix_cache) bytes += PrefixIndex::metadata_bytes(layout.n_blocks, layout.block_tokens);
  return bytes;
}

BlockPool::State BlockPool::state(int32_t block) const {
  const Block& b = at(block);
  if (b.holds > 0) return kInTransfer;
  if (b.references > 0) return kActive;
  return b.node.uid != 0 ? kCached : ledger_ ? kElsewhere : kFree;
}

void BlockPool::lru_append(int32_t block) {
  Block& b = at(block);
  b.older = newest_, b.newer = -1;
  (newest_ < 0 ? oldest_ : at(newest_).newer) = block;
  newest_ = block;
}

void BlockPool::lru_remove(int32_t block) {
  Block& b = at(block);
  (b.older < 0 ? oldest_ : at(b.older).newer) = b.newer;
  (b.newer < 0 ? newest_ : at(b.newer).older) = b.older;
}

bool BlockPool::in_use(int32_t block) const {
  const Block& b = at(block);
  return b.holds > 0 || b.references > (idle_.empty() ? 0 : idle_[size_t(block)]);
}

int BlockPool::tokens_in(int32_t block) const {
  if (at(block).node.uid != 0) return layout_.block_tokens;
  return std::atomic_ref(const_cast<int32_t&>(filled_[size_t(block)])).load(std::memory_order_relaxed);
}

// A change of one block's references, holds or marks: keeps the sums. Between, only the block's one
// owner may be writing to it, and then it is in use before and after.
class BlockPool::Change {
 public:
  Change(BlockPool& pool, int32_t block) : pool_(pool), block_(block), used_(pool.in_use(block)), idle_(idle()) {}
  ~Change() {
    const bool used = pool_.in_use(block_);
    if (used != used_) pool_.written_ += (used ? 1 : -1) * pool_.tokens_in(block_);
    pool_.n_idle_ += int(idle()) - int(idle_);
  }
  Change(const Change&) = delete;

 private:
  bool idle() const { return pool_.at(block_).references > 0 && !pool_.in_use(block_); }
  BlockPool& pool_;
  const int32_t block_;
  const bool used_, idle_;
};

void BlockPool::add_reference(int32_t block) {
  Block& b = at(block);
  const Change change(*this, block);
  if (b.references++ > 0 || b.holds > 0) return;
  if (b.node.uid != 0) {
    --count_[kCached];
    lru_remove(block);
  } else {
    --count_[ledger_ ? kElsewhere : kFree];  // taken from the list, or from the ledger
  }
  ++count_[kActive];
}

void BlockPool::drop_reference(int32_t block) {
  Block& b = at(block);
  XPYD_CHECK(b.references > 0, "block " + std::to_string(block));
  const Change change(*this, block);
  if (--b.references > 0 || b.holds > 0) return;
  --count_[kActive];
  retire(block);
}

void BlockPool::add_hold(int32_t block) {
  Block& b = at(block);
  const Change change(*this, block);
  if (b.holds++ > 0) return;
  XPYD_CHECK(b.references > 0, "block " + std::to_string(block));
  --count_[kActive], ++count_[kInTransfer];
}

void BlockPool::drop_hold(int32_t block) {
  Block& b = at(block);
  XPYD_CHECK(b.holds > 0, "block " + std::to_string(block));
  const Change change(*this, block);
  if (--b.holds > 0) return;
  --count_[kInTransfer];
  if (b.references > 0)
    ++count_[kActive];
  else
    retire(block);
}

void BlockPool::retire(int32_t block) {
  if (at(block).node.uid != 0) {
    ++count_[kCached];
    lru_append(block);
    shed();
  } else {
    let_go(block);
  }
}

void BlockPool::let_go(int32_t block) {
  ++count_[ledger_ ? kElsewhere : kFree];
  if (ledger_)
    ledger_->release(block);
  else
    push_free(block);
}

// A cached block is found no more.
void BlockPool::forget(int32_t block) {
  lru_remove(block);
  const uint64_t key = index_->key_of(block);
  index_->erase(block);
  if (log_ && index_->slot_block(key) < 0) log_->removed(key);  // else another block has it
  --count_[kCached];
}

void BlockPool::evict(int32_t block) {
  forget(block);
  let_go(block);
}

void BlockPool::shed() {
  while (ledger_ && oldest_ >= 0 && layout_.n_blocks - count_[kElsewhere] > share_) evict(oldest_);
}

// n blocks of the ledger into claimed_: what nobody holds, then cached ones that only this process
// holds.
bool BlockPool::claim(int n, int64_t& evictions) {
  claimed_.clear();
  ledger_->claim(n, claimed_);
  // Of what is cached here, that which others hold, too, gives no room: it stays.
  for (int32_t block = oldest_; int(claimed_.size()) < n && block >= 0; block = at(block).newer)
    if (ledger_->holders(block) == uint32_t{1} << ledger_->slot()) claimed_.push_back(block);
  const bool enough = int(claimed_.size()) == n;
  size_t kept = 0;
  for (int32_t block : claimed_) {
    if (index_ && index_->contains(block)) {
      if (!enough) continue;
      forget(block);
      ++count_[kElsewhere];
      ++evictions;
      if (!ledger_->recycle(block)) continue;  // a late taker has come in between
    }
    claimed_[kept++] = block;
  }
  claimed_.resize(kept);
  if (int(kept) < n) {
    for (int32_t block : claimed_) ledger_->release(block);
    return false;
  }
  return true;
}

void BlockPool::poison(int32_t block) {  // all ones is a NaN in every float format
  for (int rank = 0; rank < n_ranks(); ++rank) {
    const KvLayout& l = rank_layout(rank);
    size_t bytes = size_t(l.block_tokens) * l.token_stride();
    int planes = l.order == KvOrder::layer_major ? 2 * l.shape.n_layers : 1;
    for (int p = 0; p < planes; ++p) std::memset(data(rank) + l.offset(block, p / 2, p % 2, 0, 0), 0xff, bytes);
  }
}

bool BlockPool::allocate(int n, std::vector<int32_t>& out, int64_t& evictions) {
  size_t first = out.size();
  {
    Lock lock(mutex_);
    if (ledger_ ? !claim(n, evictions) : n > count_[kFree] + count_[kCached]) return false;
    for (int i = 0; i < n; ++i) {
      if (!ledger_ && free_head_ < 0) {
        evict(oldest_);
        ++evictions;
      }
      const int32_t block = ledger_ ? claimed_[size_t(i)] : free_head_;
      if (!ledger_) take_free(block);
      filled_[size_t(block)] = 0;
      add_reference(block);
      out.push_back(block);
    }
    shed();
  }
  if (poison_)
    for (size_t i = first; i < out.size(); ++i) poison(out[i]);
  return true;
}

int32_t BlockPool::run_start() const {
  for (int32_t b = 0; b + kRun <= layout_.n_blocks; b += kRun) {
    int n = 0;
    while (n < kRun && state(b + n) == kFree) ++n;
    if (n == kRun) return b;
  }
  return free_head_;
}

bool BlockPool::allocate_run(int n, std::vector<int32_t>& out) {
  XPYD_CHECK(!ledger_);
  Lock lock(mutex_);
  if (n > count_[kFree]) return false;
  for (int i = 0; i < n; ++i) {
    int32_t block = out.empty() ? layout_.n_blocks : out.back() + 1;
    if (block >= layout_.n_blocks || state(block) != kFree) block = run_start();
    take_free(block);
    filled_[size_t(block)] = 0;
    add_reference(block);
    out.push_back(block);
  }
  return true;
}

void BlockPool::add_references(std::span<const int32_t> blocks) {
  Lock lock(mutex_);
  for (int32_t block : blocks) {
    XPYD_CHECK(state(block) != kFree && state(block) != kElsewhere, "block " + std::to_string(block));
    add_reference(block);
  }
}

void BlockPool::release(std::span<const int32_t> blocks) {
  if (blocks.empty()) return;
  Lock lock(mutex_);
  for (size_t i = blocks.size(); i-- > 0;) drop_reference(blocks[i]);
}

int BlockPool::users(int32_t block) const {
  Lock lock(mutex_);
  return at(block).references + handovers_[size_t(block)];
}

int BlockPool::n_unshared(std::span<const int32_t> blocks) const {
  Lock lock(mutex_);
  int n = 0;
  for (; n < int(blocks.size()); ++n) {
    const int32_t block = blocks[size_t(n)];
    if (at(block).references + handovers_[size_t(block)] > 1) break;
  }
  return n;
}

void BlockPool::set_idle(std::span<const int32_t> blocks, bool idle) {
  if (blocks.empty()) return;
  Lock lock(mutex_);
  if (idle_.empty()) idle_.assign(size_t(layout_.n_blocks), 0);
  for (int32_t block : blocks) {
    const Change change(*this, block);
    int32_t& n = idle_[size_t(block)];
    n += idle ? 1 : -1;
    XPYD_CHECK(n >= 0 && n <= at(block).references, "block " + std::to_string(block));
  }
}

void BlockPool::release_idle(std::span<const int32_t> blocks) {
  if (blocks.empty()) return;
  Lock lock(mutex_);
  for (size_t i = blocks.size(); i-- > 0;) {
    const int32_t block = blocks[i];
    const Change change(*this, block);
    Block& b = at(block);
    XPYD_CHECK(--idle_[size_t(block)] >= 0 && --b.references >= 0, "block " + std::to_string(block));
    if (b.references > 0 || b.holds > 0) continue;
    --count_[kActive];
    retire(block);
  }
}

void BlockPool::add_written(std::span<const int32_t> blocks, int from, int n) {
  const int bt = layout_.block_tokens, end = from + n;
  for (int token = from; token < end;) {
    const int block = token / bt, stop = std::min(end, (block + 1) * bt);
    std::atomic_ref(filled_[size_t(blocks[size_t(block)])]).store(stop - block * bt, std::memory_order_relaxed);
    token = stop;
  }
  written_outside_.fetch_add(n, std::memory_order_relaxed);
}

void BlockPool::set_written(std::span<const int32_t> blocks, int n) {
  const int bt = layout_.block_tokens;
  Lock lock(mutex_);
  for (int i = 0; i < int(blocks.size()); ++i) {
    const int32_t block = blocks[size_t(i)];
    const int tokens = std::clamp(n - i * bt, 0, bt);
    if (in_use(block)) written_ += tokens - tokens_in(block);
    filled_[size_t(block)] = tokens;
  }
}

int BlockPool::filled(int32_t block) const {
  Lock lock(mutex_);
  return tokens_in(block);
}

bool BlockPool::indexed(int32_t block) const {
  Lock lock(mutex_);
  return at(block).node.uid != 0;
}

void BlockPool::hold(std::span<const int32_t> blocks) {
  Lock lock(mutex_);
  for (int32_t block : blocks) add_hold(block);
}

void BlockPool::unhold(std::span<const int32_t> blocks) {
  Lock lock(mutex_);
  for (size_t i = blocks.size(); i-- > 0;) drop_hold(blocks[i]);
}

void BlockPool::begin_handover(std::span<const int32_t> blocks) {
  Lock lock(mutex_);
  for (int32_t block : blocks) {
    add_hold(block);
    drop_reference(block);
    ++handovers_[size_t(block)];
  }
}

void BlockPool::end_handover(std::span<const int32_t> blocks, bool adopted) {
  Lock lock(mutex_);
  for (size_t i = blocks.size(); i-- > 0;) {
    int32_t& count = handovers_[size_t(blocks[i])];
    XPYD_CHECK(count-- > 0, "block " + std::to_string(blocks[i]) + " was not handed over");
    if (adopted) add_reference(blocks[i]);
    drop_hold(blocks[i]);
  }
}

bool BlockPool::adopt(const KvHandover& handover) {
  const int bt = layout_.block_tokens, n = int(handover.blocks.size());
  if (handover.giver < 0 || handover.giver >= BlockLedger::kMembers || handover.tokens < 0 ||
      int(handover.generations.size()) != n || n != (int64_t(handover.tokens) + bt - 1) / bt)
    return false;
  Lock lock(mutex_);
  for (int i = 0; i < n; ++i) {
    const int32_t block = handover.blocks[size_t(i)];
    if (block < 0 || block >= layout_.n_blocks ||
        !ledger_->share(block, handover.generations[size_t(i)], handover.giver)) {
      while (i-- > 0) drop_reference(handover.blocks[size_t(i)]);
      return false;
    }
    if (at(block).node.uid == 0) {  // new here, or it was here and has been written to elsewhere
      const int tokens = std::min(bt, handover.tokens - i * bt);
      if (in_use(block)) written_ += tokens - tokens_in(block);
      filled_[size_t(block)] = tokens;
    }
    add_reference(block);
  }
  shed();
  return true;
}

template <class F>
int BlockPool::walk(std::span<const int32_t> tokens, int max_blocks, PrefixChain& chain, F&& found_some) const {
  // Software pipeline: while the blocks of one batch are fetched, the next batch is hashed.
  constexpr int kBatch = PrefixIndex::kBatch;
  if (!index_ || max_blocks <= 0) return 0;
  size_t stride = size_t(layout_.block_tokens);
  uint64_t hashes[2][kBatch];
  int32_t blocks[kBatch];
  int n = std::min(kBatch, max_blocks), done = 0;
  index_->hash_batch(chain.hash, true, tokens.data(), n, hashes[0]);
  for (int turn = 0; n > 0; turn ^= 1) {
    int candidates;
    {
      Lock lock(mutex_);
      candidates = index_->candidates(hashes[turn], n, blocks);
    }
    int n_next = candidates < n ? 0 : std::min(kBatch, max_blocks - done - n);
    if (n_next > 0)
      index_->hash_batch(hashes[turn][n - 1], false, tokens.data() + size_t(done + n) * stride, n_next,
                         hashes[turn ^ 1]);
    Lock lock(mutex_);
    int found = index_->match(chain, tokens.data() + size_t(done) * stride, candidates, hashes[turn], blocks);
    found_some(std::span<const int32_t>(blocks, size_t(found)));
    done += found;
    if (found < n) break;
    n = n_next;
  }
  return done;
}

int BlockPool::match(std::span<const int32_t> tokens, uint64_t salt, int max_blocks) const {
  PrefixChain chain{.hash = salt};
  return walk(tokens, max_blocks, chain, [](std::span<const int32_t>) {});
}

int BlockPool::acquire(std::span<const int32_t> tokens, uint64_t salt, int max_blocks, std::vector<int32_t>& out,
                       PrefixChain& chain) {
  chain = PrefixChain{.hash = salt};
  return walk(tokens, max_blocks, chain, [&](std::span<const int32_t> blocks) {
    for (int32_t block : blocks) add_reference(block);  // so the next batch's chain stays intact
    out.insert(out.end(), blocks.begin(), blocks.end());
  });
}

void BlockPool::index(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain) {
  if (!index_) return;
  uint64_t hashes[PrefixIndex::kBatch];
  for (size_t done = 0; done < blocks.size() && !chain.broken;) {
    const int32_t* next = tokens.data() + done * size_t(layout_.block_tokens);
    int n = int(std::min<size_t>(PrefixIndex::kBatch, blocks.size() - done));
    index_->hash_batch(chain.hash, chain.first(), next, n, hashes);
    Lock lock(mutex_);
    for (int i = 0; i < n; ++i, next += layout_.block_tokens) {
      if (!index_->intact(chain)) {
        chain.broken = true;
        return;
      }
      int32_t block = blocks[done + size_t(i)];
      int32_t indexed = index_->find(chain, hashes[i], next);
      if (indexed < 0) {
        XPYD_CHECK(at(block).references > 0);  // so it is not in the free list
        // Only an adopted block is indexed already, and under a lost parent if find() missed it.
        if (index_->contains(block)) {
          index_->reattach(chain, hashes[i], next, block);
        } else {
          if (log_ && index_->slot_block(hashes[i]) < 0) log_->stored(hashes[i]);
          index_->insert(chain, hashes[i], next, block);
        }
        indexed = block;
      }
      index_->advance(chain, hashes[i], indexed);
    }
    done += size_t(n);
  }
}

void BlockPool::clear_prefix_cache() {
  Lock lock(mutex_);
  while (oldest_ >= 0) evict(oldest_);
}

KvStats BlockPool::stats() const {
  KvStats stats;
  stats.capacity = layout_.n_blocks;
  stats.block_tokens = layout_.block_tokens;
  Lock lock(mutex_);
  stats.free = count_[kFree];
  if (ledger_) {
    if (const uint64_t now = ledger_->changes(); now != counted_at_) {
      counted_at_ = now;
      ledger_free_ = ledger_->count_free();
    }
    // Others may have claimed and died between: never more than are not ours.
    stats.free = std::min(ledger_free_, count_[kElsewhere]);
    stats.elsewhere = count_[kElsewhere] - stats.free;
    stats.capacity -= stats.elsewhere;
  }
  stats.active = count_[kActive];
  stats.cached = count_[kCached];
  stats.in_transfer = count_[kInTransfer];
  stats.active -= n_idle_;
  stats.cached += n_idle_;
  stats.written_bytes = (written_ + written_outside_.load(std::memory_order_relaxed)) * int64_t(token_bytes_);
  return stats;
}

void BlockPool::check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                                 std::span<const int32_t> idle, bool complete) const {
  Lock lock(mutex_);
  int n = layout_.n_blocks;
  XPYD_CHECK(int(references.size()) == n && int(leases.size()) == n && int(idle.size()) == n);
  std::vector<char> in_free(size_t(n), 0), in_lru(size_t(n), 0);
  for (int32_t b = free_head_; b >= 0; b = at(b).newer) XPYD_CHECK(b < n && !in_free[size_t(b)]++, "free list");
  for (int32_t b = oldest_, before = -1; b >= 0 || before != newest_; before = b, b = at(b).newer)
    XPYD_CHECK(b >= 0 && b < n && !in_lru[size_t(b)]++ && at(b).older == before, "LRU list");

  int count[kStates] = {}, n_idle = 0;
  int64_t written = 0;
  for (int32_t b = 0; b < n; ++b) {
    auto which = [b] { return "block " + std::to_string(b); };  // only when a check fails
    const Block& block = at(b);
    int expected_holds = leases[size_t(b)] + handovers_[size_t(b)];
    if (complete) {
      XPYD_CHECK(block.references == references[size_t(b)], which());
      XPYD_CHECK(block.holds == expected_holds, which());
    } else {
      XPYD_CHECK(block.references >= references[size_t(b)], which());
      XPYD_CHECK(block.holds >= expected_holds, which());
    }
    const int marked = idle_.empty() ? 0 : idle_[size_t(b)];
    XPYD_CHECK(complete ? marked == idle[size_t(b)] : marked >= idle[size_t(b)], which());
    XPYD_CHECK(marked <= block.references, which());
    n_idle += block.references > 0 && !in_use(b);
    const int tokens = tokens_in(b);
    if (in_use(b)) written += tokens;
    XPYD_CHECK(tokens >= 0 && tokens <= layout_.block_tokens, which());
    State s = state(b);
    ++count[s];
    XPYD_CHECK(bool(in_free[size_t(b)]) == (s == kFree), which());
    if (ledger_) XPYD_CHECK(ledger_->holds(b) == (s != kElsewhere), which());
    XPYD_CHECK(bool(in_lru[size_t(b)]) == (s == kCached), which());
  }
  for (int s = 0; s < kStates; ++s) XPYD_CHECK(count[s] == count_[s], "state " + std::to_string(s));
  XPYD_CHECK(n_idle == n_idle_);
  if (complete) XPYD_CHECK(written == written_ + written_outside_.load());
  if (index_) index_->check_invariants();
}

}  // namespace xpyd
