// pd_ratio: six instances, from 1P5D to 5P1D, and 6C: the share of requests that meet their
// objectives, by the rate at which they come. Goodput is the rate at which 90 % still do.
//
// The real instances in virtual time (timed_cluster.h), Llama-3.1-8B, 100 Gb/s, push layer by
// layer, at most 64 sequences an instance. `prompts`: 4,000 tokens of prompt, 200 of output;
// `outputs`: 500 and 300; both plus or minus a half, uniform. Objectives: first token within 1 s,
// and 30 ms for the mean of a request's longest 10 % of gaps (Mooncake's TBT). Requests come for 8
// s, as a Poisson process.
//
// Arithmetic. `prompts`: P computes 33,000 tokens/s, 8.2 requests/s. A D with 64 sequences of 4,100
// reads 16 GB of weights and 34 GB of KV a step, 19 ms: 64 / (200 x 19 ms) = 17 requests/s. The
// smaller of the two sides: 1P5D 8, 2P4D 16, 3P3D 25, 4P2D 33, 5P1D 17: best at 4P2D, and queues
// take 5 to 30 % of it. `outputs`: a P 65 requests/s, a D 64 / (300 x 8 ms) = 27: 1P5D 65, 2P4D
// 108, 3P3D 81, 4P2D 54, 5P1D 27: best at 2P4D. So the ratio is worth a factor of three to four,
// and the best one for one load gives half of the best for the other. 6C, in chunks of 512: a step
// with a chunk is 17 to 25 ms, below the objective, and no instance idles: 0.5 to 1.4 of the best
// ratio.
#include <algorithm>

#include "base/random.h"
#include "base/stats.h"
#include "experiments/experiment.h"
#include "experiments/timed_cluster.h"

namespace xpyd::experiments {
namespace {

constexpr double kTtft = 1, kTbt = 0.030;  // seconds

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* work : {"prompts", "outputs"})
    for (const char* topology : {"1P5D", "2P4D", "3P3D", "4P2D", "5P1D", "6C"})
      for (int step = 1; step <= 8; ++step)
        all.push_back(
            {{"work", work}, {"topology", topology}, {"rate", step * (*work == 'p' ? 5 : 16)}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const bool prompts = point["work"] == "prompts";
  const int prompt = prompts ? 4000 : 500, output = prompts ? 200 : 300;
  const double rate = point["rate"], seconds = setting.tiny ? 0.3 : 8;
  Random random(setting.seed + 11);
  std::vector<TimedRequest> requests;
  auto around = [&random](int n) { return int(n * (0.5 + random.uniform())); };
  for (double now = random.exponential() / rate; now < seconds || requests.empty();
       now += random.exponential() / rate)
    requests.push_back({now, around(prompt), setting.tiny ? 8 : around(output)});
  TimedOptions options;
  options.topology = point["topology"];
  options.step_tokens = options.topology == "6C" ? 512 : 2048;
  options.pool_tokens = setting.tiny ? 24000 : 400000;
  const TimedRun run = run_timed(options, requests);
  if (!run.wrong.empty()) return Finding{{}, run.wrong};
  std::vector<double> ttft, tails;
  int good = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const std::vector<double>& at = run.records[i].token_s;
    std::vector<double> gaps;
    for (size_t t = 1; t < at.size(); ++t) gaps.push_back(at[t] - at[t - 1]);
    std::sort(gaps.begin(), gaps.end(), std::greater<>());
    gaps.resize((gaps.size() + 9) / 10);
    ttft.push_back(at[0] - requests[i].arrival_s);
    tails.push_back(summarize(gaps).mean);
    good += ttft.back() <= kTtft && tails.back() <= kTbt;
  }
  const Summary first = summarize(ttft), tail = summarize(tails);
  return Finding{{{{"requests", int(requests.size())},
                   {"good_share", double(good) / double(requests.size())},
                   {"ttft_p50_ms", 1e3 * first.median},
                   {"ttft_p90_ms", 1e3 * first.p90},
                   {"tail_tbt_p50_ms", 1e3 * tail.median},
                   {"tail_tbt_p90_ms", 1e3 * tail.p90},
                   {"preemptions", run.preemptions}}},
                 ""};
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("pd_ratio", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments
