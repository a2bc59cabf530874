#include "allocator/schemes.h"

#include <algorithm>
#include <climits>
#include <utility>

#include "allocator/pool/block_pool.h"
#include "allocator/pool/pooled.h"
#include "base/device/device.h"
#include "base/device/page_groups.h"
#include "base/table.h"

namespace xpyd::allocator {

// Each is defined in the scheme's own file.
KvScheme contiguous_scheme();
KvScheme paged_scheme();
KvScheme slots_scheme();
KvScheme vattention_scheme();

std::span<const KvScheme> kv_schemes() {
  static const KvScheme schemes[] = {contiguous_scheme(), paged_scheme(), slots_scheme(), vattention_scheme()};
  return schemes;
}

const KvScheme* find_kv_scheme(const std::string& name) {
  const std::span<const KvScheme> schemes = kv_schemes();
  return find_row(schemes, name);
}

Result<KvLayout> plan_pool(const std::string& scheme_name, const KvOptions& options) {
  const KvScheme* scheme = find_kv_scheme(scheme_name);
  if (!scheme) return invalid("allocator \"" + scheme_name + "\": expected one of " + names_of(kv_schemes()));
  const KvShape& shape = options.shape;
  if (shape.dtype == Dtype::int4 && shape.head_dim % 2 != 0)
    return invalid("kv-dtype int4: head_dim is " + std::to_string(shape.head_dim) + "; expected an even number");
  if (Status status = scheme->check(options); !status) return status.error();
  const int block_tokens = scheme->block_tokens(options);
  const char* unit = scheme->unit;
  if (block_tokens < 1)
    return invalid("tokens per " + std::string(unit) + " is " + std::to_string(block_tokens) + ": expected at least 1");
  // A product of four ints exceeds 64 bits for absurd input.
  size_t needed = 2 * shape.row_bytes();
  for (int factor : {shape.n_layers, shape.n_kv_heads, block_tokens})
    if (__builtin_mul_overflow(needed, size_t(factor), &needed))
      return invalid("one KV " + std::string(unit) + " of " + std::to_string(block_tokens) +
                     " tokens exceeds 64-bit addresses");
  needed = scheme->block_bytes(options);
  if (options.pool_bytes < needed)
    return invalid("--kv-bytes is " + std::to_string(options.pool_bytes) + ", too small for one " + unit + ": " +
                   std::to_string(block_tokens) + " tokens need " + std::to_string(needed) + " bytes");
  size_t n_blocks = options.pool_bytes / needed;
  if (n_blocks > size_t(INT_MAX) / size_t(block_tokens))
    return invalid("--kv-bytes is " + std::to_string(options.pool_bytes) + ": expected fewer than 2^31 tokens of " +
                   std::to_string(shape.token_bytes()) + " bytes");
  const KvLayout layout{shape, options.order, block_tokens, int(n_blocks)};
  if (layout.pool_bytes() / shape.row_bytes() >= size_t(1) << 32)
    return invalid("--kv-bytes is " + std::to_string(options.pool_bytes) + ": expected fewer than 2^32 rows of " +
                   std::to_string(shape.row_bytes()) + " bytes");
  return layout;
}

Result<PoolPlan> plan_ranks(const std::string& scheme_name, const KvOptions& options, const KvShards& shards) {
  Result<KvLayout> layout = plan_pool(scheme_name, options);
  if (!layout) return layout.error();
  if (shards.n_ranks() == 1) return PoolPlan{layout.value(), {options}, shards};
  XPYD_CHECK(check_shards(shards).ok() && shards.n_layers == options.shape.n_layers &&
             shards.n_kv_heads == options.shape.n_kv_heads);
  const KvScheme& scheme = *find_kv_scheme(scheme_name);
  PoolPlan plan{layout.value(), {}, shards};
  std::vector<size_t> of_ranks;  // bytes of a block on each rank
  size_t block_bytes = 0;
  for (int rank = 0; rank < shards.n_ranks(); ++rank) {
    KvOptions own = options;
    own.shape = rank_shape(options.shape, shards, rank);
    own.n_memories = options.n_memories * shards.n_ranks();
    const int tokens = scheme.block_tokens(own);
    if (rank == 0) plan.whole.block_tokens = tokens;
    if (tokens != plan.whole.block_tokens)
      return invalid(scheme_name + ": a page-group row holds " + std::to_string(plan.whole.block_tokens) +
                     " tokens on rank 0, but " + std::to_string(tokens) + " on rank " + std::to_string(rank) +
                     ", which has other layers or heads: expected --kv-layout layer_major, or a number of stages that "
                     "divides the layers");
    of_ranks.push_back(scheme.block_bytes(own));
    block_bytes += of_ranks.back();
    plan.of_ranks.push_back(std::move(own));
  }
  const size_t n_blocks = options.pool_bytes / block_bytes;
  if (n_blocks == 0)
    return invalid("--kv-bytes is " + std::to_string(options.pool_bytes) + ", too small for " +
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

namespace {

// Allocates page groups, maps them in order, and never changes the mapping.
Result<std::shared_ptr<std::byte>> allocate_groups(Device& device, size_t bytes, size_t group) {
  const int n = int((bytes + group - 1) / group);
  auto groups = device.make_page_groups({.group_bytes = group, .n_groups = n});
  if (!groups) return groups.error();
  Result<std::unique_ptr<VirtualRange>> range = groups.value()->reserve(size_t(n) * group);
  if (!range) return range.error();
  std::shared_ptr<VirtualRange> owner = std::move(range).value();
  if (Status status = owner->map(0, 0, n); !status) return status.error();
  return std::shared_ptr<std::byte>(owner, owner->data());
}

Device& device_of(const KvOptions& options) { return options.device ? *options.device : cpu_device(); }

// Allocates the pool's memory of one rank.
Result<std::shared_ptr<std::byte>> make_pool_memory(const KvOptions& options) {
  Device& device = device_of(options);
  return options.pool_in_groups ? allocate_groups(device, options.pool_bytes, options.vattention.page_group_bytes)
                                : device.allocate(options.pool_bytes);
}

}  // namespace

size_t bytes_of_tokens(const KvOptions& options, int tokens) { return size_t(tokens) * options.shape.token_bytes(); }

Status nothing_more(const KvOptions&) { return ok(); }

Result<std::shared_ptr<KvPool>> make_blocks(const PoolPlan& plan, bool prefix_index) {
  std::vector<std::shared_ptr<std::byte>> memories;
  for (const KvOptions& own : plan.of_ranks) {
    if (!own.rank_memory.empty()) {
      memories.push_back(own.rank_memory[memories.size()]);
      continue;
    }
    Result<std::shared_ptr<std::byte>> memory = make_pool_memory(own);
    if (!memory) return memory.error();
    memories.push_back(std::move(memory).value());
  }
  auto pool = std::make_shared<BlockPool>(KvPlaces(plan.whole, plan.shards, std::move(memories)), prefix_index,
                                          ~uint64_t{0}, plan.of_ranks[0].proof_tokens, plan.of_ranks[0].radix);
  if (&device_of(plan.of_ranks[0]) != &cpu_device() || !plan.of_ranks[0].rank_memory.empty())
    pool->poison_new_blocks(false);  // only the device can write there
  return std::shared_ptr<KvPool>(std::move(pool));
}

Result<std::shared_ptr<KvPool>> make_ranked_pool(const std::string& scheme, const KvOptions& options,
                                                 const KvShards& shards) {
  Result<PoolPlan> plan = plan_ranks(scheme, options, shards);
  XPYD_CHECK(plan.ok(), plan ? "" : plan.error().message);
  return find_kv_scheme(scheme)->make_pool(plan.value());
}

Result<std::shared_ptr<KvPool>> make_block_pool(const std::string& scheme, const KvOptions& options) {
  return make_ranked_pool(scheme, options, {});
}

Result<std::unique_ptr<KvMemory>> make_ranked_memory(const std::string& scheme, const KvOptions& options,
                                                     const KvShards& shards) {
  Result<std::shared_ptr<KvPool>> pool = make_ranked_pool(scheme, options, shards);
  if (!pool) return pool.error();
  for (const auto& listener : options.listeners) pool.value()->tell(listener);
  return find_kv_scheme(scheme)->make(std::move(pool).value(), options);
}

}  // namespace xpyd::allocator
