#include "allocator/kv_layout.h"

#include <algorithm>
#include <string>
#include <vector>

#include "allocator/kv_plan.h"
#include "tests/catch.h"

namespace xpyd::testing::kv_layout_test {

namespace {

constexpr KvShape kSmall{.n_layers = 2, .n_kv_heads = 3, .head_dim = 4, .dtype = Dtype::bf16};

// Addresses are constants where their arguments are.
constexpr KvLayout kLayerMajor{kSmall, KvOrder::layer_major, 4, 5};
constexpr KvLayout kTokenMajor{kSmall, KvOrder::token_major, 4, 5};
static_assert(kSmall.row_bytes() == 8 && kSmall.token_bytes() == 2 * 2 * 3 * 8);
static_assert(kLayerMajor.offset(0, 0, 0, 0, 0) == 0);
static_assert(kLayerMajor.offset(4, 1, 1, 3, 2) == kLayerMajor.pool_bytes() - kSmall.row_bytes());
static_assert(kTokenMajor.offset(4, 1, 1, 3, 2) == kTokenMajor.pool_bytes() - kSmall.row_bytes());
static_assert(kTokenMajor.offset(1, 0, 0, 0, 0) == kTokenMajor.block_bytes());
static_assert(kLayerMajor.offset(1, 0, 0, 0, 0) == 4 * 3 * 8);

}  // namespace

TEST_CASE("KvLayout: offsets are a bijection onto the pool, in both orders", "[allocator]") {
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
                    // Heads of one token lie together.
                    if (head > 0) wrong += at - l.offset(b, layer, kv, t, 0) != l.shape.row_bytes();
                  }
          REQUIRE(wrong == 0);
          REQUIRE(std::count(covered.begin(), covered.end(), 1) == ptrdiff_t(covered.size()));
        }
}

TEST_CASE("KvView: a table and a slot name the same rows", "[allocator]") {
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major}) {
    KvLayout l{kSmall, order, 4, 6};
    std::vector<std::byte> pool(l.pool_bytes());
    int32_t table[] = {5, 0, 3};
    KvView paged{pool.data(), &l, table, 0};
    CHECK_FALSE(paged.contiguous());
    for (int t = 0; t < 12; ++t) REQUIRE(paged.row(1, 1, t, 2) == pool.data() + l.offset(table[t / 4], 1, 1, t % 4, 2));
    KvView slot{pool.data(), &l, nullptr, 3};
    CHECK(slot.contiguous());
    for (int t = 0; t < 4; ++t) REQUIRE(slot.row(0, 1, t, 1) == paged.row(0, 1, 8 + t, 1));
  }
}

TEST_CASE("plan_pool: the layout, or what is wrong with the options", "[allocator]") {
  KvOptions o{.shape = kSmall, .pool_bytes = 10'000, .block_tokens = 16, .max_sequence_tokens = 40};
  Result<KvLayout> paged = plan_pool("paged", o);
  REQUIRE(paged.ok());
  CHECK(paged.value().n_blocks == int(10'000 / (16 * kSmall.token_bytes())));
  CHECK(paged.value().block_tokens == 16);
  CHECK(plan_pool("contiguous", o).value().block_tokens == 40);

  CHECK(plan_pool("paged", {.shape = kSmall, .pool_bytes = 1536}).value().n_blocks == 1);

  // Matchers have other names in Catch2 v3: a plain search.
  auto check = [&](const char* scheme, auto change, const char* part) {
    KvOptions changed = o;
    change(changed);
    Result<KvLayout> plan = plan_pool(scheme, changed);
    REQUIRE_FALSE(plan.ok());
    CHECK(plan.error().code == ErrorCode::invalid_argument);
    INFO(plan.error().message << " should say " << part);
    CHECK(plan.error().message.find(part) != std::string::npos);
  };
  auto as_is = [](KvOptions&) {};
  check("slabs", as_is, "\"slabs\"");
  check("slabs", as_is, "contiguous, paged");
  check(
      "paged", [](auto& c) { c.pool_bytes = 1535; }, "is 1535");
  check(
      "paged", [](auto& c) { c.pool_bytes = 1535; }, "16 tokens need 1536 bytes");
  check(
      "contiguous", [](auto& c) { c.pool_bytes = 0; }, "slot");
  check(
      "paged", [](auto& c) { c.block_tokens = 0; }, "tokens per block is 0");
  check(
      "contiguous", [](auto& c) { c.max_sequence_tokens = -1; }, "tokens per slot is -1");
  check(
      "paged", [](auto& c) { c.shape.n_kv_heads = 0; }, "kv heads is 0");
  check(
      "paged", [](auto& c) { c.shape.dtype = Dtype::f16; }, "f16");
  check(
      "paged", [](auto& c) { c.shape.n_layers = c.shape.head_dim = c.block_tokens = INT32_MAX; }, "64-bit");
  check(
      "paged", [](auto& c) { c.pool_bytes = size_t(1) << 60; }, "2^31");
}

TEST_CASE("KvRows: the rows of KvView, for every block size, order and head", "[allocator]") {
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
    for (int block_tokens : {1, 2, 3, 16, 24, 64}) {
      KvLayout l{{3, 2, 5, Dtype::bf16}, order, block_tokens, 6};
      std::vector<std::byte> pool(l.pool_bytes());
      const int32_t table[] = {5, 0, 3}, slot[] = {4};
      KvView paged{pool.data(), &l, table, 0}, contiguous{pool.data(), &l, nullptr, slot[0]};
      for (int layer : {0, 2}) {
        KvRows blocks = l.rows(layer, false), whole = l.rows(layer, true);
        for (int kv : {0, 1})
          for (int head : {0, 1}) {
            auto row = [&](const KvView& view, int t) {
              return size_t(view.row(layer, kv, t, head) - pool.data()) / l.shape.row_bytes();
            };
            for (int t = 0; t < 3 * block_tokens; ++t) REQUIRE(blocks.row(table, kv, t, head) == row(paged, t));
            for (int t = 0; t < block_tokens; ++t) REQUIRE(whole.row(slot, kv, t, head) == row(contiguous, t));
          }
      }
    }
}

}  // namespace xpyd::testing::kv_layout_test
