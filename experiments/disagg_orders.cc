// disagg_orders: How do prefill first (by push and by pull), decode first, and policies between them compare in TTFT,
//   the gap after the first token, later gaps, and memory?
// Paper: DistServe (OSDI'24), Splitwise (ISCA'24), Mooncake (FAST'25), Dynamo; no figure is published.
// Set-up: 2P2D (or 4C) of Llama-3.1-8B on H100, 100 Gb/s, 300 requests, prompts of 500 to 8,000 tokens and outputs of
//   100 to 500. `load` is a share of what two Ps compute. TTFT_P ends with the prompt's last step on P, TTFT with the
//   client's first token. GB s are the integral of KV bytes over time, per request (Mooncake's VRAM occupation cost).
// Command: make exp-disagg_orders (seconds; virtual).
// Expected: a prompt of 2,700 tokens takes 82 ms on P and 28 ms on the link, of which 1 ms is exposed with streaming by
//   layer. The first gap is 10 to 20 ms with push and 35 to 60 with pull. decode_first samples the first token on D and
//   holds the prompt's blocks from before the queue on: 4 % more at low load.
// Found: the first gap with pull is 3.3 times that with push, and decode_first has .66 of it at 1.1 times the TTFT.
#include <algorithm>
#include <cmath>

#include "base/random.h"
#include "experiments/simulated.h"
#include "experiments/stats.h"

namespace xpyd::experiments::disagg_orders_experiment {
namespace {

namespace orders {

using namespace disagg;

constexpr double kPrefillTokensPerS = 66000;  // of two Ps
constexpr int kDraws = 3;                     // traces; nothing else differs from run to run

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

REGISTER_EXPERIMENT("disagg_orders", "cpu", points, each<run>);

}  // namespace orders

// disagg_orders/occupation: GB s by phase with prompts in chunks beside decodes (2C), and with P and D apart. 8 x A800,
// Llama-3-70B, prompts of 8,192 tokens and answers of 256.
//
// Expected: chunks of 512 take 1.4 to 1.5 s and hold half of their KV on average: 1.9 GB s, P 2.0. With push, D's room
// is held from before the prompt on: 3 to 8 GB s. Pull holds both sides for .21 s: .6 each. A decode step beside a
// chunk of 512 takes 79 ms instead of 20: 2.5 to 5 times D's 14 GB s.
namespace occupation {

using namespace disagg;

constexpr int kPrompt = 8192, kOutput = 256, kDraws = 3;
constexpr double kRequestsPerS = 1.2;  // of two instances, prompts and answers

struct System {
  const char* name;
  const char* topology;
  int step_tokens;
  bool pull;
};
constexpr System kSystems[] = {{"chunks of 512", "2C", 512, false},
                               {"chunks of 2048", "2C", 2048, false},
                               {"P and D", "1P1D", 2048, false},
                               {"P and D, whole", "1P1D", 32768, false},
                               {"P and D, pull", "1P1D", 2048, true}};

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const System& system : kSystems)
    for (double load : {0.3, 0.5, 0.7})
      for (int draw = 0; draw < kDraws; ++draw)
        all.push_back({{"system", system.name}, {"load", load}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const System& system = *std::ranges::find_if(kSystems, [&](const System& s) { return point["system"] == s.name; });
  const int n = setting.tiny ? 12 : 300, draw = point["sample"];
  Random random(setting.seed + 31 + 1000 * uint64_t(draw));
  Trace trace{.block_tokens = 64};
  double now_s = 0;
  for (int i = 0; i < n; ++i)
    add_request(trace, now_s += random.exponential() / (double(point["load"]) * kRequestsPerS),
                setting.tiny ? 512 : kPrompt, setting.tiny ? 20 : kOutput);
  SimulationOptions o = simulated("a800x8", "llama-3-70b", system.topology, trace).value();
  set_step_tokens(o, system.step_tokens);
  o.conductor.placement = find_placement_policy("least_loaded");
  o.conductor.disagg_options.pull = system.pull;
  o.conductor.stream_kv = StreamKv::layer;
  const Result<Simulation> simulation = simulate(o, trace);
  if (!simulation) return simulation.error();
  const Simulation& run = simulation.value();
  Finding found{{}, unserved(run, trace)};
  if (!found.wrong.empty()) return found;
  const double prompt = run.prompt_phase_gb_s / n, decode = run.decode_phase_gb_s / n,
               transfer = run.transfer_phase_gb_s / n;
  found.rows.push_back({{"prefill_gb_s", prompt},
                        {"decode_gb_s", decode},
                        {"transfer_gb_s", transfer},
                        {"gb_s", prompt + decode + transfer}});
  return found;
}

REGISTER_EXPERIMENT("disagg_orders/occupation", "cpu", points, each<run>);

}  // namespace occupation

}  // namespace
}  // namespace xpyd::experiments::disagg_orders_experiment
