// pd_ratio: six instances, from 1P5D to 5P1D, and 6C: the share of requests that meet their
// objectives, by the rate at which they come. Goodput is the rate at which 90 % still do.
//
// The simulator (experiments/simulate/), Llama-3.1-8B, 100 Gb/s, push layer by layer, at most 64
// sequences an instance. `prompts`: 4,000 tokens of prompt, 200 of output; `outputs`: 500 and 300; both plus or minus a
// half, uniform. Objectives: first token within 1 s, and 30 ms for the mean of a request's longest 10 % of gaps
// (Mooncake's TBT). Requests come for 8 s, as a Poisson process; three traces. Goodput is found by bisection: a grid of
// rates makes it what a line between two neighbours is.
//
// Arithmetic. `prompts`: P computes 33,000 tokens/s, 8.2 requests/s. A D with 64 sequences of 4,100
// reads 16 GB of weights and 34 GB of KV a step, 19 ms: 64 / (200 x 19 ms) = 17 requests/s. The
// smaller of the two sides: 1P5D 8, 2P4D 16, 3P3D 25, 4P2D 33, 5P1D 17: best at 4P2D, and queues
// take 5 to 30 % of it. `outputs`: a P 65 requests/s, a D 64 / (300 x 8 ms) = 27: 1P5D 65, 2P4D
// 108, 3P3D 81, 4P2D 54, 5P1D 27: best at 2P4D. So the ratio is worth a factor of three to four,
// and the best one for one load gives half of the best for the other. 6C, in chunks of 512: a step
// with a chunk is 17 to 25 ms, below the objective, and no instance idles: 0.5 to 1.4 of the best
// ratio. And what the window gives: requests come for 8 s, and the last may wait 1 s for their
// first token, so that up to an eighth more than the steady rate passes: 33 is up to 37, 108 up to
// 122. A ratio of two goodputs may keep or lose it on either side.
#include <algorithm>

#include "base/random.h"
#include "base/stats.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::pd_ratio_experiment {
namespace {

using namespace disagg;

constexpr double kTtft = 1, kTbt = 0.030;  // seconds
constexpr int kDraws = 3;                  // traces
constexpr int kSteps = 6;                  // of a bisection between 0.4 and 1.6 of what is carried: 2 % of it

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* work : {"prompts", "outputs"})
    for (const char* topology : {"1P5D", "2P4D", "3P3D", "4P2D", "5P1D", "6C"})
      for (int draw = 0; draw < kDraws; ++draw)
        all.push_back({{"work", work}, {"topology", topology}, {"sample", draw}});
  return all;
}

// Requests a second that the slower of the two sides carries: the arithmetic above.
double carried(bool prompts, const std::string& topology) {
  const double of_p = prompts ? 8.2 : 65, of_d = prompts ? 17 : 27;
  if (topology == "6C") return prompts ? 33 : 108;  // as the best ratio
  const int p = topology[0] - '0';
  return std::min(p * of_p, (6 - p) * of_d);
}

// One rate: its row, or what is wrong.
Result<Values> at_rate(const Values& point, double rate, const Setting& setting, std::string& wrong) {
  const bool prompts = point["work"] == "prompts";
  const int prompt = prompts ? 4000 : 500, output = prompts ? 200 : 300;
  const double seconds = setting.tiny ? 0.3 : 8;
  Random random(setting.seed + 11 + 1000 * uint64_t(int(point["sample"])));
  Trace trace{.block_tokens = 16};
  auto around = [&random](int n) { return int(n * (0.5 + random.uniform())); };
  for (double now = random.exponential() / rate; now < seconds || trace.requests.empty();
       now += random.exponential() / rate) {
    const int tokens = around(prompt);
    add_request(trace, now, tokens, setting.tiny ? 8 : around(output));
  }
  SimulationOptions options = simulated_h100(point["topology"], trace);
  if (options.topology == "6C") set_step_tokens(options, 512);
  options.kv_tokens = setting.tiny ? 24000 : 400000;
  const Result<Simulation> simulation = simulate(options, trace);
  if (!simulation) return simulation.error();
  const Simulation& run = simulation.value();
  wrong = unserved(run, trace);
  if (!wrong.empty()) return Values();
  std::vector<double> ttft, tails;
  int good = 0;
  for (const SimulatedRecord& r : run.records) {
    ttft.push_back(r.times.first_s - r.arrival_s);
    tails.push_back(r.times.worst_tenth());
    good += r.times.keeps({kTtft, kTbt}, r.arrival_s);
  }
  return Values{{"rate", rate},
                {"requests", run.records.size()},
                {"good_share", double(good) / double(run.records.size())},
                {"ttft_mean_ms", 1e3 * summarize(ttft).mean},
                {"tail_tbt_mean_ms", 1e3 * summarize(tails).mean},
                {"preemptions", run.preemptions}};
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const double all = carried(point["work"] == "prompts", point["topology"]);
  double low = 0.4 * all, high = 1.6 * all;
  Finding found;
  for (int step = 0; step < (setting.tiny ? 1 : kSteps); ++step) {
    const double rate = (low + high) / 2;
    Result<Values> row = at_rate(point, rate, setting, found.wrong);
    if (!row) return row.error();
    if (!found.wrong.empty()) return found;
    found.rows.push_back(row.value());
    (double(row.value()["good_share"]) >= 0.9 ? low : high) = rate;
  }
  for (Values& row : found.rows) row["goodput"] = (low + high) / 2;
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("pd_ratio", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::pd_ratio_experiment
