#include "base/stats.h"

#include <unistd.h>

#include <bit>
#include <vector>

#include "base/progress.h"
#include "base/random.h"
#include "base/row_hash.h"
#include "tests/catch.h"

namespace xpyd::testing::stats_test {
namespace {

TEST_CASE("stats: percentiles equal numpy's", "[stats]") {
  // Expected values: numpy.percentile([...], p) of numpy 2.4, default method.
  std::vector<double> five = {1, 2, 4, 8, 16};
  struct {
    double p, expected;
  } cases[] = {{0, 1},  {10, 1.4},  {25, 2},     {37.5, 3},      {50, 4},
               {75, 8}, {90, 12.8}, {99, 15.68}, {99.9, 15.968}, {100, 16}};
  for (auto [p, expected] : cases) CHECK(percentile(five, p) == Approx(expected).epsilon(1e-14));
  std::vector<double> two = {0.1, 0.7};
  CHECK(percentile(two, 30) == Approx(0.28).epsilon(1e-14));
  CHECK(percentile(std::vector<double>{3}, 99) == 3);
  CHECK(percentile({}, 50) == 0);
}

TEST_CASE("stats: a summary has numpy's mean, deviation and percentiles", "[stats]") {
  Summary s = summarize({8, 1, 16, 2, 4});
  CHECK(s.count == 5);
  CHECK(s.mean == Approx(6.2));
  CHECK(s.std == Approx(5.4552726787943415));  // numpy.std, ddof = 0
  CHECK(s.min == 1);
  CHECK(s.median == 4);
  CHECK(s.p90 == Approx(12.8));
  CHECK(s.p95 == Approx(14.4));
  CHECK(s.p99 == Approx(15.68));
  CHECK(s.max == 16);
  Summary none = summarize({});
  CHECK(none.count == 0);
  CHECK(none.mean == 0);
  CHECK(none.p99 == 0);
}

TEST_CASE("progress: nothing is written where there is no terminal", "[stats]") {
  int pipe_fds[2];
  REQUIRE(pipe(pipe_fds) == 0);
  VirtualClock clock;
  {
    Progress progress("bench", 10, clock, true, pipe_fds[1]);
    progress.update(5);
    clock.seconds = 1;
    progress.update(10, "done");
  }
  close(pipe_fds[1]);
  char byte;
  CHECK(read(pipe_fds[0], &byte, 1) == 0);  // closed and empty
  close(pipe_fds[0]);
}

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

}  // namespace
}  // namespace xpyd::testing::stats_test
