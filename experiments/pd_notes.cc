// pd_notes: the runs of the xPyD notes with their cards' figures: two V100 as 1P1D and as two colocated instances,
// eight L40 as TP4 + TP4 and as TP8 with V0's and V1's schedules, DeepSeek-R1 on 2 x 8 H20 by stages and by ranks, with
// a multi-token head and without; and a sweep of the batch. pd_notes_table has the serving block of each.
//
// The simulator (experiments/simulate/), cards by their data sheets. What the notes do not say is set here: lengths as
// ShareGPT's (lengths.h), 100 requests at once where they say "inf", 20 draws in one row (a P99 wants 2,000 requests).
// Tensor ranks cost two ring all-reduces a layer, which nothing hides. `pcie`: 20 GB/s each way and 10 us a hop among
// all. `pairs`: two cards first, over 56 GB/s, then rings of half the bytes among the pairs.
//
// Two V100 (Qwen2.5-7B, prompts of 1,024 and outputs of 128 at loads of .2 to .8). Against 2C with chunks 1P1D's TTFT
// is no tenth: 2C has two instances that compute prompts, and its TTFT is the lower one until decodes fill its steps
// (2C / 1P1D .5 to 1.3); where a batch that runs shuts new prompts out (static) it is 3 to 20. But their 1P1D answered
// 47 requests and their two instances 1,000. All at once, TTFT is half of the time in which one instance computes its
// share, so 500 prompts against 47 are 10.6 times by themselves, and more where decodes are in their steps: 9 to 25.
//
// Eight L40. "8 x 5120 / 40" in the notes is the shape of Qwen2.5-32B: 2 x 32.8e9 FLOP a token. At .44 of 181 TFLOP/s
// TP8 takes 103 us of products and 2.3 MB of all-reduces: 115 us over PCIe, 70 in pairs; 218 and 173 us, 4,600 and
// 5,800 tokens/s. TP4 206 and 98 or 72: 3,300 and 3,600. The P99 of their TTFTs says 4,075 (V0), 4,950 (V1) and 3,958
// (TP4). Had each had 29,552 tokens, 4P4D would take 1.4 to 1.6 times V0's TTFT; with their 34,965 and 29,552 1.65
// to 1.8 (published 1.5: 8.1 and 5.4 s). V1 has 21,404: .72 of V0's prompts. V0 computes all prompts before anybody
// decodes, so the first wait 5 s for their second token; in 4P4D none waits but for P's and D's steps. A step of D
// reads its weights in 27 ms (TP8: 13.6), takes 64 x 2 waits (TP4, pairs: 40 us each, 5 ms; TP8 80, 10; PCIe 60 and
// 140), .2 to .3 for each of 40 to 100 that decode. So TPOT, 4P4D / V0: median 1 to 1.3 in pairs (published 1.19: 51
// and 43), .9 to 1.1 over PCIe; mean .7 to 1.1 (.81: 58 and 72), P99 .2 to .7 (.53: 162 and 307 ms): the tail is what
// P/D takes away. (Both links were looked at before the claims were written: pairs come nearer to what is published.)
//
// DeepSeek-R1 in fp8 (296 TFLOP/s of an H20; 62 layers for 61, which two stages divide), all experts read; two waves
// under way on two stages, as vLLM has. Eight cards read half of the weights in 15 ms, 31 ms a token through both
// stages; sixteen all of them in 15 ms, and 122 all-reduces of 40 us across nodes for 10 us within: 5 ms. Median ITL
// TP16 / PP2: 21 to 24 of 32 to 36 = .6 to .75 without MTP, of a step; a head of three drafts, of which 1.18 are right,
// does 1.05 to 1.6 of a step for 2.18 tokens: TPOT .45 to .8 of the same without. Published, SGLang TP16 + MTP over
// vLLM TP8 PP2: requests/s 1.23, median ITL .74, but mean TTFT 1.25 and mean TPOT 1.98 times. By the cards' figures
// requests/s are 1.5 to 3.5 times as many and TPOT .3 to .7: for theirs to be true its decodes must have stood still
// three quarters of the time, which prompts first does where prompts keep coming, and not where 100 come at once.
//
// Batch (closed loop, prompts of 512 and outputs of 128, TP16 R1, TP8 L40, one V100): a request is P = 512 b of prompts
// and 128 (c / n + d) of steps that n share, so tokens/s rise by (P + 128 (c + d)) / (P + 128 (c / 256 + d)): V100, b =
// .28 ms, c = 25, d = .33: 3.35 / .2 = 17; L40, b = .22 ms, c = 32, d = .25: 4.2 / .16 = 26; R1 b = .06, c = 20, d =
// .06: 2.7 / .05 = 52. (The first arithmetic forgot the prompts: 30 to 160.) TPOT is 256 / that: 15, 10, 5 times.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/stats.h"
#include "experiments/lengths.h"
#include "experiments/poisson.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::pd_notes_experiment {
namespace {

using namespace disagg;

// ---- Two V100 at a load.

std::vector<Values> load_points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* system : {"pd", "chunked", "prefill_first", "static"})
    for (double load : {0.2, 0.4, 0.6, 0.8})
      for (int draw = 0; draw < (setting.tiny ? 1 : 3); ++draw)
        all.push_back({{"note", "two V100"}, {"system", system}, {"load", load}, {"sample", draw}});
  return all;
}

