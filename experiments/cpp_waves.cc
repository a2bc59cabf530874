// cpp_bubble: do WavePP's published ratios of a pipeline to tensor parallelism, one request at a time, follow from the
// bubble alone? cpp_lockstep: what do waves in flight gain over as many as there are stages?
//
// WavePP (2026-09), Kimi K3, 8 x GB300, tokens/s of PP8 (WavePP) and of the best of TP8 / EP8: cold, 32 at once: 65.5K
// 44,643 and 23,925; 131K 35,878 and 22,070; 262K 28,031 and 19,254. One at a time: 65.5K 22,089 and 23,330; 131K
// 20,699 and 21,430. Behind 90 % that are reused, one at a time: 63 % (131K) and 51 % (262K) below TP.
//
// Chunks are 8,192 (its b_min; a lone request has no larger), each as long as the next: attention there is linear but
// for a few layers. M chunks have M / (M + P - 1) of the pipeline. With 32 at once M is 256 to 1,024 and nearly nothing
// is lost, so the ratio of throughputs is what TP loses: o = ratio (M + 7) / M - 1. That is the one number taken from
// each length; one at a time the ratio must be (1 + o) M / (M + 7).
//
// Arithmetic. 65.5K: 1 + o = 1.866 * 263 / 256 = 1.917; M = 8: .533 * 1.917 = 1.02 (published .947). 131K: 1.648; M =
// 16: .696 * 1.648 = 1.15 (.966). Behind 90 % of 131K, 13,107 tokens: in two halves 2 / 9 * 1.648 = .366: 63 % below;
// as 8,192 and the rest (13,107 / (13,107 + 7 * 8,192)) .186 * 1.648 = .307: 69 % below. 262K: 1 + o = 1.466, 26,214
// tokens: four quarters 4 / 11: .533, 47 % below; 3 * 8,192 and 1,638: .314 * 1.466 = .46, 54 % below. So what is
// published of cold prompts is 7 to 19 % less than the bubble allows, and of short suffixes it is the bubble.
//
// cpp_lockstep: its ablation, cold 131K, 16 at once, PP8 on B300: lockstep 8,826, independent waves 29,692
// tokens/s: 3.36 times. Sixteen prompts of 16 chunks which grow on a line from first to last by `growth`; boundaries
// free. With W < P in flight a pipeline of equal chunks has W / P of itself. With W = P it has all, but where small
// chunks wait for the large ones of the prompt before: the eighth chunk of a prompt waits until the last before it has
// left, 7 t_last, while 7 first ones have run. Growth 2: 7 (2 - 1.2) = 5.6 of 24; growth 4: 16.8 of 40. So 2P gains 1.1
// to 1.3 at 2, 1.25 to 1.55 at 4, and nothing at 1. A ring whose slots all last as long as the longest
// chunk in it loses as much (the same, for chunks that grow: cpp_window.cc). So neither explains 3.36: that is what 8
// / 3.36 = 2.4 chunks in flight would have, another loss: a ring that also carries admission, and waits for it.
#include <algorithm>

#include "experiments/cpp_chunks.h"
#include "experiments/experiment.h"

namespace xpyd::experiments::cpp_waves_experiment {
namespace {

constexpr int kStages = 8;
constexpr double kChunk = 8192;

struct Length {
  const char* name;
  double tokens, pp, tp;  // 32 at once, tokens/s
  double one_pp, one_tp;  // one at a time; 0: not published
  double below;           // behind 90 %, one at a time: 1 - ratio; 0: not published
};
constexpr Length kLengths[] = {{"65.5K", 65536, 44643, 23925, 22089, 23330, 0},
                               {"131K", 131072, 35878, 22070, 20699, 21430, .63},
                               {"262K", 262144, 28031, 19254, 0, 0, .51}};

// Tokens of each chunk: at a second a token, its seconds.
std::vector<double> parts(double tokens, bool equal) {
  const int n = int((tokens + kChunk - 1) / kChunk);
  std::vector<double> sizes(size_t(n), equal ? tokens / n : kChunk);
  if (!equal) sizes.back() = tokens - (n - 1) * kChunk;
  return sizes;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const Length& length : kLengths)
    for (double reused : {0., .9})
      for (const char* cut_into : {"8K and the rest", "equal parts"})
        all.push_back({{"length", length.name}, {"reused", reused}, {"cut", cut_into}});
  return all;
}

Result<Finding> run(const Values& point) {
  const std::string name = point["length"];
  const Length& length = *std::ranges::find(kLengths, name, &Length::name);
  const double reused = point["reused"], tokens = (1 - reused) * length.tokens;
  const double many = 32 * length.tokens / kChunk;
  const double tp_over = length.pp / length.tp * (many + kStages - 1) / many;  // 1 + o
  const double ratio = tp_over * tokens /
                       model::pipeline_seconds(parts(tokens, point["cut"] == "equal parts"), kStages);
  const double published = reused > 0 ? (length.below > 0 ? 1 - length.below : 0)
                                      : (length.one_tp > 0 ? length.one_pp / length.one_tp : 0);
  return Finding{{{{"tp_over", tp_over}, {"ratio", ratio}, {"published", published}}}, ""};
}

REGISTER_EXPERIMENT("cpp_bubble", "cpu", points, [](const Setting&) -> Measure { return run; });

// ---- cpp_lockstep.

std::vector<Values> lockstep_points(const Setting&) {
  std::vector<Values> all;
  for (double growth : {1., 2., 4.})
    for (int window : {1, 2, 3, 4, 6, 8, 9, 10, 12, 16, 0}) all.push_back({{"growth", growth}, {"window", window}});
  return all;
}

Result<Finding> lockstep(const Values& point) {
  constexpr int kQueued = 16, kChunks = 16;
  const double growth = point["growth"];
  std::vector<double> seconds;
  double sum = 0;
  for (int i = 0; i < kChunks; ++i) sum += seconds.emplace_back(1 + (growth - 1) * i / (kChunks - 1));
  std::vector<model::PipelineChunk> chunks;
  for (int i = 0; i < kQueued * kChunks; ++i)
    chunks.push_back({std::vector<double>(kStages, seconds[size_t(i % kChunks)])});
  return Finding{{{{"efficiency", kQueued * sum / model::pipeline_times(chunks, point["window"]).end()},
                   {"slots_efficiency", kQueued * sum / in_slots(seconds, kStages, kQueued)}}},
                 ""};
}

REGISTER_EXPERIMENT("cpp_lockstep", "cpu", lockstep_points, [](const Setting&) -> Measure { return lockstep; });

}  // namespace
}  // namespace xpyd::experiments::cpp_waves_experiment
