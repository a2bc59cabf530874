#include "base/row_hash.h"

#include <bit>
#include <vector>

#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing::row_hash_test {

TEST_CASE("row hash: a sum over pairs sees every bit, place and length", "[base]") {
  Random random(3);
  for (size_t n : {size_t{1}, size_t{2}, size_t{3}, size_t{64}, size_t{513}}) {
    std::vector<float> row(n);
    for (float& x : row) x = float(random.uniform());
    const uint64_t hash = row_hash(row.data(), n);
    uint64_t backwards = 0;
    for (size_t i = n_row_hash_terms(n); i-- > 0;) backwards += row_hash_term(row.data(), n, i);
    CHECK(backwards == hash);
    for (size_t i = 0; i < n; ++i)
      for (uint32_t bit : {0u, 17u, 31u}) {
        std::vector<float> other = row;
        other[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(row[i]) ^ 1u << bit);
        CHECK(row_hash(other.data(), n) != hash);
      }
    for (size_t i = 1; i < n; ++i) {
      std::vector<float> other = row;
      std::swap(other[i - 1], other[i]);
      CHECK(row_hash(other.data(), n) != hash);
    }
    row.resize(n + 2);
    CHECK(row_hash(row.data(), n + 2) != hash);
  }
  const float zeros[] = {0.0f, -0.0f}, nans[] = {std::nanf("1"), std::nanf("2")};
  CHECK(row_hash(zeros, 1) != row_hash(zeros + 1, 1));
  CHECK(row_hash(nans, 1) != row_hash(nans + 1, 1));
}

TEST_CASE("row hash: a value is the same on every machine, and the chain keeps the order", "[base]") {
  const float row[] = {1, -2, 0.5f};
  CHECK(row_hash(row, 3) == 0x73e15b0e2a9344d4u);
  CHECK(chain_hash(chain_hash(0, 1), 2) != chain_hash(chain_hash(0, 2), 1));
  CHECK(chain_hash(0, 0) != 0);
}

}  // namespace xpyd::testing::row_hash_test
