// A percentile that its sample cannot carry is not written: 20 requests had a P99.
#include <numeric>

#include "experiments/values.h"
#include "tests/catch.h"

namespace xpyd::testing::evidence_test {

TEST_CASE("issues: a P99 of 20 requests, or of 1,999, is none", "[issues][experiments][evidence]") {
  for (auto [n, p, there] : {std::tuple{20, 99., false},
                             {1999, 99., false},
                             {2000, 99., true},
                             {199, 90., false},
                             {200, 90., true},
                             {200, 10., true},
                             {39, 50., false},
                             {40, 50., true},
                             {0, 50., false}}) {
    std::vector<double> sample(static_cast<size_t>(n));
    std::iota(sample.begin(), sample.end(), 0);
    const Value value = percentile_seen(sample, p);
    INFO(n << " samples, P" << p);
    CHECK(value.is_number() == there);
    if (!there)
      CHECK(std::string(value).empty());
    else
      CHECK(double(value) == Approx(p / 100 * (n - 1)));
  }
}

}  // namespace xpyd::testing::evidence_test
