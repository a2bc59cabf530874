#include "experiments/stats.h"

#include <vector>

#include "tests/catch.h"

namespace xpyd::testing::stats_test {

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

}  // namespace xpyd::testing::stats_test
