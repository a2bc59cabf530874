#include "disagg/transfer_plan.h"

#include <algorithm>

#include "base/status.h"

namespace xpyd {
namespace {

void add(TransferPlan& plan, const std::byte* source, std::byte* destination, size_t bytes) {
  plan.bytes += bytes;
  if (!plan.copies.empty()) {
    Copy& last = plan.copies.back();
    if (last.source + last.bytes == source && last.destination + last.bytes == destination) {
      last.bytes += bytes;
      return;
    }
  }
  plan.copies.push_back({source, destination, bytes});
}

// Tokens from `token` to the end of its block.
int left_in_block(const KvView& view, int token) {
  return view.layout->block_tokens - token % view.layout->block_tokens;
}

}  // namespace

void plan_transfer(const KvView& source, const KvView& destination, const KvRegion& region,
                   TransferPlan& plan) {
  const KvLayout &from = *source.layout, &to = *destination.layout;
  XPYD_CHECK(from.shape == to.shape, "the two sides hold different models or dtypes");
  plan.copies.clear();
  plan.bytes = 0;
  size_t token_bytes = size_t(from.shape.n_kv_heads) * from.shape.row_bytes();  // of one layer, K or V
  if (from.order == KvOrder::layer_major && to.order == KvOrder::layer_major) {
    for (int layer = region.layer_begin; layer < region.layer_end; ++layer) {
      for (int kv = 0; kv < 2; ++kv) {
        for (int token = region.token_begin; token < region.token_end;) {
          int run = std::min({region.token_end - token, left_in_block(source, token),
                              left_in_block(destination, token)});
          add(plan, source.row(layer, kv, token, 0), destination.row(layer, kv, token, 0),
              size_t(run) * token_bytes);
          token += run;
        }
      }
    }
    return;
  }
  for (int token = region.token_begin; token < region.token_end; ++token) {
    for (int layer = region.layer_begin; layer < region.layer_end; ++layer) {
      for (int kv = 0; kv < 2; ++kv) {
        add(plan, source.row(layer, kv, token, 0), destination.row(layer, kv, token, 0), token_bytes);
      }
    }
  }
}

}  // namespace xpyd
