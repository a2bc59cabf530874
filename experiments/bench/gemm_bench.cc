// GEMM and GEMV as shares of the FMA peak and of the read bandwidth. Weights rotate through more
// than 256 MiB for few rows, so that they come from memory as they do in a decode step.
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "base/bench.h"
#include "base/random.h"
#include "model/gemm.h"

namespace xpyd {
namespace {

struct GemmCase {
  GemmCase(int m_, int n_, int k_, int groups_, Dtype dtype, size_t footprint, ThreadTeam& team)
      : m(m_), n(n_), k(k_), scratch(m_, k_, team.size()) {
    size_t copies =
        std::max<size_t>(1, footprint / (size_t(n) * size_t(k) * dtype_bytes(dtype)) + 1);
    for (size_t c = 0; c < copies; ++c)
      weights.push_back(pack_matrix(
          n, k, groups_, dtype, [&](int row, float* out) { weight_row(int(c), row, out); }, team));
    Random random(7);
    x.resize(size_t(m) * size_t(k));
    for (float& v : x) v = float(random.uniform() * 2 - 1);
    y.resize(size_t(m) * size_t(n) + 16);
    y0 = y.data();
    while (reinterpret_cast<uintptr_t>(y0) % 64) ++y0;
  }

  // Exact in bf16, so that one oracle serves both dtypes; cheap, as a row is made several times.
  void weight_row(int copy, int row, float* out) const {
    uint32_t state = uint32_t(row) * 2654435761u + uint32_t(copy) * 40503u + 1;
    for (int i = 0; i < k; ++i) {
      state = state * 1664525u + 1013904223u;
      out[i] = float(int(state >> 24) - 128) / 128;
    }
  }

  GemmArgs args(size_t copy) {
    return {.x = x.data(),
            .y = y0,
            .w = &weights[copy],
            .bias = nullptr,
            .m = m,
            .x_stride = k,
            .y_stride = n};
  }
  void run(ThreadTeam& team) {
    default_gemm().run(args(turn), scratch, team);
    turn = (turn + 1) % weights.size();
  }
  // Some columns of every row against double, within the bound of a chain of k roundings.
  std::string check(ThreadTeam& team) {
    std::fill(y.begin(), y.end(), NAN);
    turn = 0;
    run(team);
    turn = 0;
    std::vector<float> w(static_cast<size_t>(k));
    for (int column = 0; column < n; column += column < 32 || column > n - 18 ? 1 : 61) {
      weight_row(0, column, w.data());
      for (int r = 0; r<m; r += m> 64 && r % 6 == 5 ? 7 : 1) {
        double sum = 0, magnitude = 0;
        for (int i = 0; i < k; ++i) {
          double product = double(x[size_t(r) * size_t(k) + size_t(i)]) * double(w[size_t(i)]);
          sum += product, magnitude += std::abs(product);
        }
        double got = y0[size_t(r) * size_t(n) + size_t(column)];
        if (!(std::abs(got - sum) <= (k + 8) * 0x1p-24 * magnitude))
          return "row " + std::to_string(r) + " column " + std::to_string(column) + " is " +
                 std::to_string(got) + ", expected " + std::to_string(sum);
      }
    }
    return "";
  }

  int m, n, k;
  std::vector<PackedMatrix> weights;
  std::vector<float> x, y;
  float* y0;
  GemmScratch scratch;
  size_t turn = 0;
};

void bench_gemm(Bench& bench) {
  struct Shape {
    int m, n, k, groups;
    Dtype dtype;
    Limit limit;
    double target;
  };
  constexpr int kN = 4096;
  const Shape shapes[] = {
      {512, kN, kN, 1, Dtype::f32, Limit::fma, 0.88},
      {512, kN, kN, 1, Dtype::bf16, Limit::fma, 0.85},
      {512, kN, kN, 8, Dtype::f32, Limit::fma, 0.88},
      {512, kN, kN, 8, Dtype::bf16, Limit::fma, 0.85},
      {64, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},
      {32, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},
      {16, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},
      {8, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},
      {8, kN, kN, 8, Dtype::bf16, Limit::roofline, 0},
      {4, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},
      {4, kN, kN, 8, Dtype::bf16, Limit::roofline, 0},
      {3, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},
      {2, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},
      {1, kN, kN, 1, Dtype::bf16, Limit::read, 0.95},
      {1, kN, kN, 8, Dtype::bf16, Limit::read, 0.95},
      {1, 2048, 2048, 1, Dtype::bf16, Limit::read, 0},
      {1, kN, kN, 1, Dtype::f32, Limit::read, 0},
  };
  for (const Shape& s : shapes) {
    ThreadTeam& largest = bench.team(bench.max_threads());
    GemmCase data(s.m, s.n, s.k, s.groups, s.dtype, s.m <= 64 ? size_t(256) << 20 : 0, largest);
    std::string name = std::string(dtype_name(s.dtype)) + " M=" + std::to_string(s.m) +
                       " N=" + std::to_string(s.n) + " K=" + std::to_string(s.k) +
                       (s.groups > 1 ? " groups=" + std::to_string(s.groups) : "");
    std::vector<BenchCase> cases;
    for (int threads = 1; threads <= bench.max_threads();
         threads = threads == 1 && bench.max_threads() > 1 ? bench.max_threads() : threads + 1) {
      ThreadTeam& team = bench.team(threads);
      // The 0.95 of a GEMV is asked of all threads; one core alone does not saturate memory.
      bool counts = s.limit == Limit::fma || threads == bench.max_threads();
      cases.push_back({.name = name,
                       .n_threads = threads,
                       .run = [&data, &team] { data.run(team); },
                       .check = [&data, &team] { return data.check(team); },
                       .work = work(data.args(0)),
                       .limit = s.limit,
                       .target = counts ? s.target : 0,
                       .versus = {}});
    }
    bench.measure(cases);
  }
}

REGISTER_BENCH("gemm", bench_gemm);

}  // namespace
}  // namespace xpyd
