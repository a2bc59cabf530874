// vattention_costs, vattention_virtual: vAttention's whole runs, on the cards and lengths of its paper, in virtual
// time: what a batch needs of memory a second (Fig. 4), and what a slower prefill kernel costs whoever serves (Figs. 9
// and 10).
//
// Yi-6B on one A100, Llama-3-8B and Yi-34B on two, by what a step costs there (experiments/simulate/hardware.h; an A800
// computes as an A100 does).
//   batch     decoding at a context of 900 tokens, 1 to 320 sequences: tokens/s, time of a step, MB/s of KV a card
//   prefill   whole prompts in chunks of 16,384, with the paged kernel's attention `factor` times as slow. The factor
//   is
//             the one with which a prompt of 192K gains what Fig. 7 says (1.24, 1.26, 1.24); it is the only number that
//             is fitted. What the other lengths gain follows.
//   offline   427 requests at once of the long summaries' lengths: requests a minute, with the factor and without
//   online    Yi-6B: 400 requests that arrive at random, prompts of 22.9K to 45.8K, 428 tokens out: median latency with
//   the
//             factor and without, by `load`, the share of the time for which the slower one is busy with prompts alone
//
// Arithmetic. Yi-6B: 12.1 GB of weights, 9 ms a step; a token computes 12.1 GFLOP, 88 us at .44 of 312 TFLOP/s, and
// reads 900 * 64 KiB, 41 us. So tokens/s tend to 1 / 129 us = 7,750, and 320 sequences make 1.05 times what 256 make;
// KV grows by 64 KiB * 7,750 = 508 MB/s at most (Llama-3-8B 10,000 * 64 KiB = 656, Yi-34B 3,050 * 120 KiB = 375, a
// card): below 750. A prompt of n tokens attends to n^2 / 2, 32 * 4 * 32 * 128 * n^2 / 2 FLOP: at 192K 1.0e16, 74 s of
// 92, so the factor is 1 + .24 * 92 / 74 = 1.30 (their 7.0 and 5.5 s of attention cannot be a whole prompt's: 1.0e16
// FLOP take 32 s at the card's peak; the last 16,384 tokens take 5.5). Offline: 16 s of 26 a request are
// attention, 1.18. Online: prompts of 34K gain 1.13 in their own time, and at a load of .95 the queue of M/G/1 is .95 /
// .05 to .84 / .16 as long: a third is left of the wait, and half of the latency. So 28 to 42 % are a load of .8 to
// .95, not a kernel of 1.4.
#include <algorithm>

#include "base/random.h"
#include "base/stats.h"
#include "experiments/lengths.h"
#include "experiments/simulated.h"
#include "model/step_cost.h"

