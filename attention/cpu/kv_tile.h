// The place where the CPU's kernels meet the memory schemes. A tile of 64 tokens becomes 64 addresses of K rows and 64
// of V rows, through a block table or on contiguous addresses. The kernels see these pointers and know no scheme.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "attention/cpu/kernels.h"

namespace xpyd::attention {

// Row pointers of one tile at one KV head; null where a row is not readable.
struct Tile {
  int first = 0;                          // the token at which it begins
  Tokens readable = {0, 0};               // tokens that may be read, counted in the tile
  const std::byte* rows[2][kTileTokens];  // K, V

  // Loads the tile that begins at token `first_token`, as far as it lies in `tokens` (both count from the sequence's
  // first token). Looks up one row per block; inside a block, tokens are token_stride() apart.
  void load(const KvView& view, int layer, int head, int first_token, Tokens tokens) {
    first = first_token;
    readable = {std::max(tokens.begin - first, 0), std::min(tokens.end - first, kTileTokens)};
    for (auto& of : rows) std::fill(std::begin(of), std::end(of), nullptr);
    const size_t stride = view.layout->token_stride();
    const int block_tokens = view.layout->block_tokens;
    for (int t = readable.begin; t < readable.end;) {
      const int token = first + t;
      const int left = view.contiguous() ? kTileTokens : block_tokens - token % block_tokens;
      const std::byte* k = view.row(layer, 0, token, head);
      const std::byte* v = view.row(layer, 1, token, head);
      for (const int stop = std::min(readable.end, t + left); t < stop; ++t, k += stride, v += stride) {
        rows[0][t] = k;
        rows[1][t] = v;
      }
    }
  }
};

}  // namespace xpyd::attention
