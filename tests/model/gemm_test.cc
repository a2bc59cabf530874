// Tests the matrix product: every element against the double reference, and the invariance of bits on which the parity
// of the whole project rests.
#include "model/gemm/gemm.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/model/gemm_rows.h"

namespace xpyd::testing::gemm_test {

// Returns the largest distance from the double reference as a share of its bound. An element takes a chain of at most
// ceil(k / groups) additions, log2(groups) of the tree, and one of the bias. Each rounds once with FMA and twice
// without. Integer products also round the values of a run by a half step of its largest value.
double worst_error(const Problem& p, const std::vector<float>& x, int m, int x_stride, bool with_bias,
                   const std::vector<float>& y, bool fused, double rounding, int activation_bits) {
  std::vector<float> expected(y.size());
  gemm_reference({.x = x.data(),
                  .y = expected.data(),
                  .w = &p.packed,
                  .bias = with_bias ? p.bias.data() : nullptr,
                  .m = m,
                  .x_stride = x_stride,
                  .y_stride = p.n},
                 p.w.data());
  const double chain = is_quantised(p.dtype) ? 2.0 * (p.k + 8)
                                             : ((p.k + p.groups - 1) / p.groups) * (fused ? 1.0 : 2.0);
  const double roundings = chain + std::ceil(std::log2(p.groups)) + (with_bias ? 1 : 0) + 1;
  double worst = 0;
  for (int r = 0; r < m; ++r)
    for (int n = 0; n < p.n; ++n) {
      double magnitude = with_bias ? std::abs(p.bias[size_t(n)]) : 0, rounded = 0;
      const int longest = activation_bits == 8 ? 32 : p.k;
      for (const PackedMatrix::Piece& piece : p.packed.pieces)
        for (int begin = piece.k.begin, end; begin < piece.k.end; begin = end) {
          end = std::min(begin + longest, piece.k.end);
          double largest = 0, weights = 0;
          for (int place = begin; place < end; ++place) {
            const size_t k = p.packed.order.empty() ? size_t(place) : size_t(p.packed.order[size_t(place)]);
            const double factor = std::abs(x[size_t(r) * size_t(x_stride) + k]);
            const double weight = std::abs(p.w[size_t(n) * size_t(p.k) + k]);
            magnitude += factor * weight, weights += weight;
            largest = std::max(largest, factor);
          }
          if (activation_bits < 32) rounded += 1.001 / (std::exp2(activation_bits) - 2) * largest * weights;
        }
      double bound = (roundings * 0x1p-24 + rounding) * magnitude + rounded + std::numeric_limits<float>::min();
      size_t i = size_t(r) * size_t(p.n) + size_t(n);
      double error = std::abs(double(y[i]) - double(expected[i]));
      if (!(error <= bound)) return error / bound;  // also if it is NaN
      worst = std::max(worst, error / bound);
    }
  return worst;
}

bool same_bits(const std::vector<float>& a, const float* b, size_t n) {
  return std::memcmp(a.data(), b, n * sizeof(float)) == 0;
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kInstrumented = true;
#else
constexpr bool kInstrumented = false;
#endif

// The kind of a matrix.
struct Form {
  Dtype dtype;
  bool in_order = true;
  Problem make(int n, int k, int groups, ThreadTeam& team, uint64_t seed = 1) const {
    return make_problem(n, k, groups, dtype, team, seed, in_order ? even_groups(k, 32) : scattered(k, 128));
  }
};
const Form kForms[] = {{Dtype::f32},  {Dtype::bf16},        {Dtype::f16}, {Dtype::int8},      {Dtype::int8, false},
                       {Dtype::int4}, {Dtype::int4, false}, {Dtype::fp8}, {Dtype::fp8, false}};

TEST_GEMM_ROWS(agrees, "gemm agrees with the double reference at every element", "[gemm][model]") {
  struct Shape {
    int m, n, k;
  };
  const Shape shapes[] = {{1, 1, 1},     {1, 16, 64},   {2, 17, 3},    {3, 15, 5},    {4, 64, 64},
                          {5, 33, 129},  {6, 48, 255},  {7, 172, 64},  {8, 31, 300},  {9, 64, 172},
                          {16, 80, 513}, {17, 5, 1000}, {40, 24, 1024}, {50, 100, 77}, {64, 40, 520}, {300, 24, 272}};
  ThreadTeam team(2);
  for (const GemmVariant* variant : rows)
    for (Shape s : shapes)
      for (const auto& form : kForms)
        for (int groups : {1, 3, 8}) {
          const Dtype dtype = form.dtype;
          if (is_quantised(dtype) && (groups == 3 || s.m > 40)) continue;
          Problem p = form.make(s.n, s.k, groups, team);
          int stride = s.k + 5;
          auto x = random_rows(s.m, stride, 2);
          for (bool bias : {false, true}) {
            auto y = run(*variant, p, x, s.m, stride, bias, team);
            INFO(variant->name << " m=" << s.m << " n=" << s.n << " k=" << s.k << " " << dtype_name(dtype)
                               << " groups=" << groups << " bias=" << bias << " in order=" << form.in_order);
            bool fused = std::string(variant->name).starts_with("avx");
            // With bf16_dot, activations are off by up to 2^-8 of themselves, and sums and products are rounded
            // separately.
            const bool bf16_dot = dtype == Dtype::bf16 && rounds_bf16(*variant);
            const bool codes = dtype == Dtype::int8 || dtype == Dtype::int4;
            REQUIRE(worst_error(p, x, s.m, stride, bias, y, fused && !bf16_dot, bf16_dot ? 0x1.01p-8 : 0,
                                codes ? variant->activation_bits(dtype) : 32) <= 1);
          }
        }
}

TEST_GEMM_ROWS(invariant, "a row's bits do not depend on its batch, place or thread count", "[gemm][model]") {
  ThreadTeam one(1), two(2), three(3);
  const std::vector<std::pair<ThreadTeam*, size_t>> ways = {{&one, 5}, {&two, 0}, {&two, 5}, {&three, 0}, {&three, 5}};
  struct Shape {
    int n, k;
  };
  int turn = 0;
  for (const GemmVariant* variant : rows)
    for (Shape s : {Shape{200, 520}, Shape{50, 4099}, Shape{1000, 130}}) {
      if (kInstrumented && s.k != 520) continue;  // one shape takes long enough
      for (const auto& form : kForms)
        for (int groups : {1, 8}) {
          const Dtype dtype = form.dtype;
          if (is_quantised(dtype) && (groups == 1 || s.k != 520)) continue;
          Problem p = form.make(s.n, s.k, groups, one);
          constexpr int kRows = 300;
          auto x = random_rows(kRows, s.k, 3);
          std::vector<float> alone;  // the definition: row by row on one thread
          for (int r = 0; r < kRows; ++r) {
            auto y = run(*variant, p, x, 1, s.k, true, one, size_t(r));
            alone.insert(alone.end(), y.begin(), y.end());
          }
          std::vector<int> sizes;
          for (int m = 1; m <= 17; ++m) sizes.push_back(m);
          sizes.insert(sizes.end(), {47, 48, 64, 130, 265});
          for (int m : sizes) {
            // Each size and problem runs in one way, in turn. All problems together try every way of every size.
            const auto [team, first] = ways[size_t(turn++) % ways.size()];
            auto y = run(*variant, p, x, m, s.k, true, *team, first);
            INFO(variant->name << " m=" << m << " n=" << s.n << " k=" << s.k << " " << dtype_name(dtype)
                               << " groups=" << groups << " first=" << first << " threads=" << team->size());
            REQUIRE(same_bits(y, alone.data() + first * size_t(s.n), y.size()));
          }
        }
    }
}

// parts[0][i] = tree over parts[0..n_parts)[i] for i in [0, n). The other parts are overwritten.
static void tree_sum(float* const* parts, int n_parts, size_t n) {
  for (int step = 1; step < n_parts; step *= 2)
    for (int left = 0; left + step < n_parts; left += 2 * step)
      for (size_t i = 0; i < n; ++i) parts[left][i] += parts[left + step][i];
}

TEST_GEMM_ROWS(slices, "a slice of columns or of groups has the bits of the whole product", "[gemm][model]") {
  Random random(8);
  auto below = [&](int n) { return int(random.below(uint64_t(n))); };
  for (const GemmVariant* variant : rows)
    for (int round = 0; round < (kInstrumented ? 40 : 120); ++round) {
      const int n = 1 + below(150), k = 1 + below(round % 3 ? 90 : 5000);
      const int m = std::vector{1, 2, 5, 6, 7, 31, 70}[random.below(7)];
      ThreadTeam team(1 + round % 3);
      const Form& form = kForms[random.below(std::size(kForms))];
      Problem whole = form.make(n, k, 8, team, random.next());
      auto x = random_rows(m, k, random.next());
      auto expected = run(*variant, whole, x, m, k, true, team);
      GemmScratch scratch(m, whole.packed.stored({0, 8}), team.size());
      auto slice = [&](const float* from, const float* bias, Range columns, Range groups) {
        const int width = columns.end > 0 ? columns.end - columns.begin : n;
        std::vector<float> y(size_t(m) * size_t(width + 2), kSentinel);
        variant->run({.x = from,
                      .y = y.data(),
                      .w = &whole.packed,
                      .bias = bias,
                      .m = m,
                      .x_stride = k,
                      .y_stride = width + 2,
                      .columns = columns,
                      .groups = groups},
                     scratch, team);
        for (int r = 0; r < m; ++r)
          for (int c = width; c < width + 2; ++c) REQUIRE(y[size_t(r * (width + 2) + c)] == kSentinel);
        return y;
      };
      INFO(variant->name << " m=" << m << " n=" << n << " k=" << k << " " << dtype_name(form.dtype));
      const int begin = below(n), end = begin + 1 + below(n - begin);
      auto columns = slice(x.data(), whole.bias.data(), {begin, end}, {0, 0});
      for (int r = 0; r < m; ++r)
        REQUIRE(std::memcmp(columns.data() + r * (end - begin + 2), expected.data() + r * n + begin,
                            size_t(end - begin) * 4) == 0);
      // Each rank has one, two or four groups and reads its own columns of x.
      const int ranks = 1 << (1 + below(3)), each = 8 / ranks;
      std::vector<std::vector<float>> sums;
      std::vector<float*> parts;
      for (int rank = 0; rank < ranks; ++rank) {
        const Range groups{rank * each, (rank + 1) * each};
        sums.push_back(slice(x.data() + whole.packed.k_range(groups).begin, nullptr, {0, 0}, groups));
      }
      for (auto& s : sums) parts.push_back(s.data());
      tree_sum(parts.data(), ranks, sums[0].size());
      for (int r = 0; r < m; ++r)
        for (int c = 0; c < n; ++c)
          REQUIRE(sums[0][size_t(r * (n + 2) + c)] + whole.bias[size_t(c)] == expected[size_t(r * n + c)]);
    }
}

TEST_GEMM_ROWS(runs_itself, "the variant asked for is the variant that runs", "[gemm][model]") {
  // -(1 + 2^-7 + 2^-17) + (1 + 2^-17)(1 + 2^-7) is 2^-24 if the product is not rounded first, else 0.
  ThreadTeam team(1);
  const float a = 1 + 0x1p-17f, b = 1 + 0x1p-7f;
  const float rounded = a * b;
  for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    Problem p{.n = 16, .k = 2, .groups = 1, .dtype = dtype};
    p.packed = pack_matrix(
        16, 2, 1, dtype, [&](int, float* out) { out[0] = 1, out[1] = b; }, team);
    for (const GemmVariant* variant : rows) {
      if (dtype == Dtype::bf16 && rounds_bf16(*variant)) continue;
      auto y = run(*variant, p, {-rounded, a}, 1, 2, false, team);
      INFO(variant->name << " " << dtype_name(dtype));
      if (std::string(variant->name).starts_with("portable"))
        REQUIRE(y[3] == 0);
      else
        REQUIRE(std::abs(y[3]) == 0x1p-24f);
    }
  }
  REQUIRE(&default_gemm() == &best_row(gemm_variants()));
  REQUIRE((default_gemm().needs == Isa::portable) == !cpu_has(Isa::avx2));
  REQUIRE((default_gemm(true).exact() && default_gemm(true).needs <= default_gemm().needs));
}

TEST_GEMM_ROWS(has_avx2s_bits, "AVX-512 has the bits of AVX2", "[gemm][model]") {
  if (!cpu_has(Isa::avx2)) SKIP_TEST("this CPU has no AVX2");
  ThreadTeam team(2);
  const auto& table = gemm_variants();
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
    for (int groups : {1, 8})
      for (int m : {1, 2, 3, 5, 12, 13, 30, 280}) {
        const Problem p = make_problem(70, 700, groups, dtype, team);
        const auto x = random_rows(m, p.k, 5);
        const auto avx2 = std::find_if(table.begin(), table.end(),
                                       [](auto& v) { return v.needs == Isa::avx2 && v.exact(); });
        const auto expected = run(*avx2, p, x, m, p.k, true, team);
        for (const GemmVariant* variant : rows) {
          const bool wide = std::string(variant->name).starts_with("avx512");
          if (!wide || (dtype == Dtype::bf16 && rounds_bf16(*variant))) continue;
          CAPTURE(variant->name, dtype_name(dtype), groups, m);
          REQUIRE(same_bits(run(*variant, p, x, m, p.k, true, team), expected.data(), expected.size()));
        }
      }
}

}  // namespace xpyd::testing::gemm_test
