// Tests every variant of the row operations against double precision, at every length around the vector width.
#include "model/gemm/ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/random.h"
#include "tests/model/gemm_rows.h"

#if defined(__x86_64__)
namespace xpyd::model {
extern const Ops kAvx2Ops, kAvx512Ops_emulated;
}
#endif

namespace xpyd::testing::ops_test {

std::vector<float> random_row(int n, Random& random, double scale = 1) {
  std::vector<float> row(static_cast<size_t>(n));
  for (float& x : row) x = float((random.uniform() * 2 - 1) * scale);
  return row;
}

// The rows of the table that this CPU supports, best first.
std::vector<const Ops*> runnable() {
  std::vector<const Ops*> list;
  for (const Ops& ops : ops_variants())
    if (ops.available()) list.push_back(&ops);
  REQUIRE_FALSE(list.empty());
  CHECK(&default_ops() == list[0]);
  return list;
}
std::vector<const Ops*> emulated_ops() {
#if defined(__x86_64__)
  if (cpu_has(Isa::avx2)) return {&kAvx512Ops_emulated};
#endif
  return {};
}
#define TEST_OPS(function, name) TEST_ROWS(function, name, "[model][ops]", runnable, emulated_ops)

const std::vector<int> kLengths = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 172, 1000};

TEST_OPS(exp_is_near, "ops: exp is exact within two units in the last place over its whole range") {
  for (const Ops* ops : rows) {
    CAPTURE(ops->name);
    std::vector<float> x;
    for (double v = -87.3; v <= 88.0; v += 0.0037) x.push_back(float(v));
    std::vector<float> y(x.size());
    ops->exp(x.data(), 0, 1, int(x.size()), y.data());
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) worst = std::max(worst, std::fabs(double(y[i]) / std::exp(double(x[i])) - 1));
    CHECK(worst < 2 * 0x1p-23);

    const float inf = std::numeric_limits<float>::infinity();
    const float edges[] = {0, -inf, -1e30f, -87.4f, 1000, inf, NAN};
    float out[7];
    ops->exp(edges, 0, 1, 7, out);
    CHECK(out[0] == 1);
    CHECK((out[1] == 0 && out[2] == 0 && out[3] == 0));
    CHECK(out[4] == out[5]);
    CHECK(out[4] == Approx(std::exp(88.0)).epsilon(1e-6));
    CHECK(std::isnan(out[6]));
  }
}

