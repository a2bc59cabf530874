// KvLayout: the one place where the address of a KV element is computed.
//
// A pool holds `n_blocks` blocks of `block_tokens` tokens. Paged memory has small blocks and one block table per
// sequence. Contiguous memory is the same pool with one long block, a slot, per sequence. The layout maps (layer, K or
// V, token, kv head, dim) to a byte offset in the pool, in one of two orders:
//
//   layer_major  [layer][K|V][block][token][head][dim]   one tensor per layer, for attention kernels
//   token_major  [block][token][layer][K|V][head][dim]   one run of bytes per block, for transfers
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace xpyd::allocator {

enum class KvOrder : uint8_t { layer_major, token_major };

inline constexpr Dtype kKvDtypes[] = {Dtype::f32,  Dtype::bf16,     Dtype::int8,
                                      Dtype::int4, Dtype::fp8_e4m3, Dtype::fp8_e5m2};

// The shape of one token's KV. The model defines it.
struct KvShape {
  int n_layers = 0;
  int n_kv_heads = 0;
  int head_dim = 0;          // elements
  Dtype dtype = Dtype::f32;  // one of kKvDtypes
  bool operator==(const KvShape&) const = default;

  XPYD_HD constexpr bool quantised() const { return dtype == Dtype::int8 || dtype == Dtype::int4; }
  // Bytes of the elements of one row.
  XPYD_HD constexpr size_t element_bytes() const { return size_t(head_dim) * size_t(dtype_bits(dtype)) / 8; }
  // Bytes of one row: the K (or V) vector of one token, layer and head. A quantised row also stores its scale and zero,
  // as two f16 after the elements, so that a copied row is complete.
  XPYD_HD constexpr size_t row_bytes() const { return element_bytes() + (quantised() ? 4 : 0); }
  // Bytes of one token: all layers, K and V.
  XPYD_HD constexpr size_t token_bytes() const { return 2 * size_t(n_layers) * size_t(n_kv_heads) * row_bytes(); }
};

// Strides of one layer, for kernels, which look up many rows. KvLayout::offset() is affine in block, token, K or V, and
// head. These are its coefficients, in rows of [head_dim] from the start of the pool.
struct KvRows {
  uint32_t first = 0;                                  // row of K of block 0, token 0, head 0
  uint32_t block = 0, token = 0, value = 0, head = 0;  // strides; value: from K to V
  int32_t block_tokens = 1;
  int32_t shift = -1;  // block_tokens == 1 << shift; -1: not a power of two; 31: one block holds the whole sequence

  // Returns the row of token `position` of a sequence with block table `table`. It equals KvView::row() / row_bytes().
  XPYD_HD constexpr uint32_t row(const int32_t* table, int kv, int position, int kv_head) const {
    int index = shift >= 0 ? position >> shift : position / block_tokens;
    uint32_t in_block = uint32_t(shift == 31 ? position : position - index * block_tokens);
    return first + uint32_t(table[index]) * block + in_block * token + uint32_t(kv) * value + uint32_t(kv_head) * head;
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

  // Bytes from one token to the next in a block, for a fixed layer, K or V, and head.
  XPYD_HD constexpr size_t token_stride() const {
    size_t heads = size_t(shape.n_kv_heads) * shape.row_bytes();
    return order == KvOrder::layer_major ? heads : 2 * size_t(shape.n_layers) * heads;
  }

  // Byte offset in the pool of the row [head_dim] of one token. kv: 0 = K, 1 = V. `token` counts inside the block: 0 <=
  // token < block_tokens.
  XPYD_HD constexpr size_t offset(int block, int layer, int kv, int token, int head) const {
    size_t plane = size_t(layer) * 2 + size_t(kv), planes = size_t(shape.n_layers) * 2;
    size_t token_in_pool = size_t(block) * size_t(block_tokens) + size_t(token);
    size_t row = order == KvOrder::layer_major ? (plane * size_t(n_blocks) * size_t(block_tokens) + token_in_pool)
                                               : (token_in_pool * planes + plane);
    return (row * size_t(shape.n_kv_heads) + size_t(head)) * shape.row_bytes();
  }

  // Requires: the pool has fewer than 2^32 rows. `contiguous`: the table of a sequence has one entry, its slot.
  XPYD_HD constexpr KvRows rows(int layer, bool contiguous) const {
    size_t row_bytes = shape.row_bytes(), first = offset(0, layer, 0, 0, 0);
    KvRows r{.first = uint32_t(first / row_bytes),
             .block = uint32_t((offset(1, layer, 0, 0, 0) - first) / row_bytes),
             .token = uint32_t((offset(0, layer, 0, 1, 0) - first) / row_bytes),
             .value = uint32_t((offset(0, layer, 1, 0, 0) - first) / row_bytes),
             .head = uint32_t((offset(0, layer, 0, 0, 1) - first) / row_bytes),
             .block_tokens = block_tokens};
    if (contiguous) {
      r.shift = 31;
    } else if ((block_tokens & (block_tokens - 1)) == 0) {
      for (r.shift = 0; 1 << r.shift < block_tokens;) ++r.shift;
    }
    return r;
  }
};

// One sequence's KV as attention, append and transfers see it: a pool, and the blocks that hold tokens 0, 1, 2, …
// Borrowed: it is valid until the owner of the sequence next changes it.
struct KvView {
  std::byte* pool = nullptr;  // [layout.pool_bytes()]
  const KvLayout* layout = nullptr;
  const int32_t* block_table = nullptr;  // [ceil(tokens / block_tokens)]; null: contiguous
  int32_t slot = 0;                      // the only block, if block_table is null

  XPYD_HD bool contiguous() const { return block_table == nullptr; }
  // The first byte of the row [head_dim] of the sequence's token `token`, which counts from 0.
  XPYD_HD std::byte* row(int layer, int kv, int token, int head) const {
    if (!block_table) return pool + layout->offset(slot, layer, kv, token, head);
    int block = token / layout->block_tokens;
    return pool + layout->offset(block_table[block], layer, kv, token - block * layout->block_tokens, head);
  }
};

}  // namespace xpyd::allocator
