// GEMM and GEMV as shares of the FMA peak and of the read bandwidth. With few rows, weights rotate through more than
// 256 MiB, so they come from memory as in a decode step.
#include <string>
#include <vector>

#include "experiments/bench/gemm_case.h"
#include "experiments/bench/harness.h"

namespace xpyd::experiments {
namespace {

// Every row of the table that this CPU has, except the portable ones, beside the one that AVX2 has in its place (for int8
// and 8 bits this is one of 16).
void compare_rows(Bench& bench) {
  const int threads = bench.max_threads();
  ThreadTeam& team = bench.team(threads);
  constexpr int kN = 4096;
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::int8, Dtype::int4})
    for (int m : {512, 8, 1}) {
      GemmCase data(m, kN, kN, 1, dtype, m <= 64 ? size_t(256) << 20 : 0, team);
      std::vector<BenchCase> cases;
      for (const GemmVariant& row : gemm_variants()) {
        if (!row.available() || row.needs == Isa::portable) continue;
        const auto name = [&](const std::string& variant) {
          return variant + " " + dtype_name(dtype) + " M=" + std::to_string(m);
        };
        cases.push_back({.name = name(row.name),
                         .n_threads = threads,
                         .run = [&, r = &row] { data.run(team, *r); },
                         .check =
                             [&, r = &row] {
                               return data.check([&] { data.run(team, *r); }, r->activation_bits(data.dtype));
                             },
                         .work = work(data.args(0)),
                         .limit = m > 1 ? Limit::fma : Limit::read});
        const char* avx2 = row.exact() ? "avx2" : row.with_int4 == 8 ? "avx2_dot8" : "avx2_dot";
        if (row.needs > Isa::avx2) cases.back().versus = {name(avx2)};
      }
      bench.measure(cases);
    }
}

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
    // Products of bf16 as it is are bounded by a peak of their own.
    const bool dot = s.dtype == Dtype::bf16 && s.limit == Limit::fma && default_gemm().needs == Isa::avx512_bf16;
    std::vector<BenchCase> cases;
    for (int threads = 1; threads <= bench.max_threads();
         threads = threads == 1 && bench.max_threads() > 1 ? bench.max_threads() : threads + 1) {
      ThreadTeam& team = bench.team(threads);
      // The target of 0.95 for a GEMV holds for all threads, because one core does not saturate memory.
      bool counts = s.limit == Limit::fma || threads == bench.max_threads();
      cases.push_back(
          {.name = name,
           .n_threads = threads,
           .run = [&data, &team] { data.run(team); },
           .check =
               [&data, &team] {
                 return data.check([&] { data.run(team); }, default_gemm().activation_bits(data.dtype));
               },
           .work = work(data.args(0)),
           .limit = dot ? Limit::bf16_dot : s.limit,
           .target = counts ? s.target : 0,
           .versus = {}});
    }
    bench.measure(cases);
  }
  compare_rows(bench);
}

REGISTER_BENCH("gemm", bench_gemm);

}  // namespace
}  // namespace xpyd::experiments
