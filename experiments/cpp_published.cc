// cpp_published: what else is published of pipelines of chunks beside ranks, read by the bubble alone (cpp_bubble).
//
// M equal chunks have M / (M + P - 1) of a pipeline of P stages, all their products' time U; tensor parallelism over
// the same cards takes (1 + o) U. A publication that gives two numbers fixes o (and, where it is not said, the chunk)
// by one of them; the other is what is asked.
//
// tt-metal #48246, Kimi on four ranks, medians of a chunk 412, 391, 413 and 439 ms: the recurrence with stages that
// differ (pipeline_time.h). A thousand chunks end in 1,000 x 439 + (412 + 391 + 413) ms: one each 439 + 1.2 ms, where
// four equal stages would have 413.75: 6 % more is lost than any window gives back.
//
// tt-metal #56307, Mistral-4 119B, PP4 beside one: 1.22 times as long at 25.6K, 1 / 1.12 at 102K, 1 / 1.15 at 261K.
// Chunks of 4,096, o by 102K: 1 + o = 1.12 * 28 / 25 = 1.25. At 25.6K 9.25 / 6.25 / 1.25 = 1.18 (published 1.22); at
// 261K 66.7 / 63.7 / 1.25 = .835 (.87). Of 2,048: 1.18: 1.04 and .86; of 8,192: 1.39: 1.42 and .79. So chunks of some
// 4K. One cold prompt is as long either way where (P - 1) x = o L: 49K.
//
// ATOM #1552, GLM-5.2 in MXFP4 on MI355X, PP4 beside TP4, prompts of 8,192, four at once: 2,317 and 2,344 tokens/s,
// median TTFT 704 and 484 ms. In four chunks of 2,048 four queued have 16 / 19, so 1 + o = .988 * 19 / 16 = 1.174; one
// by itself is 7 / 4 / 1.174 = 1.49 times as long (published 1.45). In one chunk 2.35, in sixteen 1.14.
//
// WavePP Table 1, 4K behind 125K, PP4 beside TensorRT-LLM: 128 at once 2.91 (GLM 5.2) and 2.02 (MiniMax); long reuse, 8
// at once, .88 and .824. One chunk each: 128 / 131, so 1 + o = 2.98 and 2.07; 8 at once 8 / 11 of that: 2.17 and 1.50.
// What is published is less than half: of those prompts the suffix is another, or what TP loses is.
//
// LMSYS, Kimi K3's day 0, 8K, PP8 beside TEP8: 1.45 to 1.72 times its capacity. Capacity has no bubble, so it is 1 + o,
// which WavePP's 32 at once give (cpp_bubble): 65.5K 1.92, 131K 1.65, 262K 1.47. Shorter prompts should have more than
// 1.92, as attention is less of them: above what is published.
#include <algorithm>
#include <cmath>

#include "experiments/experiment.h"
#include "model/pipeline_time.h"

namespace xpyd::experiments::cpp_published_experiment {
namespace {

// Seconds of `chunks` on `stages`, of those of one without a bubble.
double bubble(double chunks, int stages) { return (chunks + stages - 1) / chunks; }

// 1 + o from the ratio of two times, or of two rates, in so many chunks: what the bubble is not.
double over(double faster, double chunks, int stages) { return faster * bubble(chunks, stages); }

struct Case {
  const char *of, *asks;
  int stages;
  double tokens;      // of a prompt that is computed
  double known;       // how many times as fast the pipeline is …
  double known_many;  // … at so many at once
  double known_tokens;
  double asked_many, asked_tokens;
  double published;  // time of the pipeline / of ranks; of rates their inverse
};
constexpr double kK = 1000;
constexpr Case kCases[] = {
    {"Mistral-4", "25.6K", 4, 25.6 * kK, 1.12, 1, 102.4 * kK, 1, 25.6 * kK, 1.22},
    {"Mistral-4", "261K", 4, 261 * kK, 1.12, 1, 102.4 * kK, 1, 261 * kK, 1 / 1.15},
    {"GLM-5.2, MI355X", "one at a time", 4, 8192, 2317. / 2344, 4, 8192, 1, 8192, 704. / 484},
    {"GLM 5.2, WavePP", "8 at once", 4, 4096, 1212572. / 416294, 128, 4096, 8, 4096, 1 / .88},
    {"MiniMax, WavePP", "8 at once", 4, 4096, 2.02, 128, 4096, 8, 4096, 1 / .824},
    {"Kimi K3", "65.5K, capacity", 8, 65536, 44643. / 23925, 32, 65536, 1e9, 65536, 0},
    {"Kimi K3", "131K, capacity", 8, 131072, 35878. / 22070, 32, 131072, 1e9, 131072, 0},
    {"Kimi K3", "262K, capacity", 8, 262144, 28031. / 19254, 32, 262144, 1e9, 262144, 0},
};

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const Case& c : kCases)
    for (int chunk : {512, 1024, 2048, 4096, 8192}) all.push_back({{"of", c.of}, {"asks", c.asks}, {"chunk", chunk}});
  return all;
}

Result<Finding> run(const Values& point) {
  const std::string of = point["of"], asks = point["asks"];
  const Case& c = *std::ranges::find_if(kCases, [&](const Case& x) { return of == x.of && asks == x.asks; });
  const double x = point["chunk"];
  const auto chunks = [x](double many, double tokens) { return many * std::max(1.0, tokens / x); };
  const double tp_over = over(c.known, chunks(c.known_many, c.known_tokens), c.stages);
  return Finding{{{{"tp_over", tp_over},
                   {"ratio", bubble(chunks(c.asked_many, c.asked_tokens), c.stages) / tp_over},
                   {"equal_from", (c.stages - 1) * x / (tp_over - 1)},  // tokens of one prompt; below 0: never
                   {"published", c.published}}},
                 ""};
}

REGISTER_EXPERIMENT("cpp_published", "cpu", points, [](const Setting&) -> Measure { return run; });

// ---- cpp_slowest.

Result<Finding> slowest(const Values& point) {
  const std::vector<double> own = {.412, .391, .413, .439};
  const int n = point["chunks"], window = point["window"];
  const double mean = (own[0] + own[1] + own[2] + own[3]) / 4;
  const auto end = [&](const std::vector<double>& stages) {
    return model::pipeline_times(std::vector<model::PipelineChunk>(size_t(n), {.stage_s = stages}), window).end();
  };
  return Finding{{{{"chunk_ms", 1e3 * end(own) / n}, {"equal_chunk_ms", 1e3 * end(std::vector(4, mean)) / n}}}, ""};
}

std::vector<Values> slowest_points(const Setting&) {
  std::vector<Values> all;
  for (int chunks : {1, 16, 1000})
    for (int window : {4, 8, 0}) all.push_back({{"chunks", chunks}, {"window", window}});
  return all;
}

REGISTER_EXPERIMENT("cpp_slowest", "cpu", slowest_points, [](const Setting&) -> Measure { return slowest; });

}  // namespace
}  // namespace xpyd::experiments::cpp_published_experiment
