#include "allocator/kv_memory.h"

#include <utility>
#include <vector>

#include "allocator/block_pool.h"
#include "allocator/kv_plan.h"
#include "allocator/pooled.h"
#include "base/device.h"
#include "base/page_groups.h"
#include "base/table.h"

namespace xpyd::allocator {

// Each in the file of the scheme.
KvScheme contiguous_scheme();
KvScheme paged_scheme();
KvScheme token_scheme();
KvScheme slots_scheme();
KvScheme vattention_scheme();

std::span<const KvScheme> kv_schemes() {
  static const KvScheme schemes[] = {contiguous_scheme(), paged_scheme(), token_scheme(), slots_scheme(),
                                     vattention_scheme()};
  return schemes;
}

const KvScheme* find_kv_scheme(const std::string& name) {
  const std::span<const KvScheme> schemes = kv_schemes();
  return find_row(schemes, name);
}

namespace {

// Page groups in order, behind addresses that stay.
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

// Of one rank.
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
    Result<std::shared_ptr<std::byte>> memory = make_pool_memory(own);
    if (!memory) return memory.error();
    memories.push_back(std::move(memory).value());
  }
  auto pool = std::make_shared<BlockPool>(KvPlaces(plan.whole, plan.shards, std::move(memories)), prefix_index);
  if (&device_of(plan.of_ranks[0]) != &cpu_device()) pool->poison_new_blocks(false);  // only the device can write there
  return std::shared_ptr<KvPool>(std::move(pool));
}

}  // namespace xpyd::allocator
