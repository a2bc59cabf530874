#include "allocator/kv_copy.h"

#include <algorithm>

#include "base/status.h"

namespace xpyd {
namespace {

// Tokens from `token` to the end of its block.
int left_in_block(const KvView& view, int token) {
  return view.layout->block_tokens - token % view.layout->block_tokens;
}

}  // namespace

void add_block_copies(std::byte* dst_pool, const KvLayout& dst, int dst_block,
                      const std::byte* src_pool, const KvLayout& src, int src_block, int begin,
                      int end, std::vector<Copy>& copies) {
  XPYD_CHECK(dst.shape == src.shape && dst.order == src.order &&
             dst.block_tokens == src.block_tokens);
  XPYD_CHECK(0 <= begin && begin <= end && end <= src.block_tokens);
  // Tokens of a block lie token_stride apart without gaps: per plane, or all planes of a token
  // together.
  size_t bytes = size_t(end - begin) * src.token_stride();
  if (bytes == 0) return;
  int planes = src.order == KvOrder::layer_major ? 2 * src.shape.n_layers : 1;
  for (int p = 0; p < planes; ++p)
    copies.push_back({src_pool + src.offset(src_block, p / 2, p % 2, begin, 0),
                      dst_pool + dst.offset(dst_block, p / 2, p % 2, begin, 0), bytes});
}

size_t add_copies(const KvView& source, const KvView& destination, const KvRegion& region,
                  std::vector<Copy>& copies) {
  const KvLayout &from = *source.layout, &to = *destination.layout;
  XPYD_CHECK(from.shape == to.shape, "the two sides hold different models or dtypes");
  const size_t first = copies.size();
  size_t total = 0;
  auto add = [&](int layer, int kv, int token, size_t bytes) {
    const std::byte* src = source.row(layer, kv, token, 0);
    std::byte* dst = destination.row(layer, kv, token, 0);
    total += bytes;
    if (copies.size() > first) {
      Copy& last = copies.back();
      if (last.source + last.bytes == src && last.destination + last.bytes == dst) {
        last.bytes += bytes;
        return;
      }
    }
    copies.push_back({src, dst, bytes});
  };
  const size_t token_bytes = size_t(from.shape.n_kv_heads) * from.shape.row_bytes();
  // Tokens of a block that follow each other on both sides.
  auto each_run = [&](auto&& f) {
    for (int token = region.token_begin; token < region.token_end;) {
      const int run = std::min({region.token_end - token, left_in_block(source, token),
                                left_in_block(destination, token)});
      f(token, run);
      token += run;
    }
  };
  if (from.order == KvOrder::layer_major && to.order == KvOrder::layer_major) {
    for (int layer = region.layer_begin; layer < region.layer_end; ++layer)
      for (int kv = 0; kv < 2; ++kv)
        each_run([&](int token, int run) { add(layer, kv, token, size_t(run) * token_bytes); });
    return total;
  }
  const bool all_layers = region.layer_begin == 0 && region.layer_end == from.shape.n_layers;
  if (from.order == to.order && all_layers) {
    each_run([&](int token, int run) { add(0, 0, token, size_t(run) * from.shape.token_bytes()); });
    return total;
  }
  for (int token = region.token_begin; token < region.token_end; ++token)
    for (int layer = region.layer_begin; layer < region.layer_end; ++layer)
      for (int kv = 0; kv < 2; ++kv) add(layer, kv, token, token_bytes);
  return total;
}

}  // namespace xpyd