// `load`: of what the P of the disaggregated system computes.
Result<Finding> run_load(const Values& point, const Setting& setting) {
  const std::string system = point["system"];
  const bool pd = system == "pd";
  const uint64_t seed = setting.seed + 47 + 1000 * uint64_t(int(point["sample"]));
  Trace trace = poisson(1, setting.tiny ? 8 : 600, 1024, 128, seed);
  Result<SimulationOptions> options = simulated("v100x1", "qwen2.5-7b", pd ? "1P1D" : "2C", trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
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

REGISTER_EXPERIMENT("pd_notes", "cpu", load_points, [](const Setting& setting) -> Measure {
  return [setting](const Values& point) { return run_load(point, setting); };
});

// ---- Their runs: the serving block of each.

// How the cards of an instance add up what each has: seconds of a byte of it, and of one all-reduce whatever its bytes.
struct Links {
  const char* name;
  double byte_s(int cards) const {
    const std::string which = name;
    const auto ring = [](int n) { return 2.0 * (n - 1) / n; };
    if (cards == 1) return 0;
    if (which == "nodes")  // eight cards over NVLink, then their like of the other node over one NIC each
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
  int requests = 100, input = 0;  // tokens together; 0: as they are drawn
};
constexpr double kRight = 2.18;  // tokens of a step of three drafts (SGLang's figure for DeepSeek)

// V0: max_num_batched_tokens holds any prompt; V1: 2,048.
constexpr System kSystems[] = {
    {"two V100", "1P1D, 47", "1P1D", "v100x1", "chunked", 1, 1, 2048, 0, 47},
    {"two V100", "2C, 47", "2C", "v100x1", "chunked", 1, 1, 2048, 0, 47},
    {"two V100", "2C, 1,000", "2C", "v100x1", "chunked", 1, 1, 2048, 0, 1000},
    {"eight L40", "4P4D", "1P1D", "l40x4", "chunked", 4, 1, 8192, 0, 100, 34965},
    {"eight L40", "TP8 V0", "1C", "l40x8", "prefill_first", 8, 1, 8192, 0, 100, 29552},
    {"eight L40", "TP8 V1", "1C", "l40x8", "chunked", 8, 1, 2048, 0, 100, 21404},
    {"eight L40, one load", "4P4D", "1P1D", "l40x4", "chunked", 4, 1, 8192, 0, 100, 29552},
    {"eight L40, one load", "TP8 V0", "1C", "l40x8", "prefill_first", 8, 1, 8192, 0, 100, 29552},
    {"eight L40, one load", "TP8 V1", "1C", "l40x8", "chunked", 8, 1, 2048, 0, 100, 29552},
    {"R1", "TP8 PP2", "1C", "h20x8", "chunked", 8, 2, 2048},
    {"R1", "TP8 PP2, MTP", "1C", "h20x8", "chunked", 8, 2, 2048, 3},
    {"R1", "TP16", "1C", "h20x16", "chunked", 16, 1, 2048},
    {"R1", "TP16, MTP", "1C", "h20x16", "chunked", 16, 1, 2048, 3},
    {"R1", "TP8 PP2, prompts first", "1C", "h20x8", "prefill_first", 8, 2, 8192},
    {"R1", "TP16, prompts first", "1C", "h20x16", "prefill_first", 16, 1, 8192},
    {"R1", "TP16, MTP, prompts first", "1C", "h20x16", "prefill_first", 16, 1, 8192, 3},
    {"batch", "V100", "1C", "v100x1", "chunked"},
    {"batch", "L40 TP8", "1C", "l40x8", "chunked", 8},
    {"batch", "R1 TP16", "1C", "h20x16", "chunked", 16},
};

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const System& s : kSystems) {
    const std::string note = s.note, hardware = s.hardware;
    std::vector<const char*> links = {hardware[0] == 'h' ? "nodes" : "pcie"};
    if (hardware[0] == 'l' && note != "batch") links.push_back("pairs");
    std::vector<int> batches = {256};
    if (note == "batch") batches = {1, 2, 4, 8, 16, 32, 64, 128, 256};
    for (const char* link : links)
      for (int batch : batches) all.push_back({{"note", note}, {"system", s.name}, {"links", link}, {"batch", batch}});
  }
  return all;
}

// The cards' work, what their ranks send each other, and drafts: a step of k of them computes k + 1 tokens a sequence,
// and reads a layer's weights for each.
Status pay(SimulationOptions& o, const System& s, const Links& links) {
  if (std::string(s.hardware).starts_with("h20")) {
    o.hardware.flops_per_s *= 2;  // fp8
    o.model.n_layers = 62;        // of 61: two stages have as many
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
  return ok();
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

// Seconds, of requests and of gaps between what came.
struct Seen {
  std::vector<double> e2e, ttft, tpot, itl;
  double requests = 0, duration = 0, input = 0, output = 0, longest = 0, tenth = 0;
};

// The block that `xpyd bench --format sglang` prints, of all draws together.
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
             {"input_per_s", seen.input / seen.duration},
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
  row.update({{"itl_max_ms", 1e3 * seen.longest}, {"worst_tenth_mean_ms", 1e3 * seen.tenth / seen.requests}});
  return row;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string note = point["note"], name = point["system"];
  const System& s = *std::ranges::find_if(kSystems, [&](const System& x) { return note == x.note && name == x.name; });
  const std::string hardware = s.hardware;
  const char* model = hardware[0] == 'v' ? "qwen2.5-7b" : hardware[0] == 'l' ? "qwen2.5-32b" : "deepseek-r1";
  const int n = setting.tiny ? 5 : s.requests, draws = setting.tiny || note == "batch" ? 1 : std::max(2, 2000 / n);
  const int batch = setting.tiny ? std::min(4, int(point["batch"])) : int(point["batch"]);
  const std::string link = point["links"];
  Finding found;
  Seen seen;
  for (int draw = 0; draw < draws; ++draw) {
    Result<LengthSet> lengths = request_lengths("sharegpt", n, setting, draw);
    if (!lengths) return lengths.error();
    const Trace trace = load_of(s, batch, lengths.value().requests);
    Result<SimulationOptions> options = simulated(hardware, model, s.topology, trace);
    if (!options) return options.error();
    SimulationOptions& o = options.value();
    if (Status status = pay(o, s, {link.c_str()}); !status) return status.error();
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
      seen.longest = std::max(seen.longest, r.times.worst()), seen.tenth += r.times.worst_tenth();
    }
  }
  found.rows.push_back(block_of(seen));
  return found;
}

REGISTER_EXPERIMENT("pd_notes_table", "cpu", points, [](const Setting& setting) -> Measure {
  return [setting](const Values& point) { return run(point, setting); };
});

}  // namespace
}  // namespace xpyd::experiments::pd_notes_experiment
