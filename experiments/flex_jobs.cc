// flex_jobs: batch jobs in memory and step tokens that nobody else wants ("service_tier": "flex", batch/flex.cc): what
// they do to the first tokens and the gaps of the others, and what they get done.
//
// The simulator (experiments/simulate/): one colocated instance of 8 x A800 with Llama-3-70B and 200,000 tokens of KV,
// chunks of 512; others ask for 4,096 + 128 tokens, Poisson, 200 requests, two draws, at `load` of what the instance
// computes; 1,000 jobs of 2,048 + 256 tokens are there from the beginning, and what is done of them until the last
// other request has ended counts. "none": without jobs; "flex N": --flex-tokens N; "alike": jobs are requests as any
// other. "small": as flex 16, of a pool of 60,000 tokens, in which jobs have to yield.
//
// Arithmetic. A request takes 8 steps of 512 tokens, 79 ms each, .63 s, and 128 decodes of 13 ms: at load .5 (.8 /s)
// some request runs in nearly all of the time: 128 x 13 ms and more are longer than the 1.25 s between two. So jobs
// have a step of their own in a fifth of the time or less, at load .2 (.32 /s, 2.3 s each of 3.1) in a third: 1 step of
// 512 tokens each 79 ms, 6,000 tokens/s at best: 1,500 to 3,000 tokens/s. Who comes waits for such a step's end: up to
// 79 ms of a TTFT of .64, 40 in the mean, in that share of the time: 1.00 to 1.06 of it; gaps are the same with flex 0,
// and with flex 16 16 x .13 = 2 ms longer, of 13: 1.1 to 1.2. As any other request jobs stop the others for as long as
// they like: 1,000 x .4 s are before whoever comes: TTFT of a minute and more.
#include <algorithm>

#include "base/random.h"
#include "base/stats.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::flex_jobs_experiment {
namespace {

using namespace disagg;

constexpr int kDraws = 2;
constexpr double kRequestsPerS = 1.6;

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (double load : {0.2, 0.5})
    for (const char* system : {"none", "flex 0", "flex 16", "flex 64", "small, none", "small", "alike"})
      for (int draw = 0; draw < kDraws; ++draw) all.push_back({{"system", system}, {"load", load}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string system = point["system"];
  const int draw = point["sample"], n = setting.tiny ? 20 : 200;
  const bool small = system.starts_with("small"), none = system == "none" || system == "small, none";
  const int jobs = none ? 0 : setting.tiny ? 30 : 1000;
  Random random(setting.seed + 61 + 1000 * uint64_t(draw));
  Trace trace{.block_tokens = 64};
  for (int i = 0; i < jobs; ++i) {
    add_request(trace, 0, 2048, 256);
    trace.requests.back().flex = system != "alike";
  }
  double now_s = 1;
  for (int i = 0; i < n; ++i)
    add_request(trace, now_s += random.exponential() / (double(point["load"]) * kRequestsPerS), 4096, 128);
  Result<SimulationOptions> options = simulated("a800x8", "llama-3-70b", "1C", trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  set_step_tokens(o, 512);
  o.kv_tokens = small ? 60000 : 200000;
  o.engine.flex_tokens = system == "flex 0" ? 0 : system == "flex 64" ? 64 : 16;
  o.conductor.placement = find_placement_policy("least_loaded");
  const Result<Simulation> simulation = simulate(o, trace);
  if (!simulation) return simulation.error();
  const Simulation& run = simulation.value();
  Finding found{{}, unserved(run, trace)};
  if (!found.wrong.empty()) return found;
  std::vector<double> ttft, gaps, tails;
  double last_s = 0, done = 0;
  for (size_t i = size_t(jobs); i < run.records.size(); ++i) {
    const SimulatedRecord& r = run.records[i];
    ttft.push_back(r.times.first_s - r.arrival_s), tails.push_back(r.times.worst_tenth());
    gaps.insert(gaps.end(), r.times.gaps.begin(), r.times.gaps.end());
    last_s = std::max(last_s, r.last_s);
  }
  for (int i = 0; i < jobs; ++i)
    if (const SimulatedRecord& r = run.records[size_t(i)]; r.last_s <= last_s) done += 2048 + 256;
  for (auto* of : {&ttft, &gaps, &tails}) std::ranges::sort(*of);
  found.rows.push_back({{"ttft_mean_s", summarize(ttft).mean},
                        {"ttft_p90_s", percentile_seen(ttft, 90)},
                        {"gap_mean_s", summarize(gaps).mean},
                        {"gap_p99_s", percentile_seen(gaps, 99)},
                        {"tail_mean_s", summarize(tails).mean},
                        {"job_tokens_per_s", done / last_s},
                        {"preemptions", run.preemptions}});
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("flex_jobs", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::flex_jobs_experiment
