// Which bytes a block copy moves.
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

}  // namespace xpyd
