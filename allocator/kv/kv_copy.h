// Which bytes a copy of KV moves between two views, whose layouts and block sizes may differ.
#pragma once

#include <vector>

#include "allocator/kv/kv_layout.h"
#include "base/copy.h"

namespace xpyd::allocator {

// A box of one sequence's KV: tokens, and layers and heads in the source's own numbers. Where the
// destination holds other layers or heads of the model (allocator/kv/kv_shards.h), to_layer and
// to_head say where the first of them goes there.
struct KvRegion {
  int token_begin = 0, token_end = 0;
  int layer_begin = 0, layer_end = 0;
  int head_begin = 0, head_end = -1;  // -1: all heads, and both sides have as many
  int to_layer = -1, to_head = -1;    // in the destination; -1: the same as in the source
};

// Appends the copies of a region from one view to the other, neighbours on both sides joined. In
// pieces, where no two blocks are neighbours and all heads of both sides are in the region:
//   both layer_major              one per (layer, K or V, block)
//   both token_major, all layers  one per block
//   both token_major              one per token
//   one of each                   one per (token, layer, K or V)
// and one per (token, layer, K or V) where some side has heads that are not in the region.
// Returns their bytes. Before: both views have rows of one kind (head_dim and dtype).
size_t add_copies(const KvView& source, const KvView& destination, const KvRegion& region, std::vector<Copy>& copies);

}  // namespace xpyd::allocator
