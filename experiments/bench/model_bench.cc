// A whole step of a 1-billion-parameter Llama with random weights: decode at batch 1 with weights of every width,
// decode at batch 8, and a prefill of 512 tokens.
//
// Expected: decode reads every matrix once, 2.47 GB, which takes 75 ms at 33 GB/s. Norms, RoPE, SwiGLU and attention at
// 512 tokens of context (33 MB of KV) should take less than the 10 % that the target leaves. A prefill of 512 tokens is
// 2 * 0.97e9 * 512 = 1.0 TFLOP, less the rows of the last layer that need no logits (5 %): 5 s at 190 GFLOP/s.
#include <map>
#include <vector>

#include "experiments/bench/harness.h"
#include "experiments/bench/model_case.h"

namespace xpyd::experiments {
namespace {

constexpr int kContext = 512, kPrompt = 512, kMaxBatch = 8;

void measure_steps(Bench& bench, Dtype dtype) {
  const int all = bench.max_threads();
  const auto weights = llama_1b({.dtype = Dtype::bf16, .weight_dtype = dtype, .dummy = true}, bench.team(all));

  std::vector<int> teams = {1};
  if (all > 1) teams.push_back(all);
  std::map<int, ModelCase> steps;
  for (int n : teams) steps.try_emplace(n, weights, bench.team(n), kContext, kMaxBatch, kPrompt, Dtype::f32);

  struct Shape {
    const char* name;
    int batch, n, length;
    Limit limit;
    double target;
    bool one_thread_too;
  };
  const Shape shapes[] = {
      {"decode batch 1, 512 tokens of context", 1, 1, kContext, Limit::read, 0.9, true},
      {"decode batch 8, 512 tokens of context", 8, 1, kContext, Limit::roofline, 0, true},
      {"prefill 512 tokens", 1, kPrompt, kPrompt, Limit::fma, 0.75, false},
  };
  for (const Shape& s : shapes) {
    if (dtype != Dtype::bf16 && s.limit != Limit::read) continue;
    std::vector<BenchCase> cases;
    for (int n : teams) {
      if (n != all && !s.one_thread_too) continue;
      ModelCase& data = steps.at(n);
      data.set(s.batch, s.n, s.length);
      cases.push_back({.name = std::string("llama-1b ") + dtype_name(dtype) + ", " + s.name,
                       .n_threads = n,
                       .run = [&data] { data.run(); },
                       .check =
                           [&data, &s] {
                             std::string wrong = data.check();
                             data.set(s.batch, s.n, s.length);
                             return wrong;
                           },
                       .work = data.work(),
                       .limit = s.limit,
                       .target = n == all ? s.target : 0,
                       .versus = {}});
    }
    bench.measure(cases);
  }
}

void bench_model(Bench& bench) {
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::fp8, Dtype::int8, Dtype::int4})
    measure_steps(bench, dtype);
}

REGISTER_BENCH("model", bench_model);

}  // namespace
}  // namespace xpyd::experiments