TEST_OPS(every_length, "ops: every operation agrees with double precision at every length") {
  Random random(3);
  for (const Ops* ops : rows)
    for (int n : kLengths) {
      CAPTURE(ops->name, n);
      const size_t size = size_t(n);
      auto x = random_row(n, random, 3), w = random_row(n, random), up = random_row(n, random, 2);
      std::vector<float> out(size + 1, -7);
      double squares = 0;
      for (float v : x) squares += double(v) * v;
      const double scale = 1 / std::sqrt(squares / n + 1e-5);
      ops->rms_norm(x.data(), w.data(), 1e-5, n, out.data());
      for (size_t i = 0; i < size; ++i)
        REQUIRE(out[i] == Approx(x[i] * scale * w[i]).epsilon((4 + std::sqrt(n)) * 0x1p-24).margin(1e-30));
      CHECK(out[size] == -7);

      ops->swiglu(x.data(), up.data(), n, out.data());
      for (size_t i = 0; i < size; ++i)
        REQUIRE(out[i] == Approx(x[i] / (1 + std::exp(-double(x[i]))) * up[i]).epsilon(6 * 0x1p-24).margin(1e-30));
      CHECK(out[size] == -7);

      double total = 0, size_of_total = 0;
      float highest = x[0];
      for (float v : x) {
        total += v;
        size_of_total += std::fabs(v);
        highest = std::max(highest, v);
      }
      CHECK(ops->sum(x.data(), n) == Approx(total).margin(size_of_total * n * 0x1p-53));
      CHECK(ops->peak(x.data(), n).value == highest);
      CHECK(ops->peak(x.data(), n).nans == 0);
      for (int at : {0, n / 2, n - 1}) {
        auto spoiled = x;
        spoiled[size_t(at)] = NAN;
        CHECK(ops->peak(spoiled.data(), n).nans == 1);
        CHECK((ops->peak(spoiled.data(), n).value <= highest));
        spoiled[size_t(at)] = 1e30f;
        CHECK(ops->peak(spoiled.data(), n).value == 1e30f);
      }

      auto sum = x;
      ops->add(up.data(), n, sum.data());
      for (size_t i = 0; i < size; ++i) REQUIRE(sum[i] == x[i] + up[i]);

      if (n % 2 == 0) {
        auto angles = random_row(n / 2, random, 3);
        std::vector<float> cos(size / 2), sin(size / 2);
        for (size_t i = 0; i < size / 2; ++i) {
          cos[i] = std::cos(angles[i]);
          sin[i] = std::sin(angles[i]);
        }
        ops->rope(x.data(), cos.data(), sin.data(), n, out.data());
        for (size_t i = 0; i < size / 2; ++i) {
          const double a = x[i], b = x[i + size / 2], c = cos[i], s = sin[i];
          REQUIRE(out[i] == Approx(a * c - b * s).margin(3 * 0x1p-23));
          REQUIRE(out[i + size / 2] == Approx(b * c + a * s).margin(3 * 0x1p-23));
        }
        CHECK(out[size] == -7);
        auto in_place = x;
        ops->rope(in_place.data(), cos.data(), sin.data(), n, in_place.data());
        CHECK(std::memcmp(in_place.data(), out.data(), size * 4) == 0);
      }
    }
}

#if defined(__x86_64__)
TEST_OPS(sixteen_lanes, "ops: vectors of 16 lanes give the bits of 8") {
  if (!cpu_has(Isa::avx2)) SKIP_TEST("no AVX2 here");
  Random random(5);
  for (const Ops* ops : rows) {
    if (ops->name != std::string("avx512")) continue;
    for (int n = 2; n < 200; n += 2) {
      CAPTURE(n);
      auto x = random_row(n, random, 100), y = random_row(n, random, 3), z = random_row(n, random);
      for (float& v : x) v = std::ldexp(v, int(random.below(80)) - 75);  // so that sums in double are rounded, too
      for (float odd : {-0.0f, INFINITY, -INFINITY, NAN, 1e-40f, 3e38f}) {
        std::vector<float> out[2];
        int which = 0;
        for (const Ops* row : {&kAvx2Ops, ops}) {
          std::vector<float>& all = out[which++];
          all.assign(size_t(n) * 5 + 4, 0);
          float* to = all.data();
          row->rms_norm(x.data(), y.data(), 1e-5, n, to);
          row->swiglu(x.data(), y.data(), n, to += n);
          row->exp(x.data(), 0.5f, 0.9f, n, to += n);
          row->rope(x.data(), y.data(), z.data(), n, to += n);
          std::copy(x.begin(), x.end(), to += n);
          row->add(y.data(), n, to);
          const Largest peak = row->peak(x.data(), n);
          const double sum = row->sum(x.data(), n);
          to += n;
          to[0] = peak.value + 0.0f, to[1] = float(peak.nans);  // +0 and -0 both count as the largest
          if (!std::isnan(sum)) std::memcpy(to + 2, &sum, sizeof sum);
          for (float* f = all.data(); f < to; ++f)  // the bits of a NaN may differ
            if (std::isnan(*f)) *f = NAN;
        }
        REQUIRE(std::memcmp(out[0].data(), out[1].data(), out[0].size() * sizeof(float)) == 0);
        x[size_t(random.below(uint64_t(n)))] = odd;  // for the next round
      }
    }
  }
}
#endif

}  // namespace xpyd::testing::ops_test
