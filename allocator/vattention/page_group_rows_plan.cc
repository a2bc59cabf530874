// The requirements of vattention on options and on the system, its pool, and its row in the table of schemes.
#include <algorithm>
#include <numeric>
#include <string>

#include "allocator/schemes.h"
#include "allocator/vattention/page_group_rows.h"
#include "base/device/device.h"

namespace xpyd::allocator {

int vattention_planes(const KvLayout& layout) {
  return layout.order == KvOrder::layer_major ? 2 * layout.shape.n_layers : 1;
}

int vattention_planes(const KvOptions& o) { return vattention_planes(KvLayout{o.shape, o.order}); }

int vattention_row_tokens(const KvOptions& o) {
  const size_t token = o.shape.token_bytes() / size_t(vattention_planes(o));  // bytes in one plane
  return token == 0 ? 0 : int(o.vattention.page_group_bytes / token);
}

size_t vattention_row_bytes(const KvOptions& o) { return size_t(vattention_planes(o)) * o.vattention.page_group_bytes; }

namespace {

// Each plane of a slot is a whole number of groups, at least one for each row of the longest sequence. It ends where a
// token and a group end together.
KvLayout vattention_slots(const KvOptions& o) {  // of one rank
  const size_t group = o.vattention.page_group_bytes, token = KvLayout{o.shape, o.order}.token_stride();
  const int row_tokens = vattention_row_tokens(o);
  const size_t rows = size_t((o.max_sequence_tokens + row_tokens - 1) / row_tokens);
  const size_t step = std::lcm(group, token);
  const size_t bytes = (rows * group + step - 1) / step * step;
  return {o.shape, o.order, int(bytes / token), o.vattention.max_sequences};
}

constexpr size_t kPage = 4096;
// Checks whether the system can provide these page groups.
Status check_page_groups(const KvOptions& o) {
  const std::string bytes = "page-group-bytes is " + std::to_string(o.vattention.page_group_bytes);
  if (o.vattention.page_group_bytes == 0 || o.vattention.page_group_bytes % kPage != 0)
    return invalid(bytes + ": expected a multiple of the page, " + std::to_string(kPage));
  if (vattention_row_tokens(o) < 1)
    return invalid(bytes + ": expected at least the bytes of one token of one layer's K or V");
  if (o.max_sequence_tokens < 1 || o.vattention.max_sequences < 1)
    return invalid("vattention: expected the longest sequence and the most sequences at once");
  const double rows_of_heads = 2.0 * o.shape.n_layers * o.shape.n_kv_heads * o.vattention.max_sequences *
                               vattention_slots(o).block_tokens;
  const double bytes_of_addresses = rows_of_heads * double(o.shape.row_bytes());
  const auto too_many = [&](double n, const std::string& expected) {
    return invalid("vattention: " + std::to_string(o.vattention.max_sequences) + " sequences of " +
                   std::to_string(o.max_sequence_tokens) + " tokens are " + std::to_string(int64_t(n)) + expected +
                   ": expected a smaller --max-batch or --max-model-len");
  };
  const double counted = rows_of_heads / (o.order == KvOrder::layer_major ? o.shape.n_layers : 1);
  // KvRows counts rows in 32 bits, and the boxes of flash_wgmma count tokens in 31.
  const double most = std::min(0x1p32, 0x1p31 * o.shape.n_kv_heads);
  if (o.vattention.on_card && counted >= most)
    return too_many(counted, " rows of addresses in a layer; with --device cuda expected fewer than " +
                                 std::to_string(int64_t(most)));
  if (bytes_of_addresses >= kProcessAddresses)
    return too_many(bytes_of_addresses, " bytes of addresses, but a process has 2^47");
  if (o.vattention.on_card) return ok();
  // Each sequence has at least one mapping and one gap per plane. Each memory has its own pool.
  const long planes = vattention_planes(o);
  const long rows = long(o.pool_bytes / vattention_row_bytes(o)) * o.n_memories;
  const long sequences = std::min(rows, long(o.vattention.max_sequences) * o.n_memories);
  const long least = 2 * planes * sequences, limit = max_mappings();
  if (limit > 0 && least > limit)
    return invalid(
        "vattention: " + std::to_string(o.n_memories) + " instances of " + std::to_string(o.vattention.max_sequences) +
        " sequences of " + std::to_string(planes) + " tensors take " + std::to_string(least) +
        " mappings or more, but vm.max_map_count is " + std::to_string(limit) +
        ": expected a smaller --max-batch, larger --page-group-bytes, or --kv-layout token_major (one tensor)");
  return ok();
}

Result<std::shared_ptr<KvPool>> make_rows(const PoolPlan& plan) {
  std::vector<std::shared_ptr<PageGroups>> groups;
  for (const KvOptions& o : plan.of_ranks) {
    Device& device = o.device ? *o.device : cpu_device();
    auto made = device.make_page_groups({.group_bytes = o.vattention.page_group_bytes,
                                         .n_groups = plan.whole.n_blocks * vattention_planes(o),
                                         .guard = o.vattention.guard});
    if (!made) return made.error();
    // Tries the reservation that each memory makes later.
    if (auto range = made.value()->reserve(vattention_slots(o).pool_bytes()); !range)
      return Error{ErrorCode::unavailable, "vattention: " + std::to_string(o.vattention.max_sequences) +
                                               " sequences of " + std::to_string(o.max_sequence_tokens) +
                                               " tokens: " + range.error().message +
                                               "; expected a smaller --max-batch or --max-model-len"};
    groups.push_back(std::move(made).value());
  }
  return std::shared_ptr<KvPool>(std::make_shared<PageGroupRows>(plan.whole, plan.shards, std::move(groups)));
}

std::unique_ptr<KvMemory> make_memory(std::shared_ptr<KvPool> pool, const KvOptions& options) {
  const auto& rows = dynamic_cast<const PageGroupRows&>(*pool);
  const int n_ranks = int(rows.places().ranks.size());
  std::vector<std::unique_ptr<VirtualRange>> ranges;
  std::vector<std::shared_ptr<std::byte>> addresses;  // owned by the ranges
  KvLayout slots;
  for (int rank = 0; rank < n_ranks; ++rank) {
    KvOptions own = options;
    own.shape = rows.places().layout(rank).shape;
    const KvLayout layout = vattention_slots(own);
    if (rank == 0) slots = layout;
    XPYD_CHECK(layout.block_tokens == slots.block_tokens && layout.token_stride() == slots.token_stride());
    auto range = rows.groups(rank).reserve(layout.pool_bytes());
    XPYD_CHECK(range.ok(), range.ok() ? "" : range.error().message);
    addresses.emplace_back(std::shared_ptr<void>(), range.value()->data());
    ranges.push_back(std::move(range).value());
  }
  KvShards shards;
  if (n_ranks > 1) shards = *rows.places().shards, slots.shape = options.shape;
  return memory_over_rows(std::move(pool), options, KvPlaces(slots, shards, std::move(addresses)), std::move(ranges));
}

}  // namespace

KvScheme vattention_scheme() {
  return {.name = "vattention",
          .source = "ASPLOS'25 (vAttention) sections 5 and 6",
          .unit = "page-group row",
          .block_tokens = vattention_row_tokens,
          .block_bytes = vattention_row_bytes,
          .check = check_page_groups,
          .make_pool = make_rows,
          .make = make_memory,
          .contiguous = true,
          .page_groups = true};
}

}  // namespace xpyd::allocator
