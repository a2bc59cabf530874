// disagg_orders: the orders in which P and D can share a request, and the policies that choose
// between them, over one engine and one trace: what they do to the first token, to the gap after
// it, to the gaps between tokens, and to the memory that KV occupies while it waits.
//
// The simulator (experiments/simulate/): 2P2D (or 4C) of Llama-3.1-8B, 100 Gb/s, layer by layer where P
// writes; 300 requests, prompts of 500 to 8,000 tokens (log-uniform, 2,700 on average), outputs of 100 to 500; `load`
// is a share of what two Ps can compute, 66,000 tokens/s; three traces. TTFT_P ends with the prompt's last step on P,
// TTFT with the client's first token; the gaps between tokens are those behind the first gap. GB s are the integral of
// the KV bytes held over time (Mooncake's VRAM occupation cost), per request.
//
// Arithmetic. A prompt of 2,700 takes P 82 ms and the wire 28, of which layer by layer 1 is
// exposed; D's step takes 8 to 10 ms, and what arrives waits for half of one. So prefill_first's
// first gap is 10 to 20 ms by push and 35 to 60 by pull; decode_first samples the first token on D:
// its TTFT has that much more and its first gap is one step. On D a sequence holds 2,700 to 3,000
// tokens, 0.37 GB, for 300 x 9 ms = 2.7 s; decode_first holds the prompt's blocks from before the
// queue on: 0.1 s more at low load (4 %), some tenths at 0.9. Pull holds P's blocks 30 to 50 ms
// longer than a prompt takes (82 ms, plus its tail): half as much again. conditional_threshold
// (Dynamo 0.1) computes on D what is short or finds two in the queue: each such chunk stops a
// decode step of 9 ms for up to 70.
#include <algorithm>
#include <cmath>

#include "base/random.h"
#include "base/stats.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::disagg_orders_experiment {
namespace {

using namespace disagg;

constexpr double kPrefillTokensPerS = 66000;  // of two Ps
constexpr int kDraws = 3;                     // traces: nothing else differs from run to run

struct Way {
  const char* name;
  const char* topology;
  const char* disagg;
  DisaggOptions options;
};

const std::vector<Way>& ways() {
  static const std::vector<Way> all = {{"push", "2P2D", "prefill_first", {}},
                                       {"pull", "2P2D", "prefill_first", {.pull = true}},
                                       {"decode_first", "2P2D", "decode_first", {}},
                                       {"threshold_0.1", "2P2D", "conditional_threshold", {}},
                                       {"threshold_1.x", "2P2D", "conditional_threshold", {.first_generation = false}},
                                       {"cost", "2P2D", "conditional_cost", {}},
                                       {"colocated", "4C", "prefill_first", {}}};
  return all;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const Way& way : ways())
    for (double load : {0.3, 0.6, 0.9})
      for (int draw = 0; draw < kDraws; ++draw) all.push_back({{"way", way.name}, {"load", load}, {"sample", draw}});
  return all;
}

Trace trace_of(int n, double load, int draw, const Setting& setting) {
  Random random(setting.seed + 5 + 1000 * uint64_t(draw));
  Trace trace{.block_tokens = 16};
  double sum = 0;
  const double most = setting.tiny ? 1000 : 8000, most_output = setting.tiny ? 40 : 500;
  std::vector<double> gaps;
  for (int i = 0; i < n; ++i) {
    const int prompt = int(500 * std::pow(most / 500, random.uniform()));
    const int output = int(most_output / 5 + most_output * 0.8 * random.uniform());
    gaps.push_back(random.exponential());
    add_request(trace, 0, prompt, output);
    sum += prompt;
  }
  const double gap_s = sum / n / (load * kPrefillTokensPerS);
  double now = 0;
  for (size_t i = 0; i < gaps.size(); ++i) trace.requests[i].arrival_s = now += gaps[i] * gap_s;
  return trace;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const Way& way = *std::find_if(ways().begin(), ways().end(), [&](const Way& w) { return point["way"] == w.name; });
  const int n = setting.tiny ? 12 : 300;
  const Trace trace = trace_of(n, point["load"], point["sample"], setting);
  SimulationOptions options = simulated_h100(way.topology, trace);
  options.conductor.disagg = find_disagg_policy(way.disagg);
  options.conductor.disagg_options = way.options;
  options.kv_tokens = setting.tiny ? 16000 : 200000;
  const Result<Simulation> simulation = simulate(options, trace);
  if (!simulation) return simulation.error();
  const Simulation& run = simulation.value();
  if (const std::string wrong = unserved(run, trace); !wrong.empty()) return Finding{{}, wrong};
  std::vector<double> ttft_p, ttft, first_gap, gaps;
  int local = 0;
  for (const SimulatedRecord& r : run.records) {
    local += r.order == DisaggOrder::local;
    ttft_p.push_back(1e3 * (r.prompt_done_s - r.arrival_s));
    ttft.push_back(1e3 * (r.times.first_s - r.arrival_s));
    first_gap.push_back(1e3 * double(r.times.gaps[0]));
    for (size_t t = 1; t < r.times.gaps.size(); ++t) gaps.push_back(1e3 * double(r.times.gaps[t]));
  }
  Values row = {{"local_share", double(local) / n}, {"duration_s", run.end_s}};
  for (const auto& [name, values] :
       {std::pair{"ttft_p", &ttft_p}, {"ttft", &ttft}, {"first_gap", &first_gap}, {"tbt", &gaps}}) {
    std::sort(values->begin(), values->end());
    row[std::string(name) + "_mean_ms"] = summarize(*values).mean;
    row[std::string(name) + "_p50_ms"] = percentile_seen(*values, 50);
    row[std::string(name) + "_p90_ms"] = percentile_seen(*values, 90);
    row[std::string(name) + "_p99_ms"] = percentile_seen(*values, 99);
  }
  row["prefill_gb_s"] = run.prefill_gb_s / n;
  row["decode_gb_s"] = run.decode_gb_s / n;
  row["wire_gb"] = run.kv_gb;
  row["preemptions"] = run.preemptions;
  return Finding{{row}, ""};
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("disagg_orders", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::disagg_orders_experiment
