#include "disagg/transfer_plan.h"

#include <cstring>

#include "base/memory.h"
#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing::transfer_plan_test {
namespace {

struct Side {
  KvLayout layout;
  Buffer pool;
  std::vector<int32_t> table;
  Side(KvShape shape, KvOrder order, int block_tokens, int tokens, bool contiguous, Random& random) {
    int blocks = (tokens + block_tokens - 1) / block_tokens;
    layout = {shape, order, block_tokens, blocks + 2};
    pool = Buffer(layout.pool_bytes());
    for (int i = 0; i < blocks; ++i) table.push_back(i + 1);
    for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random.below(i)]);
    contiguous_ = contiguous;
  }
  KvView view() const {
    return {pool.data(), &layout, contiguous_ ? nullptr : table.data(), contiguous_ ? table[0] : 0};
  }
  bool contiguous_;
};

TEST_CASE("a plan moves every byte of the region and no other", "[disagg]") {
  Random random(11);
  KvShape shape{.n_layers = 3, .n_kv_heads = 2, .head_dim = 4, .dtype = Dtype::f32};
  constexpr int kTokens = 37;
  for (int round = 0; round < 400; ++round) {
    auto side = [&] {
      bool contiguous = random.below(3) == 0;
      int block = contiguous ? 64 : int(std::vector{1, 4, 16, 64}[random.below(4)]);
      return Side(shape, random.below(2) ? KvOrder::layer_major : KvOrder::token_major, block, kTokens, contiguous,
                  random);
    };
    Side source = side(), destination = side();
    auto bytes = reinterpret_cast<uint32_t*>(source.pool.data());
    for (size_t i = 0; i < source.pool.size() / 4; ++i) bytes[i] = uint32_t(random.next()) | 1;
    KvRegion region;
    region.token_begin = int(random.below(kTokens));
    region.token_end = region.token_begin + 1 + int(random.below(uint64_t(kTokens - region.token_begin)));
    region.layer_begin = int(random.below(3));
    region.layer_end = region.layer_begin + 1 + int(random.below(uint64_t(3 - region.layer_begin)));
    TransferPlan plan;
    plan_transfer(source.view(), destination.view(), region, plan);
    size_t planned = 0;
    for (const Copy& copy : plan.copies) {
      std::memcpy(copy.destination, copy.source, copy.bytes);
      planned += copy.bytes;
    }
    size_t expected = size_t(region.token_end - region.token_begin) * size_t(region.layer_end - region.layer_begin) *
                      shape.token_bytes() / 3;
    REQUIRE(plan.bytes == expected);
    REQUIRE(planned == expected);
    size_t right = 0, touched = 0;
    for (int layer = 0; layer < 3; ++layer)
      for (int kv = 0; kv < 2; ++kv)
        for (int token = 0; token < kTokens; ++token)
          for (int head = 0; head < 2; ++head) {
            bool inside = token >= region.token_begin && token < region.token_end && layer >= region.layer_begin &&
                          layer < region.layer_end;
            const std::byte* got = destination.view().row(layer, kv, token, head);
            if (inside) right += std::memcmp(got, source.view().row(layer, kv, token, head), 16) == 0 ? 16 : 0;
          }
    for (size_t i = 0; i < destination.pool.size() / 4; ++i) touched += destination.pool.as<uint32_t>()[i] != 0 ? 4 : 0;
    REQUIRE(right == expected);
    REQUIRE(touched == expected);
  }
}

TEST_CASE("descriptors: 2 * layers * blocks for layer_major, blocks for token_major", "[disagg]") {
  Random random(2);
  KvShape shape{.n_layers = 5, .n_kv_heads = 2, .head_dim = 8, .dtype = Dtype::f32};
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major}) {
    Side source(shape, order, 16, 64, false, random), destination(shape, order, 16, 64, false, random);
    source.table = {1, 3, 5, 2};
    destination.table = {4, 2, 1, 3};  // no two blocks adjacent on both sides
    TransferPlan plan;
    plan_transfer(source.view(), destination.view(), {0, 64, 0, 5}, plan);
    CHECK(plan.copies.size() == (order == KvOrder::layer_major ? 2u * 5 * 4 : 4u));
  }
}

}  // namespace
}  // namespace xpyd::testing::transfer_plan_test
