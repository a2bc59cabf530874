// pd_notes: Is TTFT a tenth with 1P1D on two V100, by load?
// Paper: the xPyD notes.
// Set-up: two V100 as 1P1D and as 2C; /table: all requests at once, also on eight L40 and on 2 x 8 H20, and two sweeps
//   of the batch. Not in the notes and set here: ShareGPT's lengths, 100 requests where they say "inf". Links: `pcie`
//   20 GB/s and 10 us a hop; `pairs` 56 GB/s between two cards; `nodes` NVLink, then a NIC each.
// Command: make exp-pd_notes (seconds; virtual).
// Expected: at a load of .4 a static batch makes prompts wait 3 to 20 times as long. Eight L40: TP8 computes 4,600
//   tokens/s over PCIe and 5,800 in pairs, TP4 3,300 and 3,600: TTFT of 4P4D / V0 1.65 to 1.8 (1.5). V0 computes all
//   prompts first, so P/D removes its tail of TPOT: P99 .2 to .7 (.53). R1: sixteen cards read all weights in 15 ms,
//   eight half of them: 1.5 to 3.5 times the requests/s (1.23). Batch: tokens/s 17, 26 and 52 times at 256. At once: 90
//   requests queue 2.9 times as long as 30 (45 ms each), but a step of P holds 12 prompts, which all wait .28 s for its
//   end: 2.4 times the TTFT; a step of D takes 24.7 + .31 n ms: 1.2 to 1.6 times the gap.
// Found: 2C with static batches waits 6.2 times as long as 1P1D (10). 4P4D's TTFT is 1.7 times TP8's (1.5), its P99 of
//   TPOT .43 (.53). 90 at once beside 30: 2.3 times the TTFT (3), 1.3 times the gap (1.5).
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "experiments/lengths.h"
#include "experiments/poisson.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::pd_notes_experiment {
namespace {

using namespace disagg;

std::vector<Values> load_points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* system : {"pd", "chunked", "prefill_first", "static"})
    for (double load : {0.2, 0.4, 0.6, 0.8})
      for (int draw = 0; draw < (setting.tiny ? 1 : 3); ++draw)
        all.push_back({{"note", "two V100"}, {"system", system}, {"load", load}, {"sample", draw}});
  return all;
}

// `load` is a share of what the P of the disaggregated system computes.
Result<Finding> run_load(const Values& point, const Setting& setting) {
  const std::string system = point["system"];
  const bool pd = system == "pd";
  const uint64_t seed = setting.seed + 47 + 1000 * uint64_t(int(point["sample"]));
  Trace trace = poisson(1, setting.tiny ? 8 : 600, 1024, 128, seed);
  SimulationOptions o = simulated("v100x1", "qwen2.5-7b", pd ? "1P1D" : "2C", trace).value();
  trace = faster(trace, double(point["load"]) / prefill_load(o, trace));
  o.engine.policy = find_batch_policy(pd ? "chunked" : system);
  if (system == "chunked") set_step_tokens(o, 512);
  o.conductor.placement = find_placement_policy("least_loaded");
  Result<Simulation> run = simulate(o, trace);
  if (!run) return run.error();
  Finding found;
  found.rows.push_back(outcome(run.value(), kNoObjectives, found.wrong));
  return found;
}

REGISTER_EXPERIMENT("pd_notes", "cpu", load_points, each<run_load>);

// ---- Their runs: the result block of each.

// The links between the cards of an instance: the seconds of a byte in an all-reduce, and its fixed seconds.
struct Links {
  const char* name;
  double byte_s(int cards) const {
    const std::string which = name;
    const auto ring = [](int n) { return 2.0 * (n - 1) / n; };
    if (cards == 1) return 0;
    if (which == "nodes")  // eight cards over NVLink, then each with its peer on the other node over one NIC
      return ring(std::min(cards, 8)) / 450e9 + (cards > 8 ? ring(cards / 8) / 8 / 50e9 : 0);
    return which == "pairs" ? 1 / 56e9 + ring(cards / 2) / 2 / 20e9 : ring(cards) / 20e9;
  }
  double hop_s(int cards) const {
    if (std::string(name) == "nodes") return cards > 8 ? 40e-6 : 10e-6;
    return cards == 1 ? 0 : 10e-6 * 2 * (std::string(name) == "pairs" ? cards / 2 : cards - 1);
  }
};

