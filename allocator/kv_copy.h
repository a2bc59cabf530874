// Copies of KV bytes inside host memory.
#pragma once

#include <cstddef>
#include <span>

#include "allocator/kv_layout.h"

namespace xpyd {

// Copies tokens [begin, end) of one block onto the same tokens of another, all layers, K and V, in
// as few pieces as the order allows: 2 * n_layers (layer_major) or one (token_major). The layouts
// may differ in n_blocks only. Before: the two blocks do not overlap.
void copy_block_tokens(std::byte* dst_pool, const KvLayout& dst, int dst_block,
                       const std::byte* src_pool, const KvLayout& src, int src_block, int begin,
                       int end);

// Copies with non-temporal stores: `dst` goes around the caches, which saves reading its lines
// before they are overwritten. It pays when the bytes copied together exceed the last-level cache,
// or when `dst` is read next by nobody or by another socket; what is read again soon is better off
// with memcpy. Ends with a fence: a flag stored after the call publishes the bytes. Falls back to
// memcpy without AVX2.
void copy_bytes_streaming(std::byte* dst, const std::byte* src, size_t bytes);

struct CopyPiece {
  std::byte* dst = nullptr;
  const std::byte* src = nullptr;
  size_t bytes = 0;
};

// The same for many pieces with one fence at the end. The head of the next piece is fetched while
// one is copied: at a jump to another block the hardware prefetcher starts from nothing.
void copy_pieces_streaming(std::span<const CopyPiece> pieces);

}  // namespace xpyd
