#include "allocator/kv_copy.h"

#include <algorithm>
#include <vector>

#include "base/device.h"
#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing::kv_copy_test {

TEST_CASE("add_copies: these tokens of this block and no other byte", "[allocator]") {
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
                std::copy_n(from.begin() + ptrdiff_t(src.offset(2, layer, kv, t, head)), src.shape.row_bytes(),
                            expected.begin() + ptrdiff_t(dst.offset(5, layer, kv, t, head)));
        std::vector<Copy> copies;
        add_copies({from.data(), &src, nullptr, 2}, {to.data(), &dst, nullptr, 5}, {begin, end, 0, 3}, copies);
        cpu_queue().copy(copies, true);
        REQUIRE(to == expected);
      }
    }
}

// A sequence of `tokens` tokens somewhere in a pool of this shape.
struct CopySide {
  CopySide(KvShape shape, KvOrder order, int block_tokens, int tokens, bool contiguous, Random& random) {
    const int n_blocks = contiguous ? 1 : (tokens + block_tokens - 1) / block_tokens;
    layout = {shape, order, contiguous ? tokens + 3 : block_tokens, n_blocks + 3};
    pool.resize(layout.pool_bytes());
    for (std::byte& b : pool) b = std::byte(random.next());
    for (int i = 0; i < layout.n_blocks; ++i) table.push_back(i);
    for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random.below(i)]);
    is_contiguous = contiguous;
  }
  KvView view() { return {pool.data(), &layout, is_contiguous ? nullptr : table.data(), table[0]}; }
  KvLayout layout;
  std::vector<std::byte> pool;
  std::vector<int32_t> table;
  bool is_contiguous;
};

TEST_CASE("add_copies: any box of heads, layers and tokens, against a copy row by row", "[allocator]") {
  Random random(3);
  constexpr int kTokens = 23;
  auto below = [&](int n) { return int(random.below(uint64_t(n))); };
  for (int round = 0; round < 3000; ++round) {
    const Dtype dtype = kKvDtypes[random.below(std::size(kKvDtypes))];
    auto side = [&] {
      return CopySide({1 + below(4), 1 + below(4), 4, dtype}, below(2) ? KvOrder::layer_major : KvOrder::token_major,
                      std::vector{1, 4, 7, 16}[random.below(4)], kTokens, below(3) == 0, random);
    };
    CopySide from = side(), to = side();
    const int layers = 1 + below(std::min(from.layout.shape.n_layers, to.layout.shape.n_layers));
    const int heads = 1 + below(std::min(from.layout.shape.n_kv_heads, to.layout.shape.n_kv_heads));
    KvRegion region;
    region.token_begin = below(kTokens + 1);
    region.token_end = region.token_begin + below(kTokens + 1 - region.token_begin);
    region.layer_begin = below(from.layout.shape.n_layers - layers + 1);
    region.layer_end = region.layer_begin + layers;
    region.head_begin = below(from.layout.shape.n_kv_heads - heads + 1);
    region.head_end = region.head_begin + heads;
    region.to_layer = below(to.layout.shape.n_layers - layers + 1);
    region.to_head = below(to.layout.shape.n_kv_heads - heads + 1);

    CopySide expected = to;
    expected.table = to.table;
    size_t bytes = 0;
    for (int token = region.token_begin; token < region.token_end; ++token)
      for (int l = 0; l < layers; ++l)
        for (int kv = 0; kv < 2; ++kv)
          for (int h = 0; h < heads; ++h) {
            const std::byte* row = from.view().row(region.layer_begin + l, kv, token, region.head_begin + h);
            std::copy_n(row, from.layout.shape.row_bytes(),
                        expected.view().row(region.to_layer + l, kv, token, region.to_head + h));
            bytes += from.layout.shape.row_bytes();
          }
    std::vector<Copy> copies;
    INFO("round " << round);
    REQUIRE(add_copies(from.view(), to.view(), region, copies) == bytes);
    size_t planned = 0;
    for (size_t i = 0; i < copies.size(); ++i) {
      planned += copies[i].bytes;
      if (i > 0)  // neighbours are joined
        REQUIRE_FALSE((copies[i - 1].source + copies[i - 1].bytes == copies[i].source &&
                       copies[i - 1].destination + copies[i - 1].bytes == copies[i].destination));
    }
    REQUIRE(planned == bytes);
    cpu_queue().copy(copies, true);
    REQUIRE(to.pool == expected.pool);
  }
}

TEST_CASE("add_copies: pieces of a block, by orders and by what is whole", "[allocator]") {
  constexpr int kBlock = 8, kLayers = 3;
  struct {
    KvOrder from, to;
    int layers, heads;
    size_t pieces;
  } const cases[] = {
      {KvOrder::layer_major, KvOrder::layer_major, 3, 4, 6},
      {KvOrder::layer_major, KvOrder::layer_major, 2, 4, 4},
      {KvOrder::layer_major, KvOrder::layer_major, 3, 2, 6 * kBlock},
      {KvOrder::token_major, KvOrder::token_major, 3, 4, 1},
      {KvOrder::token_major, KvOrder::token_major, 2, 4, kBlock},
      {KvOrder::token_major, KvOrder::token_major, 3, 1, 6 * kBlock},
      {KvOrder::token_major, KvOrder::layer_major, 3, 4, 6 * kBlock},
  };
  for (const auto& c : cases) {
    const KvShape shape{kLayers, 4, 2, Dtype::f32};
    const KvLayout from{shape, c.from, kBlock, 4}, to{shape, c.to, kBlock, 4};
    std::vector<std::byte> a(from.pool_bytes()), b(to.pool_bytes());
    const int32_t blocks_a[] = {0, 2}, blocks_b[] = {3, 1};
    std::vector<Copy> copies;
    add_copies({a.data(), &from, blocks_a, 0}, {b.data(), &to, blocks_b, 0},
               {.token_end = 2 * kBlock, .layer_end = c.layers, .head_end = c.heads}, copies);
    INFO(int(c.from) << " -> " << int(c.to) << ", layers " << c.layers << ", heads " << c.heads);
    CHECK(copies.size() == 2 * c.pieces);
  }
}

}  // namespace xpyd::testing::kv_copy_test
