// pd_split: one card whole, or cut into equal parts for prefill and decode: what `pd` asks of two
// cores, on a virtual clock, where nothing wavers but the arrivals.
//
// The simulator (experiments/simulate/): Llama-3.1-8B, H100. 1C has the card, of 1P1D each instance a
// half of its arithmetic and of its bandwidth, of 2P1D a third; KV is there as soon as it is sent. 400
// requests, prompts of 2,000 tokens and outputs of 128, each plus or minus a half, uniform; steps of 512 tokens
// everywhere. `load` is a share of the requests a second that 1C ends when all are there at once. Nine traces.
//
// Arithmetic. 16 GFLOP a token: 1C computes a chunk of 512 in 17 ms and a prompt in 65; a decode
// step reads 16 GB in 6 ms. All at once 1C mixes both in steps of 17 ms: 4 a prompt, some 13
// requests/s. Load 0.4 is 5 requests/s: 1C's prompts keep it busy for 0.33 of the time, P's in
// 1P1D, twice as long, for 0.66. First tokens of a queue with equal service (M/D/1), whose mean
// wait is r / (2 (1 - r)) services: 65 (1 + 0.25) = 81 ms and 130 (1 + 0.97) = 256, 3.2 times; the
// median of either less than the mean, 1C's decodes in its prompts' steps: 2 to 3.6. At 0.2: 130 (1
// + 0.25) / 65 (1 + 0.1) = 2.3, 1.8 to 2.6. Two P of a third, 195 ms each at 0.5 busy: 195 (1 +
// 0.25) / 256 = 0.95, less what the median spares: 0.8 to 1.5. Gaps: 1C's decodes wait for chunks,
// 17 ms and more; D of a half reads in 12 ms, of a third in 18: P99 of 1P1D / 1C 0.6 to 0.85, of
// 2P1D / 1P1D 1.4 to 1.6.
#include <algorithm>

#include "base/random.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::pd_split_experiment {
namespace {

using namespace disagg;

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* topology : {"1C", "1P1D", "2P1D"})
    for (double load : {0.2, 0.4, 0.6})
      for (int draw = 0; draw < 9; ++draw) all.push_back({{"topology", topology}, {"load", load}, {"sample", draw}});
  return all;
}

// rate 0: all at once.
Trace trace_of(int n, double rate, int draw, const Setting& setting) {
  Random random(setting.seed + 23 + 1000 * uint64_t(draw));
  auto around = [&](int tokens) { return int(tokens * (0.5 + random.uniform())); };
  Trace trace{.block_tokens = 16};
  double now = 0;
  for (int i = 0; i < n; ++i) {
    const double gap = random.exponential();
    if (rate > 0) now += gap / rate;
    const int prompt = around(setting.tiny ? 60 : 2000);
    add_request(trace, now, prompt, around(setting.tiny ? 6 : 128));
  }
  return trace;
}

// Errors: invalid_argument: a request did not get its tokens.
Result<Simulation> run_split(const std::string& topology, const Trace& trace, const Setting& setting) {
  SimulationOptions options = simulated_h100(topology, trace,
                                             topology == "1C"     ? 1
                                             : topology == "1P1D" ? 1. / 2
                                                                  : 1. / 3);
  options.hardware.link_bytes_per_s = kNoWire;
  set_step_tokens(options, 512);
  options.kv_tokens = setting.tiny ? 8000 : 200000;
  Result<Simulation> run = simulate(options, trace);
  if (!run) return run;
  const std::string wrong = unserved(run.value(), trace);
  return wrong.empty() ? std::move(run) : invalid(wrong);
}

Measure open(const Setting& setting) {
  auto capacity = std::make_shared<double>(0);
  return [=](const Values& point) -> Result<Finding> {
    const int n = setting.tiny ? 6 : 400;
    if (*capacity == 0) {
      const Result<Simulation> all = run_split("1C", trace_of(n, 0, 0, setting), setting);
      if (!all) return all.error();
      *capacity = n / all.value().end_s;
    }
    const double rate = double(point["load"]) * *capacity;
    const Result<Simulation> run = run_split(point["topology"], trace_of(n, rate, point["sample"], setting), setting);
    if (!run) return run.error();
    std::vector<double> ttft, gaps;
    for (const SimulatedRecord& r : run.value().records) {
      ttft.push_back(1e3 * (r.times.first_s - r.arrival_s));
      for (float gap : r.times.gaps) gaps.push_back(1e3 * double(gap));
    }
    std::sort(ttft.begin(), ttft.end());
    std::sort(gaps.begin(), gaps.end());
    return Finding{{{{"capacity", *capacity},
                     {"rate", rate},
                     {"requests", n},
                     {"gaps", gaps.size()},
                     {"median_ttft_ms", percentile_seen(ttft, 50)},
                     {"p90_ttft_ms", percentile_seen(ttft, 90)},
                     {"median_itl_ms", percentile_seen(gaps, 50)},
                     {"p99_itl_ms", percentile_seen(gaps, 99)},
                     {"duration_s", run.value().end_s}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("pd_split", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::pd_split_experiment