struct System {
  const char *note, *name, *topology, *hardware, *policy;
  int cards = 1, stages = 1, step_tokens = 2048, drafts = 0;
  int requests = 100, input = 0;  // input: prompt tokens of all requests; 0: as drawn
};
constexpr double kRight = 2.18;  // tokens per step with three drafts (SGLang's figure for DeepSeek)

// V0: max_num_batched_tokens holds any prompt. V1: 2,048.
constexpr System kSystems[] = {
    {"two V100", "1P1D, 47", "1P1D", "v100x1", "chunked", 1, 1, 2048, 0, 47},
    {"two V100", "2C, 47", "2C", "v100x1", "chunked", 1, 1, 2048, 0, 47},
    {"two V100", "2C, 1,000", "2C", "v100x1", "chunked", 1, 1, 2048, 0, 1000},
    {"eight L40", "4P4D", "1P1D", "l40x4", "chunked", 4, 1, 8192, 0, 100, 34965},
    {"eight L40", "TP8 V0", "1C", "l40x8", "prefill_first", 8, 1, 8192, 0, 100, 29552},
    {"eight L40", "TP8 V1", "1C", "l40x8", "chunked", 8, 1, 2048, 0, 100, 21404},
    {"R1", "TP8 PP2", "1C", "h20x8", "chunked", 8, 2, 2048},
    {"R1", "TP16, MTP, prompts first", "1C", "h20x16", "prefill_first", 16, 1, 8192, 3},
    {"batch", "V100", "1C", "v100x1", "chunked"},
    {"batch", "L40 TP8", "1C", "l40x8", "chunked", 8},
    {"batch", "R1 TP16", "1C", "h20x16", "chunked", 16},
    {"at once", "1P1D", "1P1D", "v100x1", "chunked"},
};

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const System& s : kSystems) {
    const std::string note = s.note, hardware = s.hardware;
    std::vector<const char*> links = {hardware[0] == 'h' ? "nodes" : "pcie"};
    if (hardware[0] == 'l' && note != "batch") links.push_back("pairs");
    std::vector<int> batches = {256};
    if (note == "batch") batches = {1, 2, 4, 8, 16, 32, 64, 128, 256};
    if (note == "at once") batches = {30, 60, 90, 120, 240};
    for (const char* link : links)
      for (int batch : batches) all.push_back({{"note", note}, {"system", s.name}, {"links", link}, {"batch", batch}});
  }
  return all;
}

// Sets the step terms: the cards' work, the traffic of their ranks, and drafts. A step with k drafts computes k + 1
// tokens per sequence and reads one layer's weights for each draft.
void pay(SimulationOptions& o, const System& s, const Links& links) {
  if (std::string(s.hardware).starts_with("h20")) {
    o.hardware.flops_per_s *= 2;  // products in fp8
    o.model.n_layers = 62;        // instead of 61, so that two stages have as many
  }
  const model::StepCost::Terms t = step_cost(o.model, o.hardware, s.stages).terms();
  const double sums = 2.0 * o.model.n_layers / s.stages;
  const double sent = sums * o.model.n_heads * 128 * 2 * links.byte_s(s.cards), waits = sums * links.hop_s(s.cards);
  model::StepCost::Terms& all = o.hardware.step_terms = t;
  const double k = s.drafts, draft = k / o.model.n_layers;
  all[0] = t[0] + waits + draft * (t[0] + waits);
  all[1] += sent;
  all[4] = (t[4] + sent) * (1 + k + draft);
  all[5] = std::max(t[2], (1 + k) * 2 * t[3]) * (1 + draft);
}

int steps_of(int output, int drafts) { return drafts ? 1 + int(std::ceil((output - 1) / kRight)) : output; }

Trace load_of(const System& s, int batch, const std::vector<Lengths>& lengths) {
  Trace trace{.block_tokens = 64};
  if (std::string(s.note) == "batch") {
    trace.closed_loop = true;
    for (int i = 0; i < 4 * batch; ++i) {
      add_request(trace, 0, 512, 128);
      if (i >= batch) trace.requests.back().after = i - batch;
    }
    return trace;
  }
  double drawn = 0;
  for (const Lengths& l : lengths) drawn += l.prompt;
  const double scale = s.input > 0 ? s.input / drawn : 1;
  for (const Lengths& l : lengths)
    add_request(trace, 0, std::max(1, int(std::lround(l.prompt * scale))), steps_of(l.output, s.drafts));
  return trace;
}

