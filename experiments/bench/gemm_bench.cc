// GEMM and GEMV as shares of the FMA peak and of the read bandwidth. Weights rotate through more
// than 256 MiB for few rows, so that they come from memory as they do in a decode step.
#include <string>
#include <vector>

#include "experiments/bench/gemm_case.h"
#include "experiments/bench/harness.h"

namespace xpyd::experiments {
namespace {

void bench_gemm(Bench& bench) {
  struct Shape {
    int m, n, k, groups;
    Dtype dtype;
    Limit limit;
    double target;
  };
  constexpr int kN = 4096;
  const Shape shapes[] = {
      {512, kN, kN, 1, Dtype::f32, Limit::fma, 0.88},   {512, kN, kN, 1, Dtype::bf16, Limit::fma, 0.85},
      {512, kN, kN, 8, Dtype::f32, Limit::fma, 0.88},   {512, kN, kN, 8, Dtype::bf16, Limit::fma, 0.85},
      {64, kN, kN, 1, Dtype::bf16, Limit::roofline, 0}, {32, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},
      {16, kN, kN, 1, Dtype::bf16, Limit::roofline, 0}, {8, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},
      {8, kN, kN, 8, Dtype::bf16, Limit::roofline, 0},  {4, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},
      {4, kN, kN, 8, Dtype::bf16, Limit::roofline, 0},  {3, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},
      {2, kN, kN, 1, Dtype::bf16, Limit::roofline, 0},  {1, kN, kN, 1, Dtype::bf16, Limit::read, 0.95},
      {1, kN, kN, 8, Dtype::bf16, Limit::read, 0.95},   {1, 2048, 2048, 1, Dtype::bf16, Limit::read, 0},
      {1, kN, kN, 1, Dtype::f32, Limit::read, 0},       {1, kN, kN, 1, Dtype::f16, Limit::read, 0.9},
      {1, kN, kN, 1, Dtype::fp8, Limit::read, 0.9},     {1, kN, kN, 1, Dtype::int8, Limit::read, 0.9},
      {1, kN, kN, 1, Dtype::int4, Limit::read, 0.9},    {8, kN, kN, 1, Dtype::int8, Limit::roofline, 0},
      {8, kN, kN, 1, Dtype::int4, Limit::roofline, 0},  {512, kN, kN, 1, Dtype::f16, Limit::fma, 0},
      {512, kN, kN, 1, Dtype::fp8, Limit::fma, 0},      {512, kN, kN, 1, Dtype::int8, Limit::fma, 0},
      {512, kN, kN, 1, Dtype::int4, Limit::fma, 0},
  };
  for (const Shape& s : shapes) {
    ThreadTeam& largest = bench.team(bench.max_threads());
    GemmCase data(s.m, s.n, s.k, s.groups, s.dtype, s.m <= 64 ? size_t(256) << 20 : 0, largest);
    std::string name = std::string(dtype_name(s.dtype)) + " M=" + std::to_string(s.m) + " N=" + std::to_string(s.n) +
                       " K=" + std::to_string(s.k) + (s.groups > 1 ? " groups=" + std::to_string(s.groups) : "");
    std::vector<BenchCase> cases;
    for (int threads = 1; threads <= bench.max_threads();
         threads = threads == 1 && bench.max_threads() > 1 ? bench.max_threads() : threads + 1) {
      ThreadTeam& team = bench.team(threads);
      // The 0.95 of a GEMV is asked of all threads; one core alone does not saturate memory.
      bool counts = s.limit == Limit::fma || threads == bench.max_threads();
      cases.push_back({.name = name,
                       .n_threads = threads,
                       .run = [&data, &team] { data.run(team); },
                       .check = [&data, &team] { return data.check([&] { data.run(team); }); },
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
}  // namespace xpyd::experiments
