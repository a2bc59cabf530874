#include "allocator/kv_memory.h"

#include <algorithm>
#include <climits>
#include <utility>

#include "allocator/block_pool.h"
#include "allocator/kv_plan.h"
#include "allocator/pooled.h"
#include "base/device.h"

namespace xpyd {

// Each in the file of the scheme.
KvScheme contiguous_scheme();
KvScheme paged_scheme();
KvScheme token_scheme();
KvScheme slots_scheme();
KvScheme vattention_scheme();

std::span<const KvScheme> kv_schemes() {
  static const KvScheme schemes[] = {contiguous_scheme(), paged_scheme(), token_scheme(),
                                     slots_scheme(), vattention_scheme()};
  return schemes;
}

const KvScheme* find_kv_scheme(const std::string& name) {
  for (const KvScheme& scheme : kv_schemes())
    if (name == scheme.name) return &scheme;
  return nullptr;
}

namespace {

std::string scheme_names() {
  std::string names;
  for (const KvScheme& scheme : kv_schemes())
    names += (names.empty() ? "" : ", ") + std::string(scheme.name);
  return names;
}

}  // namespace

Result<KvLayout> plan_pool(const std::string& scheme_name, const KvOptions& options) {
  const KvScheme* scheme = find_kv_scheme(scheme_name);
  if (!scheme)
    return invalid("allocator \"" + scheme_name + "\": expected one of " + scheme_names());
  const KvShape& shape = options.shape;
  for (auto [value, what] : {std::pair{shape.n_layers, "layers"},
                             {shape.n_kv_heads, "kv heads"},
                             {shape.head_dim, "head_dim"}})
    if (value < 1)
      return invalid("KV " + std::string(what) + " is " + std::to_string(value) +
                     ": expected at least 1");
  if (shape.dtype == Dtype::f16)
    return invalid("kv-dtype is f16: expected f32, bf16, int8 or int4");
  if (shape.dtype == Dtype::int4 && shape.head_dim % 2 != 0)
    return invalid("kv-dtype int4: head_dim is " + std::to_string(shape.head_dim) +
                   ", expected an even number");
  if (Status status = scheme->check(options); !status) return status.error();
  const int block_tokens = scheme->block_tokens(options);
  const char* unit = scheme->unit;
  if (block_tokens < 1)
    return invalid("tokens per " + std::string(unit) + " is " + std::to_string(block_tokens) +
                   ": expected at least 1");
  // Four ints multiplied: beyond 64 bits for absurd input.
  size_t needed = 2 * shape.row_bytes();
  for (int factor : {shape.n_layers, shape.n_kv_heads, block_tokens})
    if (__builtin_mul_overflow(needed, size_t(factor), &needed))
      return invalid("one KV " + std::string(unit) + " of " + std::to_string(block_tokens) +
                     " tokens exceeds 64-bit addresses");
  needed = scheme->block_bytes(options);
  if (options.pool_bytes < needed)
    return invalid("kv-bytes is " + std::to_string(options.pool_bytes) + ", too small for one " +
                   unit + ": " + std::to_string(block_tokens) + " tokens need " +
                   std::to_string(needed) + " bytes");
  size_t n_blocks = options.pool_bytes / needed;
  if (n_blocks > size_t(INT_MAX) / size_t(block_tokens))
    return invalid("kv-bytes is " + std::to_string(options.pool_bytes) +
                   ": expected fewer than 2^31 tokens of " + std::to_string(shape.token_bytes()) +
                   " bytes");
  const KvLayout layout{shape, options.order, block_tokens, int(n_blocks)};
  if (layout.pool_bytes() / shape.row_bytes() >= size_t(1) << 32)
    return invalid("kv-bytes is " + std::to_string(options.pool_bytes) +
                   ": expected fewer than 2^32 rows of " + std::to_string(shape.row_bytes()) +
                   " bytes");
  return layout;
}

size_t pool_metadata_bytes(const KvLayout& layout, bool prefix_cache) {
  return BlockPool::metadata_bytes(layout, prefix_cache);
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

Device& device_of(const KvOptions& options) {
  return options.device ? *options.device : cpu_device();
}

}  // namespace

Result<std::shared_ptr<std::byte>> make_pool_memory(const KvOptions& options) {
  Device& device = device_of(options);
  return options.pool_in_groups
             ? allocate_groups(device, options.pool_bytes, options.page_group_bytes)
             : device.allocate(options.pool_bytes);
}

size_t bytes_of_tokens(const KvOptions& options, int tokens) {
  return size_t(tokens) * options.shape.token_bytes();
}

Status nothing_more(const KvOptions&) { return ok(); }

Result<std::shared_ptr<BlockPool>> make_blocks(const KvLayout& layout, const KvOptions& options,
                                               bool prefix_index) {
  Result<std::shared_ptr<std::byte>> memory = make_pool_memory(options);
  if (!memory) return memory.error();
  auto pool = std::make_shared<BlockPool>(KvPlaces(layout, memory.value()), prefix_index);
  if (&device_of(options) != &cpu_device())
    pool->poison_new_blocks(false);  // only the device can write there
  return pool;
}

Result<std::shared_ptr<BlockPool>> make_block_pool(const std::string& scheme,
                                                   const KvOptions& options) {
  Result<KvLayout> layout = plan_pool(scheme, options);
  XPYD_CHECK(layout.ok(), layout.ok() ? "" : layout.error().message);
  return find_kv_scheme(scheme)->make_pool(layout.value(), options);
}

}  // namespace xpyd
