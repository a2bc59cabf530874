// The byte ranges that a copy of KV moves between two views. The two layouts and block sizes may differ.
#pragma once

#include <vector>

#include "allocator/kv/kv_layout.h"
#include "base/copy.h"

namespace xpyd::allocator {

// A box of one sequence's KV: a range of tokens, of layers and of heads. The ranges count in the source's own numbers.
// If the destination holds other layers or heads of the model (kv_shards.h), to_layer and to_head give the place of the
// first of them there.
struct KvRegion {
  int token_begin = 0, token_end = 0;
  int layer_begin = 0, layer_end = 0;
  int head_begin = 0, head_end = -1;  // -1: all heads; both sides have equally many
  int to_layer = -1, to_head = -1;    // in the destination's numbers; -1: as in the source
};

// Appends to `copies` the copies of a region from `source` to `destination`, and returns their bytes. Requires: both
// views have the same head_dim and dtype. A piece ends where a block of either side ends. Pieces that are adjacent on
// both sides are joined. If none are, and the region has all heads of both sides, the number of pieces is
//   both layer_major              one per (layer, K or V, block)
//   both token_major, all layers  one per block
//   both token_major              one per token
//   one of each                   one per (token, layer, K or V)
// If a side has heads outside the region, it is one per (token, layer, K or V).
size_t add_copies(const KvView& source, const KvView& destination, const KvRegion& region, std::vector<Copy>& copies);

}  // namespace xpyd::allocator
