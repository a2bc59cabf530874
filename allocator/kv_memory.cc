#include "allocator/kv_memory.h"

#include <algorithm>
#include <climits>
#include <utility>

#include "allocator/block_pool.h"
#include "allocator/kv_plan.h"
#include "allocator/pooled.h"
#include "base/device.h"

namespace xpyd {
namespace {

int small_block(const KvOptions& options) { return options.block_tokens; }
int one_token(const KvOptions&) { return 1; }
constexpr size_t kPage = 4096;
constexpr double kMostAddresses = 0x1p47;  // bytes, of a process on x86-64 and with 4 KiB pages

int whole_slot(const KvOptions& options) { return options.max_sequence_tokens; }

constexpr KvScheme kSchemes[] = {
    {"contiguous", make_contiguous, whole_slot, nullptr, true, "SOSP'23 (PagedAttention) section 3.1: Orca (Max)"},
    {"paged", make_paged, small_block, nullptr, false, "SOSP'23 (PagedAttention) section 4; vLLM V1 prefix cache"},
    {"token", make_token, one_token, nullptr, false,
     "lightllm's TokenAttention: a block is one token, so no block is ever partly used"},
    {"slots", make_slots, whole_slot, nullptr, true,
     "TurboMind's first generation: slots of the maximum length, LRU over sequences"},
    {"vattention", make_vattention, vattention_row_tokens, vattention_row_bytes, true,
     "ASPLOS'25 (vAttention) sections 5 and 6"},
};

std::string scheme_names() {
  std::string names;
  for (const KvScheme& scheme : kSchemes) names += (names.empty() ? "" : ", ") + std::string(scheme.name);
  return names;
}

// What a system must have for these page groups.
Status check_page_groups(const KvOptions& o, int row_tokens) {
  const std::string bytes = "page-group-bytes is " + std::to_string(o.page_group_bytes);
  if (o.page_group_bytes == 0 || o.page_group_bytes % kPage != 0)
    return invalid(bytes + ": expected a multiple of the page, " + std::to_string(kPage));
  if (row_tokens < 1) return invalid(bytes + ", less than one token of one layer's K or V");
  if (o.max_sequence_tokens < 1 || o.max_sequences < 1)
    return invalid("vattention: expected the longest sequence and the most sequences at once");
  const double rows_of_heads = 2.0 * o.shape.n_layers * o.shape.n_kv_heads * o.max_sequences *
                               vattention_slots(o).block_tokens;
  const double bytes_of_addresses = rows_of_heads * double(o.shape.row_bytes());
  const auto too_many = [&](double n, const std::string& expected) {
    return invalid("vattention: " + std::to_string(o.max_sequences) + " sequences of " +
                   std::to_string(o.max_sequence_tokens) + " tokens are " + std::to_string(int64_t(n)) + expected +
                   ": a smaller --max-batch or --max-model-len");
  };
  const double counted = rows_of_heads / (o.order == KvOrder::layer_major ? o.shape.n_layers : 1);
  // KvRows counts rows in 32 bits, flash_wgmma's boxes count tokens in 31.
  const double most = std::min(0x1p32, 0x1p31 * o.shape.n_kv_heads);
  if (o.on_card && counted >= most)
    return too_many(counted, " rows of addresses of a layer, with --device cuda expected fewer than " +
                                 std::to_string(int64_t(most)));
  if (bytes_of_addresses >= kMostAddresses)
    return too_many(bytes_of_addresses, " bytes of addresses, a process has 2^47");
  if (o.on_card) return ok();
  // Each sequence has at least one mapping and one gap per plane. Memories have a pool each, or all
  // of them one.
  const long planes = long(vattention_row_bytes(o) / o.page_group_bytes);
  const long rows = long(o.pool_bytes / vattention_row_bytes(o)) * (o.keep_idle ? o.n_memories : 1);
  const long sequences = std::min(rows, long(o.max_sequences) * o.n_memories);
  const long least = 2 * planes * sequences, limit = max_mappings();
  if (limit > 0 && least > limit)
    return invalid("vattention: " + std::to_string(o.n_memories) + " instances of " + std::to_string(o.max_sequences) +
                   " sequences of " + std::to_string(planes) + " tensors take " + std::to_string(least) +
                   " mappings or more, vm.max_map_count is " + std::to_string(limit) +
                   ": a smaller --max-batch, larger --page-group-bytes, or --kv-layout "
                   "token_major (one tensor)");
  return ok();
}

}  // namespace

std::span<const KvScheme> kv_schemes() { return kSchemes; }

const KvScheme* find_kv_scheme(const std::string& name) {
  for (const KvScheme& scheme : kSchemes)
    if (name == scheme.name) return &scheme;
  return nullptr;
}

Result<KvLayout> plan_pool(const std::string& scheme_name, const KvOptions& options) {
  const KvScheme* scheme = find_kv_scheme(scheme_name);
  if (!scheme) return invalid("allocator \"" + scheme_name + "\": expected one of " + scheme_names());
  const KvShape& shape = options.shape;
  for (auto [value, what] :
       {std::pair{shape.n_layers, "layers"}, {shape.n_kv_heads, "kv heads"}, {shape.head_dim, "head_dim"}})
    if (value < 1) return invalid("KV " + std::string(what) + " is " + std::to_string(value) + ": expected at least 1");
  if (shape.dtype == Dtype::f16) return invalid("kv-dtype is f16: expected f32, bf16, int8 or int4");
  if (shape.dtype == Dtype::int4 && shape.head_dim % 2 != 0)
    return invalid("kv-dtype int4: head_dim is " + std::to_string(shape.head_dim) + ", expected an even number");
  int block_tokens = scheme->block_tokens(options);
  const char* unit = scheme->block_tokens == whole_slot ? "slot" : "block";
  if (scheme->block_bytes) {
    if (Status status = check_page_groups(options, block_tokens); !status) return status.error();
    unit = "row of page groups";
  }
  if (block_tokens < 1)
    return invalid("tokens per " + std::string(unit) + " is " + std::to_string(block_tokens) + ": expected at least 1");
  // Four ints multiplied: beyond 64 bits for absurd input.
  size_t needed = 2 * shape.row_bytes();
  for (int factor : {shape.n_layers, shape.n_kv_heads, block_tokens})
    if (__builtin_mul_overflow(needed, size_t(factor), &needed))
      return invalid("one KV " + std::string(unit) + " of " + std::to_string(block_tokens) +
                     " tokens exceeds 64-bit addresses");
  if (scheme->block_bytes) needed = scheme->block_bytes(options);
  if (options.pool_bytes < needed)
    return invalid("kv-bytes is " + std::to_string(options.pool_bytes) + ", too small for one " + unit + ": " +
                   std::to_string(block_tokens) + " tokens need " + std::to_string(needed) + " bytes");
  size_t n_blocks = options.pool_bytes / needed;
  if (n_blocks > size_t(INT_MAX) / size_t(block_tokens))
    return invalid("kv-bytes is " + std::to_string(options.pool_bytes) + ": expected fewer than 2^31 tokens of " +
                   std::to_string(shape.token_bytes()) + " bytes");
  const KvLayout layout{shape, options.order, block_tokens, int(n_blocks)};
  if (layout.pool_bytes() / shape.row_bytes() >= size_t(1) << 32)
    return invalid("kv-bytes is " + std::to_string(options.pool_bytes) + ": expected fewer than 2^32 rows of " +
                   std::to_string(shape.row_bytes()) + " bytes");
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

Device& device_of(const KvOptions& options) { return options.device ? *options.device : cpu_device(); }

}  // namespace

Result<std::shared_ptr<std::byte>> make_pool_memory(const KvOptions& options) {
  Device& device = device_of(options);
  return options.pool_in_groups ? allocate_groups(device, options.pool_bytes, options.page_group_bytes)
                                : device.allocate(options.pool_bytes);
}

bool pool_has_prefix_cache(const KvScheme& scheme, const KvOptions& options) {
  return options.prefix_cache && (scheme.make == make_paged || scheme.make == make_token);
}

Result<std::shared_ptr<BlockPool>> make_block_pool(const std::string& scheme, const KvOptions& options) {
  Result<KvLayout> layout = plan_pool(scheme, options);
  XPYD_CHECK(layout.ok(), layout.ok() ? "" : layout.error().message);
  const bool prefix_cache = pool_has_prefix_cache(*find_kv_scheme(scheme), options);
  Device& device = device_of(options);
  if (find_kv_scheme(scheme)->block_bytes) {
    const int planes = int(vattention_row_bytes(options) / options.page_group_bytes);
    auto groups = device.make_page_groups({.group_bytes = options.page_group_bytes,
                                           .n_groups = layout.value().n_blocks * planes,
                                           .call_us = options.page_call_us,
                                           .guard = options.guard});
    if (!groups) return groups.error();
    // Each memory reserves as many addresses.
    const size_t addresses = vattention_slots(options).pool_bytes();
    if (auto range = groups.value()->reserve(addresses); !range)
      return Error{ErrorCode::unavailable, "vattention: " + std::to_string(options.max_sequences) + " sequences of " +
                                               std::to_string(options.max_sequence_tokens) + " tokens: " +
                                               range.error().message + "; a smaller --max-batch or --max-model-len"};
    return std::make_shared<BlockPool>(layout.value(), groups.value());
  }
  Result<std::shared_ptr<std::byte>> memory = make_pool_memory(options);
  if (!memory) return memory.error();
  auto pool = std::make_shared<BlockPool>(layout.value(), memory.value(), prefix_cache);
  if (&device != &cpu_device()) pool->poison_new_blocks(false);  // only the device can write there
  return pool;
}

}  // namespace xpyd