// In seconds; itl has the gaps between events.
struct Seen {
  std::vector<double> e2e, ttft, tpot, itl;
  double requests = 0, duration = 0, input = 0, output = 0;
};

// The block that `xpyd bench --format sglang` prints, over all draws.
Values block_of(Seen& seen) {
  const auto sum = [](const std::vector<double>& x) {
    double total = 0;
    for (double each : x) total += each;
    return total;
  };
  Values row{{"requests", seen.requests},
             {"duration_s", seen.duration},
             {"input_tokens", seen.input},
             {"output_tokens", seen.output},
             {"requests_per_s", seen.requests / seen.duration},
             {"output_per_s", seen.output / seen.duration},
             {"concurrency", sum(seen.e2e) / seen.duration}};
  for (auto [name, x] : {std::pair{"e2e", &seen.e2e}, {"ttft", &seen.ttft}, {"tpot", &seen.tpot}, {"itl", &seen.itl}}) {
    std::ranges::sort(*x);
    const std::string base = name;
    row.update({{base + "_mean_ms", 1e3 * sum(*x) / double(x->size())}});
    for (int p : {50, 99}) {
      const Value at = percentile_seen(*x, p);
      row.update({{base + "_p" + std::to_string(p) + "_ms", at.is_number() ? Value(1e3 * double(at)) : at}});
    }
  }
  return row;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string note = point["note"], name = point["system"];
  const System& s = *std::ranges::find_if(kSystems, [&](const System& x) { return note == x.note && name == x.name; });
  const std::string hardware = s.hardware;
  const char* model = hardware[0] == 'v' ? "qwen2.5-7b" : hardware[0] == 'l' ? "qwen2.5-32b" : "deepseek-r1";
  const int requests = note == "at once" ? int(point["batch"]) : s.requests, n = setting.tiny ? 5 : requests;
  const int draws = setting.tiny || note == "batch" ? 1 : std::max(2, 2000 / n);
  const int batch = setting.tiny ? std::min(4, int(point["batch"])) : int(point["batch"]);
  const std::string link = point["links"];
  Finding found;
  Seen seen;
  for (int draw = 0; draw < draws; ++draw) {
    Result<LengthSet> lengths = request_lengths("sharegpt", n, setting, draw);
    if (!lengths) return lengths.error();
    const Trace trace = load_of(s, batch, lengths.value().requests);
    SimulationOptions o = simulated(hardware, model, s.topology, trace).value();
    pay(o, s, {link.c_str()});
    o.prefill_pp = o.pipeline_window = s.stages;
    o.engine.policy = find_batch_policy(s.policy);
    o.engine.max_batch = batch;
    set_step_tokens(o, s.step_tokens);
    o.conductor.placement = find_placement_policy("least_loaded");
    Result<Simulation> done = simulate(o, trace);
    if (!done) return done.error();
    if (found.wrong = unserved(done.value(), trace); !found.wrong.empty()) return found;
    seen.duration += done.value().end_s;
    for (size_t i = 0; i < trace.requests.size(); ++i) {
      const SimulatedRecord& r = done.value().records[i];
      const int output = s.drafts ? lengths.value().requests[i].output : trace.requests[i].output_tokens;
      const double asked_s = r.times.first_s - r.arrival_s, all_s = r.last_s - r.arrival_s;
      seen.requests += 1, seen.input += r.prompt, seen.output += output;
      seen.ttft.push_back(asked_s), seen.e2e.push_back(all_s);
      if (output > 1) seen.tpot.push_back((r.last_s - r.times.first_s) / (output - 1));
      for (float gap : r.times.gaps) seen.itl.push_back(gap);
    }
  }
  found.rows.push_back(block_of(seen));
  return found;
}

REGISTER_EXPERIMENT("pd_notes/table", "cpu", points, each<run>);

}  // namespace
}  // namespace xpyd::experiments::pd_notes_experiment
