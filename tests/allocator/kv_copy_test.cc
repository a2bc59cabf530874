#include "allocator/kv_copy.h"

#include <algorithm>
#include <vector>

#include "base/random.h"
#include "tests/catch.h"

using namespace xpyd;

TEST_CASE("copy_block_tokens: these tokens of this block and no other byte", "[allocator]") {
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
    for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      KvLayout src{{3, 2, 5, dtype}, order, 7, 4}, dst = src;
      dst.n_blocks = 6;
      Random random(1);
      for (auto [begin, end] : {std::pair{0, 7}, {0, 1}, {2, 6}, {6, 7}, {3, 3}}) {
        std::vector<std::byte> from(src.pool_bytes()), to(dst.pool_bytes());
        for (std::byte& b : from) b = std::byte(random.next());
        for (std::byte& b : to) b = std::byte(random.next());
        std::vector<std::byte> expected = to;
        for (int layer = 0; layer < 3; ++layer)
          for (int kv = 0; kv < 2; ++kv)
            for (int t = begin; t < end; ++t)
              for (int head = 0; head < 2; ++head)
                std::copy_n(from.begin() + ptrdiff_t(src.offset(2, layer, kv, t, head)),
                            src.shape.row_bytes(),
                            expected.begin() + ptrdiff_t(dst.offset(5, layer, kv, t, head)));
        copy_block_tokens(to.data(), dst, 5, from.data(), src, 2, begin, end);
        REQUIRE(to == expected);
      }
    }
}

TEST_CASE("copy_bytes_streaming: every alignment and length", "[allocator]") {
  std::vector<std::byte> src(1 << 13), before(1 << 13);
  Random random(2);
  for (std::byte& b : src) b = std::byte(random.next());
  for (std::byte& b : before) b = std::byte(random.next());
  for (size_t bytes : {0, 1, 31, 32, 33, 127, 128, 129, 255, 256, 1000, 4096})
    for (size_t to = 0; to < 70; to += 3)
      for (size_t from : {0, 1, 16, 33, 64}) {
        std::vector<std::byte> dst = before, expected = before;
        std::copy_n(src.begin() + ptrdiff_t(from), bytes, expected.begin() + ptrdiff_t(to));
        copy_bytes_streaming(dst.data() + to, src.data() + from, bytes);
        if (dst != expected) FAIL(bytes << " bytes from " << from << " to " << to);
      }
  std::vector<std::byte> dst = before, expected = before;
  std::vector<CopyPiece> pieces;
  for (size_t i = 0; i < 20; ++i) {
    CopyPiece piece{dst.data() + i * 300, src.data() + (19 - i) * 350, 17 * i};
    std::copy_n(piece.src, piece.bytes, expected.begin() + ptrdiff_t(i * 300));
    pieces.push_back(piece);
  }
  copy_pieces_streaming(pieces);
  CHECK(dst == expected);
}
