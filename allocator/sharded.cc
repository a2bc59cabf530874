#include "allocator/sharded.h"

#include <algorithm>
#include <utility>

#include "allocator/block_pool.h"
#include "allocator/kv_plan.h"
#include "allocator/pooled.h"

namespace xpyd {

Result<ShardedPlan> plan_sharded(const std::string& scheme_name, const KvOptions& options, const KvShards& shards) {
  Result<KvLayout> layout = plan_pool(scheme_name, options);
  if (!layout) return layout.error();
  if (shards.n_ranks() == 1) return ShardedPlan{layout.value(), {options}};
  XPYD_CHECK(check_shards(shards).ok() && shards.n_layers == options.shape.n_layers &&
             shards.n_kv_heads == options.shape.n_kv_heads);
  const KvScheme& scheme = *find_kv_scheme(scheme_name);
  ShardedPlan plan{layout.value(), {}};
  std::vector<size_t> of_ranks;  // bytes of a block
  size_t block_bytes = 0;
  for (int rank = 0; rank < shards.n_ranks(); ++rank) {
    KvOptions own = options;
    own.shape = rank_shape(options.shape, shards, rank);
    own.n_memories = options.n_memories * shards.n_ranks();
    own.lockstep = true;
    const int tokens = scheme.block_tokens(own);
    if (rank == 0) plan.whole.block_tokens = tokens;
    if (tokens != plan.whole.block_tokens)
      return invalid(scheme_name + ": a row of page groups holds " + std::to_string(plan.whole.block_tokens) +
                     " tokens on rank 0 and " + std::to_string(tokens) + " on rank " + std::to_string(rank) +
                     ", which has other layers or heads: expected --kv-layout layer_major, or a "
                     "number of stages that divides the layers");
    of_ranks.push_back(scheme.block_bytes ? scheme.block_bytes(own) : size_t(tokens) * own.shape.token_bytes());
    block_bytes += of_ranks.back();
    plan.of_ranks.push_back(std::move(own));
  }
  const size_t n_blocks = options.pool_bytes / block_bytes;
  if (n_blocks == 0)
    return invalid("kv-bytes is " + std::to_string(options.pool_bytes) + ", too small for " +
                   std::to_string(shards.n_ranks()) + " ranks: a block of " + std::to_string(plan.whole.block_tokens) +
                   " tokens needs " + std::to_string(block_bytes) + " bytes on all of them");
  for (int rank = 0; rank < shards.n_ranks(); ++rank) {
    plan.of_ranks[size_t(rank)].pool_bytes = n_blocks * of_ranks[size_t(rank)];
    layout = plan_pool(scheme_name, plan.of_ranks[size_t(rank)]);
    if (!layout) return layout.error();
    XPYD_CHECK(layout.value().n_blocks == int(n_blocks));
  }
  plan.whole.shape = options.shape;
  plan.whole.n_blocks = int(n_blocks);
  return plan;
}

Result<std::unique_ptr<KvMemory>> make_sharded(const std::string& scheme, const KvOptions& options,
                                               const KvShards& shards, std::shared_ptr<PrefixLog> log) {
  const auto make = find_kv_scheme(scheme)->make;
  if (shards.n_ranks() == 1 || !find_kv_scheme(scheme)->block_bytes) {
    auto pool = make_ranked_pool(scheme, options, shards);
    if (!pool) return pool.error();
    pool.value()->log_index(log);
    return make(std::move(pool).value(), options);
  }
  Result<ShardedPlan> plan = plan_sharded(scheme, options, shards);
  XPYD_CHECK(plan.ok(), plan ? "" : plan.error().message);
  std::vector<std::unique_ptr<KvMemory>> ranks;
  for (const KvOptions& own : plan.value().of_ranks) {
    auto pool = make_block_pool(scheme, own);
    if (!pool) return pool.error();
    ranks.push_back(make(std::move(pool).value(), own));
  }
  return std::unique_ptr<KvMemory>(std::make_unique<ShardedMemory>(std::move(ranks), shards, options.shape));
}

Result<std::shared_ptr<BlockPool>> make_ranked_pool(const std::string& scheme_name, const KvOptions& options,
                                                    const KvShards& shards) {
  const KvScheme& scheme = *find_kv_scheme(scheme_name);
  if (shards.n_ranks() == 1) return make_block_pool(scheme_name, options);
  Result<ShardedPlan> plan = plan_sharded(scheme_name, options, shards);
  XPYD_CHECK(plan.ok() && !scheme.block_bytes);
  std::vector<std::shared_ptr<std::byte>> memories;
  for (const KvOptions& own : plan.value().of_ranks) {
    Result<std::shared_ptr<std::byte>> memory = make_pool_memory(own);
    if (!memory) return memory.error();
    memories.push_back(std::move(memory).value());
  }
  auto pool = std::make_shared<BlockPool>(plan.value().whole, std::shared_ptr<std::byte>(),
                                          pool_has_prefix_cache(scheme, options));
  pool->put_on_ranks(shards, std::move(memories));
  if (options.device && options.device != &cpu_device())
    pool->poison_new_blocks(false);  // only the device can write there
  return pool;
}

ShardedMemory::ShardedMemory(std::vector<std::unique_ptr<KvMemory>> ranks, const KvShards& shards, const KvShape& whole)
    : ranks_(std::move(ranks)), shards_(shards), whole_(ranks_[0]->layout()) {
  XPYD_CHECK(int(ranks_.size()) == shards.n_ranks());
  for (int rank = 0; rank < n_ranks(); ++rank) {
    const KvLayout& own = ranks_[size_t(rank)]->layout();
    XPYD_CHECK(own.shape == rank_shape(whole, shards, rank) && own.order == whole_.order &&
               own.block_tokens == whole_.block_tokens && own.n_blocks == whole_.n_blocks);
  }
  whole_.shape = whole;
}

template <class F>
auto ShardedMemory::each(F&& f) {
  auto first = f(*ranks_[0]);
  for (size_t rank = 1; rank < ranks_.size(); ++rank)
    XPYD_CHECK(f(*ranks_[rank]) == first,
               std::string(name()) + ": rank " + std::to_string(rank) + " decides otherwise than rank 0");
  return first;
}

void ShardedMemory::check_alike(KvHandle handle) const {
  const std::span<const int32_t> blocks = ranks_[0]->blocks(handle);
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    const std::span<const int32_t> others = ranks_[rank]->blocks(handle);
    XPYD_CHECK(std::equal(blocks.begin(), blocks.end(), others.begin(), others.end()),
               "the blocks of sequence " + std::to_string(handle) + " differ on rank " + std::to_string(rank));
  }
}

