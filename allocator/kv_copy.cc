#include "allocator/kv_copy.h"

#include <cstring>

#include "base/status.h"

namespace xpyd {

void copy_pieces_avx2(const CopyPiece* pieces, size_t n);  // kv_copy_avx2.cc

namespace {

bool have_avx2() {
  static const bool have = __builtin_cpu_supports("avx2");
  return have;
}

}  // namespace

void copy_block_tokens(std::byte* dst_pool, const KvLayout& dst, int dst_block,
                       const std::byte* src_pool, const KvLayout& src, int src_block, int begin,
                       int end) {
  XPYD_CHECK(dst.shape == src.shape && dst.order == src.order &&
             dst.block_tokens == src.block_tokens);
  XPYD_CHECK(0 <= begin && begin <= end && end <= src.block_tokens);
  // Tokens of a block lie token_stride apart without gaps: per plane, or all planes of a token
  // together.
  size_t bytes = size_t(end - begin) * src.token_stride();
  if (bytes == 0) return;
  int planes = src.order == KvOrder::layer_major ? 2 * src.shape.n_layers : 1;
  for (int p = 0; p < planes; ++p)
    std::memcpy(dst_pool + dst.offset(dst_block, p / 2, p % 2, begin, 0),
                src_pool + src.offset(src_block, p / 2, p % 2, begin, 0), bytes);
}

void copy_pieces_streaming(std::span<const CopyPiece> pieces) {
  if (have_avx2()) return copy_pieces_avx2(pieces.data(), pieces.size());
  for (const CopyPiece& piece : pieces)
    if (piece.bytes > 0) std::memcpy(piece.dst, piece.src, piece.bytes);
}

void copy_bytes_streaming(std::byte* dst, const std::byte* src, size_t bytes) {
  CopyPiece piece{dst, src, bytes};
  copy_pieces_streaming({&piece, 1});
}

}  // namespace xpyd
