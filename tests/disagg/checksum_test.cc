#include <algorithm>

#include "base/memory.h"
#include "base/random.h"
#include "disagg/transfer_plan.h"
#include "tests/catch.h"

namespace xpyd::testing::checksum_test {
namespace {

TEST_CASE("checksums of KV do not depend on its layout, and see every bit", "[disagg]") {
  const KvShape shape{.n_layers = 3, .n_kv_heads = 2, .head_dim = 8, .dtype = Dtype::bf16};
  constexpr int kTokens = 150, kGrain = kChecksumTokens;
  const KvShards one{.n_layers = 3, .n_kv_heads = 2};
  Random random(4);
  std::vector<uint64_t> expected;
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major}) {
    for (int block_tokens : {1, 7, 16, 64}) {
      const int blocks = (kTokens + block_tokens - 1) / block_tokens;
      const KvLayout layout{shape, order, block_tokens, blocks + 3};
      Buffer pool(layout.pool_bytes());
      for (size_t i = 0; i < pool.size(); ++i) pool.data()[i] = std::byte(random.next());
      std::vector<int32_t> table;
      for (int i = 0; i < blocks; ++i) table.push_back(i + 2);
      for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random.below(i)]);
      const KvView view{pool.data(), &layout, table.data()};
      for (int layer = 0; layer < 3; ++layer)
        for (int kv = 0; kv < 2; ++kv)
          for (int token = 0; token < kTokens; ++token)
            for (int head = 0; head < 2; ++head)
              for (size_t i = 0; i < shape.row_bytes(); ++i)
                view.row(layer, kv, token, head)[i] = std::byte(layer * 89 + kv * 57 + token * 31 + head * 17 + int(i));
      const std::vector<uint64_t> sums = kv_checksums({&view, 1}, one, 0, kTokens);
      REQUIRE(sums.size() == 3);
      if (expected.empty()) expected = sums;
      CHECK(sums == expected);
      CHECK(kv_checksums({&view, 1}, one, 0, kGrain) == std::vector<uint64_t>{expected[0]});
      CHECK(kv_checksums({&view, 1}, one, 0, 0).empty());
      for (int round = 0; round < 50; ++round) {
        const int token = int(random.below(kTokens));
        std::byte& byte = view.row(int(random.below(3)), int(random.below(2)), token,
                                   int(random.below(2)))[random.below(shape.row_bytes())];
        const std::byte before = byte;
        byte ^= std::byte(1u << random.below(8));
        const std::vector<uint64_t> changed = kv_checksums({&view, 1}, one, 0, kTokens);
        for (int block = 0; block < 3; ++block)
          CHECK((changed[size_t(block)] == expected[size_t(block)]) == (block != token / kGrain));
        byte = before;
      }
    }
  }
}

}  // namespace
}  // namespace xpyd::testing::checksum_test
