// Which bytes a copy of KV moves: between two blocks of one layout, or between two views whose
// layouts and block sizes may differ.
#pragma once

#include <vector>

#include "allocator/kv_layout.h"
#include "base/copy.h"

namespace xpyd {

// Appends the copies of tokens [begin, end) of one block onto the same tokens of another, all
// layers, K and V, in as few pieces as the order allows: 2 * n_layers (layer_major) or one
// (token_major). The layouts may differ in n_blocks only. Before: the two blocks do not overlap.
void add_block_copies(std::byte* dst_pool, const KvLayout& dst, int dst_block,
                      const std::byte* src_pool, const KvLayout& src, int src_block, int begin,
                      int end, std::vector<Copy>& copies);

// Tokens [token_begin, token_end) of layers [layer_begin, layer_end), all heads.
struct KvRegion {
  int token_begin = 0, token_end = 0;
  int layer_begin = 0, layer_end = 0;
};

// Appends the copies of a region of one sequence's KV from one view to the other, neighbours on both
// sides joined: about 2 * layers * blocks pieces where both are layer_major, one for each run of
// neighbouring blocks where both are token_major, one per (layer, K or V, token) where they differ.
// Returns their bytes. Before: both views have one KvShape.
size_t add_copies(const KvView& source, const KvView& destination, const KvRegion& region,
                  std::vector<Copy>& copies);

}  // namespace xpyd
