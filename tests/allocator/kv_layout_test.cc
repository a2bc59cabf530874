#include "allocator/kv/kv_layout.h"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "allocator/kv/kv_copy.h"
#include "allocator/schemes.h"
#include "base/device/device.h"
#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"
#include "tests/matchers.h"

namespace xpyd::testing::kv_layout_test {

constexpr KvShape kSmall{.n_layers = 2, .n_kv_heads = 3, .head_dim = 4, .dtype = Dtype::bf16};

TEST_CASE("KvLayout: offsets are a bijection onto the pool in both orders", "[allocator]") {
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
    for (Dtype dtype : {Dtype::f32, Dtype::bf16})
      for (int block_tokens : {1, 3, 16})
        for (int n_blocks : {1, 7}) {
          KvLayout l{{3, 2, 5, dtype}, order, block_tokens, n_blocks};
          std::vector<int> covered(l.pool_bytes(), 0);
          int wrong = 0;
          for (int b = 0; b < n_blocks; ++b)
            for (int layer = 0; layer < 3; ++layer)
              for (int kv = 0; kv < 2; ++kv)
                for (int t = 0; t < block_tokens; ++t)
                  for (int head = 0; head < 2; ++head) {
                    size_t at = l.offset(b, layer, kv, t, head);
                    wrong += at + l.shape.row_bytes() > covered.size();
                    if (wrong) continue;
                    for (size_t i = 0; i < l.shape.row_bytes(); ++i) ++covered[at + i];
                    if (t > 0) wrong += at - l.offset(b, layer, kv, t - 1, head) != l.token_stride();
                    // The heads of one token are adjacent.
                    if (head > 0) wrong += at - l.offset(b, layer, kv, t, 0) != l.shape.row_bytes();
                  }
          REQUIRE(wrong == 0);
          REQUIRE(std::count(covered.begin(), covered.end(), 1) == ptrdiff_t(covered.size()));
        }
}

TEST_CASE("plan_pool: it returns the layout, or names the wrong option", "[allocator]") {
  KvOptions o{.shape = kSmall, .pool_bytes = 10'000, .block_tokens = 16, .max_sequence_tokens = 40};
  const KvLayout paged = plan_pool("paged", o).value();
  CHECK((paged.n_blocks == int(10'000 / (16 * kSmall.token_bytes())) && paged.block_tokens == 16));
  CHECK(plan_pool("contiguous", o).value().block_tokens == 40);

  const KvOptions rows = vattention_options(8, 4, 2048);
  struct {
    const char* scheme;
    std::function<void(KvOptions&)> change;
    const char* part;  // part of the message; "" if the options are good
  } const cases[] = {
      {"slabs", [](auto&) {}, "contiguous, paged"},
      {"paged", [](auto& c) { c.pool_bytes = 1536; }, ""},
      {"paged", [](auto& c) { c.pool_bytes = 1535; }, "16 tokens need 1536 bytes"},
      {"contiguous", [](auto& c) { c.pool_bytes = 0; }, "slot"},
      {"paged", [](auto& c) { c.shape.n_layers = c.shape.head_dim = c.block_tokens = INT32_MAX; }, "64-bit"},
      {"paged", [](auto& c) { c.pool_bytes = size_t(1) << 60; }, "2^31"},
      {"slots", [](auto& c) { c.prefix_cache = false, c.slot_chunk = 1; }, "--slot-prealloc"},
      {"vattention", [](auto&) {}, ""},
      {"vattention", [](auto& c) { c.vattention.page_group_bytes = 5000; }, "multiple of the page"},
      {"vattention", [](auto& c) { c.pool_bytes = 4096; }, "too small for one page-group row"},
      {"vattention", [](auto& c) { c.vattention.max_sequences = 100000, c.pool_bytes = size_t(1) << 31; },
       "vm.max_map_count"},
      // Each of eight instances may have an eighth of what one may have.
      {"vattention",
       [](auto& c) {
         c.vattention.max_sequences = 2500, c.pool_bytes = 2500 * vattention_row_bytes(c), c.n_memories = 8;
       },
       "8 instances of 2500 sequences"},
      // Addresses suffice on the host. On a GPU they are counted.
      {"vattention", [](auto& c) { c.max_sequence_tokens = 1 << 24, c.vattention.max_sequences = 64; }, ""},
      {"vattention",
       [](auto& c) { c.max_sequence_tokens = 1 << 24, c.vattention.max_sequences = 64, c.vattention.on_card = true; },
       "fewer than 4294967296"},
      {"vattention", [](auto& c) { c.max_sequence_tokens = c.vattention.max_sequences = 1 << 24; },
       "a process has 2^47"},
      {"vattention", [](auto& c) { c.shape.n_kv_heads = 1024; }, "at least the bytes of one token"},
  };
  for (const auto& [scheme, change, part] : cases) {
    KvOptions changed = scheme == std::string("vattention") ? rows : o;
    change(changed);
    const Result<KvLayout> plan = plan_pool(scheme, changed);
    INFO(scheme << " should report " << part << ": " << (plan ? "" : plan.error().message));
    REQUIRE(plan.ok() == (*part == 0));
    if (plan) continue;
    CHECK(plan.error().code == ErrorCode::invalid_argument);
    CHECK(plan.error().message.find(part) != std::string::npos);
  }
}

TEST_CASE("plan_ranks: impossible ranks are refused before anything is allocated", "[shards][allocator]") {
  KvOptions paged{
      .shape = {.n_layers = 3, .n_kv_heads = 2, .head_dim = 2}, .block_tokens = 4, .max_sequence_tokens = 40};
  paged.pool_bytes = 4 * paged.shape.token_bytes();  // enough for one block, but not with copies of heads
  KvOptions rows = paged;
  rows.order = KvOrder::token_major, rows.max_sequence_tokens = 600, rows.pool_bytes = 80 * 4096;
  rows.vattention = {.page_group_bytes = 4096, .max_sequences = 8};
  const auto refusal = [](const char* scheme, const KvOptions& options, int tp, int pp) {
    const Result<PoolPlan> plan = plan_ranks(scheme, options, {.n_layers = 3, .n_kv_heads = 2, .tp = tp, .pp = pp});
    return plan ? "" : plan.error().message;
  };
  CHECK(refusal("paged", paged, 2, 1) == "");
  CHECK_THAT(refusal("paged", paged, 4, 1), Contains("too small for 4 ranks"));
  // Two stages have 1 and 2 layers, so a page group holds twice as many tokens of one as of the other.
  CHECK(refusal("vattention", rows, 1, 3) == "");
  CHECK_THAT(refusal("vattention", rows, 1, 2), Contains("expected --kv-layout layer_major"));
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

TEST_CASE("add_copies: any box of heads, layers and tokens equals a copy row by row", "[allocator]") {
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
      if (i > 0)  // adjacent copies are joined
        REQUIRE_FALSE((copies[i - 1].source + copies[i - 1].bytes == copies[i].source &&
                       copies[i - 1].destination + copies[i - 1].bytes == copies[i].destination));
    }
    REQUIRE(planned == bytes);
    cpu_queue().copy(copies, true);
    REQUIRE(to.pool == expected.pool);
  }
}

}  // namespace xpyd::testing::kv_layout_test
