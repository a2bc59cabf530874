// The row operations, one case for each instruction set that this CPU has, beside the next older one. Rows are those of
// a 1-billion-parameter Llama and lie in the caches, as in a step.
//
// Expected: SwiGLU and exp are bound by arithmetic, with 20 and 25 instructions per vector. Two 256-bit pipes execute
// two instructions a cycle, so 8 lanes take about 12 cycles. 16 lanes take as long if the pipes are 512 bits wide
// (twice the speed). They take twice as long if the pipes split a 512-bit vector in halves (Zen 4: the speed of AVX2,
// with fewer instructions to decode). Norm, RoPE and sums load as much as they compute: between once and twice the
// speed.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "experiments/bench/harness.h"
#include "model/gemm/ops.h"

namespace xpyd::experiments {
namespace {

using model::Ops;

void bench_ops(Bench& bench) {
  constexpr int kHidden = 2048, kInner = 8192, kVocabulary = 128'256, kHead = 64;
  std::vector<float> x(kVocabulary), y(kVocabulary), out(kVocabulary), other(kVocabulary);
  Random random(1);
  for (std::vector<float>* v : {&x, &y})
    for (float& f : *v) f = float(random.uniform() * 8 - 4);
  const Ops& portable = model::ops_variants().back();
  struct Case {
    const char* name;
    int n;
    void (*run)(const Ops& ops, const float* x, const float* y, int n, float* out);
  };
  constexpr Case kCases[] = {
      {"rms_norm", kHidden, [](const Ops& o, auto* a, auto* b, int n, float* to) { o.rms_norm(a, b, 1e-5, n, to); }},
      {"add", kHidden, [](const Ops& o, auto* a, auto*, int n, float* to) { o.add(a, n, to); }},
      {"rope", kHead, [](const Ops& o, auto* a, auto* b, int n, float* to) { o.rope(a, b, b + n, n, to); }},
      {"swiglu", kInner, [](const Ops& o, auto* a, auto* b, int n, float* to) { o.swiglu(a, b, n, to); }},
      {"exp", kVocabulary, [](const Ops& o, auto* a, auto*, int n, float* to) { o.exp(a, 4, 1, n, to); }},
      {"peak", kVocabulary, [](const Ops& o, auto* a, auto*, int n, float* to) { to[0] = o.peak(a, n).value; }},
      {"sum", kVocabulary, [](const Ops& o, auto* a, auto*, int n, float* to) { to[0] = float(o.sum(a, n)); }},
  };
  for (const Case& c : kCases) {
    std::vector<BenchCase> cases;
    for (const Ops& ops : model::ops_variants()) {
      if (!ops.available()) continue;
      const std::string name = c.name + std::string(" of ") + std::to_string(c.n) + ", " + ops.name;
      cases.push_back({.name = name,
                       .run = [&, row = &ops] { c.run(*row, x.data(), y.data(), c.n, out.data()); },
                       .check =
                           [&, row = &ops] {
                             for (const auto& [by, to] : {std::pair(row, &out), std::pair(&portable, &other)}) {
                               std::fill(to->begin(), to->end(), 0.0f);
                               c.run(*by, x.data(), y.data(), c.n, to->data());
                             }
                             for (size_t i = 0; i < out.size(); ++i)
                               if (!(std::abs(out[i] - other[i]) <= 1e-5f * (1 + std::abs(other[i]))))
                                 return "element " + std::to_string(i);
                             return std::string();
                           },
                       .limit = Limit::none});
    }
    // Each case stands beside the next one, because the table has the best first.
    for (size_t i = 0; i + 1 < cases.size(); ++i) cases[i].versus = {cases[i + 1].name};
    bench.measure(cases);
  }
}

REGISTER_BENCH("ops", bench_ops);

}  // namespace
}  // namespace xpyd::experiments
