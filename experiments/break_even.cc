// break_even: at what bandwidth is it faster to fetch the KV of a prefix than to compute it again?
//
// No measurement: model/cost_model.h, whose FLOPs a test compares with those that the model counts.
// Two cost models of Llama-3-70B side by side: Mooncake's own constants (equation 2, a = 4, b = 22)
// and the model's real widths with causal attention (25.5 d^2 a token and layer, and half of a).
//
// Arithmetic, p = 8192: 8192 * 327,680 B / (80 (4 * 8192^2 * 8192 + 22 * 8192 * 8192^2) / (8 * 312e12)) = 2.68 GB /
// 0.458 s = 5.86 GB/s on 8 x A800, and 989 / 312 times that, 18.6, on 8 x H800; 220 / 312 of it, 4.13 GB/s or 33 Gb/s,
// where an A100 reaches the 220 TFLOP/s of the author's notes: his 100 Gb/s bring KV 3 times as fast as it is computed,
// and the longer the prefix, the more. `xpyd info DIR --break-even 1760` is the same of any model. With the real widths
// the prefix costs 80 (2 * 8192 + 25.5 * 8192) / (4 * 8192 + 22 * 8192) = 1.06 times as much, and 0.52 times at 1M
// tokens.
#include "experiments/experiment.h"
#include "experiments/mooncake_cost.h"
#include "model/cost_model.h"

namespace xpyd::experiments::break_even_experiment {
namespace {

struct Machine {
  const char* name;
  double flops_per_s;
};
// Dense bf16 on paper, as Mooncake uses it; and the share of it at which a replay of its trace comes near its TTFTs.
// The last: Mooncake's author's notes, what an A100 reaches.
constexpr Machine kMachines[] = {{"8xA800", 8 * 312e12},
                                 {"8xH800", 8 * 989e12},
                                 {"8xA800 at 44 %", 0.44 * 8 * 312e12},
                                 {"8xA100 at 220", 8 * 220e12}};

CostModel llama_70b() {
  CostModel cost;
  ModelConfig& c = cost.config;
  c.n_layers = 80;
  c.hidden = 8192;
  c.intermediate = 28672;
  c.n_heads = 64;
  c.n_kv_heads = 8;
  c.head_dim = 128;
  c.vocab = 128256;
  return cost;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const Machine& m : kMachines)
    for (int prefix = 256; prefix <= 1 << 20; prefix *= 2) all.push_back({{"machine", m.name}, {"prefix", prefix}});
  return all;
}

Result<Finding> run(const Values& point) {
  const int prefix = point["prefix"];
  double flops_per_s = 0;
  for (const Machine& m : kMachines)
    if (point["machine"] == m.name) flops_per_s = m.flops_per_s;
  const CostModel real = llama_70b();
  const double bytes = prefix * real.kv_token_bytes();
  const double recompute = real.prefill(prefix, 0, false).flops / flops_per_s;
  return Finding{{{{"kv_gb", 1e-9 * bytes},
                   {"paper_recompute_s", kMooncakeLlama70b.flops(prefix) / flops_per_s},
                   {"paper_gbps", 1e-9 * kMooncakeLlama70b.break_even_bytes_per_s(prefix, flops_per_s)},
                   {"recompute_s", recompute},
                   {"gbps", 1e-9 * real.break_even_bytes_per_s(prefix, flops_per_s)},
                   {"fetch_at_100gbit_s", bytes / 12.5e9}}},
                 ""};
}

Measure open(const Setting&) { return run; }

REGISTER_EXPERIMENT("break_even", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::break_even_experiment