Result<KvReservation> ShardedMemory::reserve(std::span<const int32_t> tokens, uint64_t salt) {
  Result<KvReservation> first = ranks_[0]->reserve(tokens, salt);
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    const Result<KvReservation> other = ranks_[rank]->reserve(tokens, salt);
    XPYD_CHECK(other.ok() == first.ok() && (!first || (other.value().handle == first.value().handle &&
                                                       other.value().cached_tokens == first.value().cached_tokens)),
               "rank " + std::to_string(rank) + " reserves otherwise than rank 0");
  }
  if (!first) return first;
  const KvHandle handle = first.value().handle;
  if (size_t(handle) >= live_.size()) live_.resize(size_t(handle) + 1);
  live_[size_t(handle)] = true;
  check_alike(handle);
  return first;
}

bool ShardedMemory::append(KvHandle handle, int n_tokens) {
  const size_t before = blocks(handle).size();
  const bool done = each([&](KvMemory& m) { return m.append(handle, n_tokens); });
  // Most steps of a decoding sequence need no block: nothing to compare.
  if (done && blocks(handle).size() != before) check_alike(handle);
  return done;
}

void ShardedMemory::written(KvHandle handle, std::span<const int32_t> tokens) {
  for (auto& m : ranks_) m->written(handle, tokens);
}

void ShardedMemory::trim(KvHandle handle) {
  for (auto& m : ranks_) m->trim(handle);
}

Result<KvHandle> ShardedMemory::fork(KvHandle handle) {
  Result<KvHandle> first = ranks_[0]->fork(handle);
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    const Result<KvHandle> other = ranks_[rank]->fork(handle);
    XPYD_CHECK(other.ok() == first.ok() && (!first || other.value() == first.value()),
               "rank " + std::to_string(rank) + " forks otherwise than rank 0");
  }
  if (!first) return first;
  if (size_t(first.value()) >= live_.size()) live_.resize(size_t(first.value()) + 1);
  live_[size_t(first.value())] = true;
  check_alike(first.value());
  return first;
}

void ShardedMemory::free(KvHandle handle) {
  for (auto& m : ranks_) m->free(handle);
  live_[size_t(handle)] = false;
}

KvLease ShardedMemory::pin(KvHandle handle, int token_begin, int token_end) {
  return each([&](KvMemory& m) { return m.pin(handle, token_begin, token_end); });
}

void ShardedMemory::unpin(KvLease lease) {
  for (auto& m : ranks_) m->unpin(lease);
}

KvStats ShardedMemory::stats() const {
  KvStats total = ranks_[0]->stats();
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    const KvStats s = ranks_[rank]->stats();
    for (auto field : {&KvStats::capacity_bytes, &KvStats::written_bytes, &KvStats::reserved_bytes,
                       &KvStats::internal_bytes, &KvStats::idle_bytes, &KvStats::external_bytes, &KvStats::mapped_bytes,
                       &KvStats::mappings, &KvStats::map_calls, &KvStats::unmap_calls, &KvStats::waited_jobs})
      total.*field += s.*field;
    total.map_wait_seconds += s.map_wait_seconds;
  }
  return total;
}

void ShardedMemory::clear_prefix_cache() {
  for (auto& m : ranks_) m->clear_prefix_cache();
}

void ShardedMemory::check_invariants(bool complete) const {
  for (const auto& m : ranks_) m->check_invariants(complete);
  for (size_t handle = 0; handle < live_.size(); ++handle) {
    if (!live_[handle]) continue;
    const KvHandle h = KvHandle(handle);
    check_alike(h);
    for (const auto& m : ranks_)
      XPYD_CHECK(m->written_tokens(h) == written_tokens(h) && m->tail_shared(h) == tail_shared(h));
  }
}

}  // namespace xpyd
