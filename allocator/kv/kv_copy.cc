#include "allocator/kv/kv_copy.h"

#include <algorithm>
#include <string>

#include "base/status.h"

namespace xpyd::allocator {
namespace {

// Returns the number of tokens from `token` to the end of its block.
int left_in_block(const KvView& view, int token) {
  return view.layout->block_tokens - token % view.layout->block_tokens;
}

}  // namespace

size_t add_copies(const KvView& source, const KvView& destination, const KvRegion& region, std::vector<Copy>& copies) {
  const KvLayout &from = *source.layout, &to = *destination.layout;
  const KvRegion& r = region;
  XPYD_CHECK(from.shape.head_dim == to.shape.head_dim && from.shape.dtype == to.shape.dtype,
             "both sides must have the same model and dtypes");
  const bool all = r.head_end < 0;
  const int head = all ? 0 : r.head_begin, to_head = r.to_head < 0 ? head : r.to_head;
  const int heads = (all ? from.shape.n_kv_heads : r.head_end) - head;
  const int layers = r.layer_end - r.layer_begin;
  const int to_layer = r.to_layer < 0 ? r.layer_begin : r.to_layer;
  auto inside = [](int begin, int n, int size) { return begin >= 0 && n >= 0 && begin + n <= size; };
  XPYD_CHECK(inside(head, heads, from.shape.n_kv_heads) && inside(to_head, heads, to.shape.n_kv_heads) &&
                 (!all || from.shape.n_kv_heads == to.shape.n_kv_heads),
             "heads [" + std::to_string(head) + ", " + std::to_string(head + heads) + ") of " +
                 std::to_string(from.shape.n_kv_heads) + " go to " + std::to_string(to_head) + " of " +
                 std::to_string(to.shape.n_kv_heads));
  XPYD_CHECK(inside(r.layer_begin, layers, from.shape.n_layers) && inside(to_layer, layers, to.shape.n_layers),
             "layers [" + std::to_string(r.layer_begin) + ", " + std::to_string(r.layer_end) + ") of " +
                 std::to_string(from.shape.n_layers) + " go to " + std::to_string(to_layer) + " of " +
                 std::to_string(to.shape.n_layers));
  const size_t first = copies.size();
  size_t total = 0;
  if (heads == 0 || layers == 0) return total;
  // Adds the piece that begins at one row. `layer` and `kv` count from the first of the region.
  auto add = [&](int layer, int kv, int token, size_t bytes) {
    const std::byte* src = source.row(r.layer_begin + layer, kv, token, head);
    std::byte* dst = destination.row(to_layer + layer, kv, token, to_head);
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
  const size_t row_bytes = size_t(heads) * from.shape.row_bytes();  // of one (layer, K or V, token)
  // Calls f(token, n) for each run of tokens that lie in one block on both sides.
  auto each_run = [&](auto&& f) {
    for (int token = r.token_begin; token < r.token_end;) {
      const int run = std::min({r.token_end - token, left_in_block(source, token), left_in_block(destination, token)});
      f(token, run);
      token += run;
    }
  };
  const bool whole_heads = heads == from.shape.n_kv_heads && heads == to.shape.n_kv_heads;
  const bool whole_layers = layers == from.shape.n_layers && layers == to.shape.n_layers;
  if (from.order == KvOrder::layer_major && to.order == KvOrder::layer_major) {
    for (int layer = 0; layer < layers; ++layer)
      for (int kv = 0; kv < 2; ++kv)
        each_run([&](int token, int run) {
          if (whole_heads) return add(layer, kv, token, size_t(run) * row_bytes);
          for (int i = 0; i < run; ++i) add(layer, kv, token + i, row_bytes);
        });
    return total;
  }
  if (from.order == to.order && whole_heads) {
    const size_t token_bytes = 2 * size_t(layers) * row_bytes;
    each_run([&](int token, int run) {
      if (whole_layers) return add(0, 0, token, size_t(run) * token_bytes);
      for (int i = 0; i < run; ++i) add(0, 0, token + i, token_bytes);
    });
    return total;
  }
  for (int token = r.token_begin; token < r.token_end; ++token)
    for (int layer = 0; layer < layers; ++layer)
      for (int kv = 0; kv < 2; ++kv) add(layer, kv, token, row_bytes);
  return total;
}

}  // namespace xpyd::allocator
