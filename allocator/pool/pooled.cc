#include "allocator/pool/pooled.h"

#include <algorithm>
#include <string>
#include <utility>

#include "allocator/kv/kv_copy.h"

namespace xpyd::allocator {

PooledMemory::PooledMemory(std::shared_ptr<KvPool> pool, const KvOptions& options, const char* name,
                           std::optional<KvPlaces> places, KvHandoff* handoff)
    : KvMemory(name, places ? std::move(*places) : pool->places(), {*this, *this, handoff}),
      pool_(std::move(pool)),
      options_(options),
      queue_(options.queue ? *options.queue : cpu_queue()) {
  XPYD_CHECK(pool_->layout().shape == options_.shape && pool_->layout().order == options_.order);
}

PooledMemory::~PooledMemory() {
  leases_.for_each([&](const std::vector<int32_t>& blocks) { pool_->unhold(blocks); });
}

void PooledMemory::copy_tokens(int32_t to_block, int32_t from_block, int n_tokens) {
  copies_.clear();
  for (int rank = 0; rank < n_ranks(); ++rank) {
    const KvLayout& own = places().layout(rank);
    add_copies({base(rank), &own, nullptr, from_block}, {base(rank), &own, nullptr, to_block},
               {0, n_tokens, 0, own.shape.n_layers}, copies_);
  }
  queue_.copy(copies_, true);
  queue_.wait();
}

void PooledMemory::free(KvHandle handle) {
  pool_->release(blocks(handle));
  forget(handle);
}

KvLease PooledMemory::pin(KvHandle handle, int token_begin, int token_end) {
  XPYD_CHECK(0 <= token_begin && token_begin < token_end);
  std::span<const int32_t> table = blocks(handle);
  const size_t block_tokens = size_t(pool_->layout().block_tokens);
  const size_t begin = std::min(size_t(token_begin) / block_tokens, table.size()),
               end = std::min((size_t(token_end) - 1) / block_tokens + 1, table.size());
  table = table.subspan(begin, end - begin);
  KvLease lease = leases_.add();
  leases_[lease].assign(table.begin(), table.end());
  pool_->hold(table);
  return lease;
}

void PooledMemory::unpin(KvLease lease) {
  pool_->unhold(leases_[lease]);
  leases_.remove(lease);
}

void PooledMemory::add_written(SequenceTokens& s, std::span<const int32_t> table, size_t n) {
  XPYD_CHECK(s.written + int64_t(n) <= s.room, "written without room");
  pool_->add_written(table, s.written, int(n));
  s.written += int(n);
}

void PooledMemory::check_length(int tokens) const {
  XPYD_CHECK(
      options_.max_sequence_tokens <= 0 || tokens <= options_.max_sequence_tokens,
      std::to_string(tokens) + " tokens in a sequence of at most " + std::to_string(options_.max_sequence_tokens));
}

KvStats PooledMemory::stats() const {
  KvStats stats = pool_stats();
  const int64_t block = int64_t(pool_->block_bytes());
  // With several ranks the pool is exactly its blocks. Bytes of options.pool_bytes that make no further block do not
  // count.
  stats.capacity_bytes = stats.mapped_bytes = n_ranks() > 1 ? stats.capacity * block : int64_t(options_.pool_bytes);
  stats.idle_bytes = (stats.free + stats.cached) * block;
  stats.external_bytes = stats.capacity_bytes - stats.capacity * block;
  (reserves() ? stats.reserved_bytes : stats.internal_bytes) = (stats.active + stats.in_transfer) * block -
                                                               stats.written_bytes;
  stats.prefix_query_tokens = query_tokens_.load(std::memory_order_relaxed);
  stats.prefix_hit_tokens = hit_tokens_.load(std::memory_order_relaxed);
  stats.evictions = evictions_.load(std::memory_order_relaxed);
  stats.cow_copies = cow_copies_.load(std::memory_order_relaxed);
  return stats;
}

void PooledMemory::count_references(std::vector<int32_t>& references) const {
  check_each([&](std::span<const int32_t> table, const SequenceTokens&) {
    for (int32_t block : table) ++references[size_t(block)];
  });
}

void PooledMemory::check_invariants(bool complete) const {
  size_t n = size_t(pool_->layout().n_blocks);
  const int block_tokens = pool_->layout().block_tokens;
  std::vector<int32_t> references(n, 0), leases(n, 0), last_user(n, -1);
  int32_t user = 0;
  check_each([&](std::span<const int32_t> table, const SequenceTokens& s) {
    for (int i = 0; i < int(table.size()); ++i) {
      const int32_t block = table[size_t(i)];
      const auto which = [block] { return "block " + std::to_string(block); };
      XPYD_CHECK(block >= 0 && size_t(block) < n);
      XPYD_CHECK(std::exchange(last_user[size_t(block)], user) != user, which() + " twice in one table");
      XPYD_CHECK(pool_->filled(block) == std::clamp(s.written - i * block_tokens, 0, block_tokens),
                 which() + " holds " + std::to_string(pool_->filled(block)) + " of " + std::to_string(s.written) +
                     " tokens, at " + std::to_string(i));
    }
    ++user;
    XPYD_CHECK(0 <= s.written && s.written <= s.room);
    XPYD_CHECK(int64_t(s.room) <= int64_t(table.size()) * block_tokens);
  });
  leases_.for_each([&](const std::vector<int32_t>& blocks) {
    for (int32_t block : blocks) ++leases[size_t(block)];
  });
  count_references(references);
  pool_->check_invariants(references, leases, complete);
  const KvStats s = stats();
  XPYD_CHECK(s.capacity_bytes ==
             s.written_bytes + s.reserved_bytes + s.internal_bytes + s.idle_bytes + s.external_bytes);
  for (int64_t bytes :
       {s.written_bytes, s.reserved_bytes, s.internal_bytes, s.idle_bytes, s.external_bytes, s.mapped_bytes})
    XPYD_CHECK(bytes >= 0 && bytes <= s.capacity_bytes);
}

}  // namespace xpyd::allocator