namespace xpyd::experiments::vattention_virtual_experiment {
namespace {

using namespace disagg;
using model::StepCost;
using model::StepShape;

constexpr int kChunk = 16384, kContext = 900, kLongest = 192 << 10, kOffline = 427, kOnline = 400, kOutput = 428;

struct Served {
  const char* model;
  int cards;
  double gain;  // of a prompt of kLongest, over FlashAttention's paged kernel (Fig. 7)
};
constexpr Served kServed[] = {{"yi-6b", 1, 1.24}, {"llama-3-8b", 2, 1.26}, {"yi-34b", 2, 1.24}};

std::vector<Values> cost_points(const Setting&) {
  std::vector<Values> all;
  for (const Served& served : kServed) all.push_back({{"model", served.model}});
  return all;
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const Served& served : kServed)
    for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
      for (double load : {0., .6, .8, 1.0})  // 0: all at once
        if (load == 0 || &served == kServed) all.push_back({{"model", served.model}, {"load", load}, {"sample", draw}});
  return all;
}

const Served& served_by(const Values& point) {
  return *std::ranges::find(kServed, std::string(point["model"]), [](const Served& s) { return std::string(s.model); });
}

struct Bed {
  SimulationOptions options;
  StepCost plain = StepCost(), slow = StepCost();
  double factor = 1;
};

double prompt_s(const StepCost& cost, int tokens) { return cost.seconds(model::prompt_steps(tokens, 0, kChunk)); }

StepCost slower(const StepCost& cost, double factor) {
  StepCost::Terms terms = cost.terms();
  terms[3] *= factor;  // of what a prompt attends to
  return StepCost(terms);
}

Result<Bed> bed_of(const Served& served, const Trace& trace) {
  auto options = simulated("a800x" + std::to_string(served.cards), served.model, "1C", trace);
  if (!options) return options.error();
  Bed bed{.options = std::move(options).value()};
  set_step_tokens(bed.options, kChunk);
  bed.options.conductor.placement = find_placement_policy("least_loaded");
  bed.plain = step_cost(bed.options.model, bed.options.hardware);
  // Seconds are linear in the factor.
  const double at_1 = prompt_s(bed.plain, kLongest), more = prompt_s(slower(bed.plain, 2), kLongest) - at_1;
  bed.factor = 1 + (served.gain - 1) * at_1 / more;
  bed.slow = slower(bed.plain, bed.factor);
  return bed;
}

Result<Simulation> serve(const Bed& bed, const StepCost& cost, const Trace& trace) {
  SimulationOptions options = bed.options;
  options.hardware.step_terms = cost.terms();
  return simulate(options, trace);
}

Value median_latency_s(const Simulation& run) {
  std::vector<double> all;
  for (const SimulatedRecord& r : run.records) all.push_back(r.last_s - r.arrival_s);
  std::ranges::sort(all);
  return percentile_seen(all, 50);
}

Result<Finding> costs(const Values& point) {
  const Served& served = served_by(point);
  const Result<Bed> made = bed_of(served, {});
  if (!made) return made.error();
  const Bed& bed = made.value();
  Finding found;
  for (int n : {1, 16, 64, 128, 192, 256, 320}) {
    StepShape step;
    step.add_decodes(n, double(n) * kContext);
    const double s = bed.plain.seconds(step);
    found.rows.push_back({{"figure", "batch"},
                          {"size", n},
                          {"tokens_per_s", n / s},
                          {"seconds", s},
                          {"kv_mbps", 1e-6 * n / s * bed.options.model.kv_token_bytes() / served.cards},
                          {"gain", 1.0},
                          {"factor", 1.0}});
  }
  for (int k : {2, 16, 32, 64, 128, 192}) {
    const double plain = prompt_s(bed.plain, k << 10), paged = prompt_s(bed.slow, k << 10);
    found.rows.push_back({{"figure", "prefill"},
                          {"size", k << 10},
                          {"tokens_per_s", (k << 10) / plain},
                          {"seconds", plain},
                          {"kv_mbps", 1e-6 * (k << 10) / plain * bed.options.model.kv_token_bytes() / served.cards},
                          {"gain", paged / plain},
                          {"factor", bed.factor}});
  }
  return found;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const double load = point["load"];
  const int draw = point["sample"];
  Trace trace;
  trace.block_tokens = 256;  // of FlashAttention's paged kernel
  Random random(seed_of(setting, draw));
  if (load == 0) {
    Result<LengthSet> lengths = request_lengths("arxiv", setting.tiny ? 8 : kOffline, setting, draw);
    if (!lengths) return lengths.error();
    for (const Lengths& one : lengths.value().requests) add_request(trace, 0, one.prompt, one.output);
  } else {
    for (int i = 0; i < (setting.tiny ? 10 : kOnline); ++i)
      add_request(trace, 0, 22900 + int(random.below(45800 - 22900)), kOutput);
  }
  const Result<Bed> made = bed_of(served_by(point), trace);
  if (!made) return made.error();
  const Bed& bed = made.value();
  if (load > 0) {
    double all_s = 0, now = 0;
    for (const TraceRequest& r : trace.requests) all_s += prompt_s(bed.slow, r.prompt_tokens);
    const double every_s = all_s / double(trace.requests.size()) / load;
    for (TraceRequest& r : trace.requests) r.arrival_s = now, now += every_s * random.exponential();
  }
  const Result<Simulation> paged = serve(bed, bed.slow, trace), plain = serve(bed, bed.plain, trace);
  if (!paged) return paged.error();
  if (!plain) return plain.error();
  Finding found;
  for (const Simulation* each : {&paged.value(), &plain.value()})
    if (found.wrong = unserved(*each, trace); !found.wrong.empty()) return found;
  const Value slow_s = median_latency_s(paged.value()), quick_s = median_latency_s(plain.value());
  const bool seen = slow_s.is_number() && quick_s.is_number();
  found.rows.push_back({{"paged_end_s", paged.value().end_s},
                        {"plain_end_s", plain.value().end_s},
                        {"gain", paged.value().end_s / plain.value().end_s},
                        {"paged_median_s", slow_s},
                        {"plain_median_s", quick_s},
                        {"less_latency", seen ? Value(1 - double(quick_s) / double(slow_s)) : Value("")}});
  return found;
}

Measure open_costs(const Setting&) { return costs; }
Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("vattention_costs", "cpu", cost_points, open_costs);
REGISTER_EXPERIMENT("vattention_virtual", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::vattention_virtual_experiment
