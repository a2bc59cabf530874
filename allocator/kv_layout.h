// KvLayout: the one place where the address of a KV element is computed (DESIGN D2).
//
// A pool holds `n_blocks` blocks of `block_tokens` tokens. Paged memory has small blocks and a block
// table per sequence; contiguous memory is the same pool with one block, a slot, of the maximum length
// per sequence. (layer, K or V, token, kv head, dim) -> byte offset in the pool:
//
//   layer_major  [layer][K|V][block][token][head][dim]   one tensor per layer: what kernels like
//   token_major  [block][token][layer][K|V][head][dim]   one run per block: what transfers like
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace xpyd {

enum class KvOrder : uint8_t { layer_major, token_major };

// What one token of KV is. Owner: the model.
struct KvShape {
  int n_layers = 0;
  int n_kv_heads = 0;
  int head_dim = 0;            // elements
  Dtype dtype = Dtype::f32;    // f32 or bf16
  bool operator==(const KvShape&) const = default;

  // Bytes of one K (or V) vector of one token, one layer, one head.
  XPYD_HD constexpr size_t row_bytes() const { return size_t(head_dim) * dtype_bytes(dtype); }
  // Bytes of one token, all layers, K and V.
  XPYD_HD constexpr size_t token_bytes() const {
    return 2 * size_t(n_layers) * size_t(n_kv_heads) * row_bytes();
  }
};

struct KvLayout {
  KvShape shape;
  KvOrder order = KvOrder::layer_major;
  int block_tokens = 0;
  int n_blocks = 0;
  bool operator==(const KvLayout&) const = default;

  XPYD_HD constexpr size_t block_bytes() const { return size_t(block_tokens) * shape.token_bytes(); }
  XPYD_HD constexpr size_t pool_bytes() const { return size_t(n_blocks) * block_bytes(); }

  // Bytes from one token to the next of the same block, for a fixed (layer, K or V, head).
  XPYD_HD constexpr size_t token_stride() const {
    size_t heads = size_t(shape.n_kv_heads) * shape.row_bytes();
    return order == KvOrder::layer_major ? heads : 2 * size_t(shape.n_layers) * heads;
  }

  // Byte offset in the pool of the row [head_dim] of one token. kv: 0 = K, 1 = V. `token` counts inside
  // the block, 0 <= token < block_tokens.
  XPYD_HD constexpr size_t offset(int block, int layer, int kv, int token, int head) const {
    size_t plane = size_t(layer) * 2 + size_t(kv), planes = size_t(shape.n_layers) * 2;
    size_t token_in_pool = size_t(block) * size_t(block_tokens) + size_t(token);
    size_t row = order == KvOrder::layer_major
                     ? (plane * size_t(n_blocks) * size_t(block_tokens) + token_in_pool)
                     : (token_in_pool * planes + plane);
    return (row * size_t(shape.n_kv_heads) + size_t(head)) * shape.row_bytes();
  }
};

// One sequence's KV as attention, append and transfer see it: a pool and the blocks that hold tokens
// 0, 1, 2, … Borrowed: valid until the sequence's memory is next changed by its owner.
struct KvView {
  std::byte* pool = nullptr;             // [layout.pool_bytes()]
  const KvLayout* layout = nullptr;
  const int32_t* block_table = nullptr;  // [ceil(tokens / block_tokens)]; null: contiguous
  int32_t slot = 0;                      // the one block, when block_table is null

  XPYD_HD bool contiguous() const { return block_table == nullptr; }
  // First byte of the row [head_dim] of token `token` of the sequence (0-based position).
  XPYD_HD std::byte* row(int layer, int kv, int token, int head) const {
    if (!block_table) return pool + layout->offset(slot, layer, kv, token, head);
    int block = token / layout->block_tokens;
    return pool + layout->offset(block_table[block], layer, kv, token - block * layout->block_tokens, head);
  }
};

}  // namespace xpyd
