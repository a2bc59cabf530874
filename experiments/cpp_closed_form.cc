// cpp_closed_form: is the time of a prompt in a pipeline of chunks the sum of its chunks and (P - 1) times the longest?
//
// Against two published runs of DeepSeek-V3, 11 chunks of 5,120 tokens (tt-metal #49903): on one rank a chunk takes
// 2.754 s in the mean and the last 3.947, on two ranks a stage's chunk 1.235 and the last 1.828; the prompt 30.31 and
// 15.63 s.
//
// Arithmetic. 11 * 2.754 = 30.29 s: one rank is only the sum, 0.05 % short, and tests nothing. Two: 11 * 1.235 + 1.828
// = 15.41 s, 1.4 % short of 15.63: two boundaries and what is at the ends. The closed form needs of the times only
// their sum and the longest, so the recurrence must say the same of chunks that grow on a line from 2 mean - last. Such
// a line ends at 3.947 / 1.561 = 2.53 times where it began; published are 2.4 to 2.5. Speed-up: 30.29 / 15.41 = 1.966,
// published 30.31 / 15.63 = 1.94. From one rank's chunks alone, halved: 15.15 + 1.97 = 17.12 s, 9.5 % too long: a half
// of the layers took 1.235 s and not 1.377, so what a stage gains beside its share of the layers is not in the model.
#include <algorithm>

#include "experiments/experiment.h"
#include "model/pipeline_time.h"

namespace xpyd::experiments::cpp_closed_form_experiment {
namespace {

struct Run {
  int ranks;
  double mean_s, last_s;  // of a chunk on one stage
  double prompt_s;
};
constexpr int kChunks = 11;
constexpr Run kRuns[] = {{1, 2.754, 3.947, 30.31}, {2, 1.235, 1.828, 15.63}};  // tt-metal #49903

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const Run& run : kRuns) all.push_back({{"ranks", run.ranks}});
  return all;
}

// Chunks with this mean and this last, growing by as much each.
std::vector<double> on_a_line(const Run& run, int ranks) {
  std::vector<double> seconds;
  const double first = 2 * run.mean_s - run.last_s;
  for (int i = 0; i < kChunks; ++i)
    seconds.push_back((first + (run.last_s - first) * i / (kChunks - 1)) * run.ranks / ranks);
  return seconds;
}

Result<Finding> measure(const Values& point) {
  const int ranks = point["ranks"];
  const Run& run = *std::find_if(std::begin(kRuns), std::end(kRuns), [&](const Run& r) { return r.ranks == ranks; });
  const std::vector<double> seconds = on_a_line(run, ranks);
  std::vector<model::PipelineChunk> chunks;
  for (double t : seconds) chunks.push_back({std::vector<double>(size_t(ranks), t)});
  return Finding{{{{"measured_s", run.prompt_s},
                   {"closed_s", kChunks * run.mean_s + (ranks - 1) * run.last_s},
                   {"recurrence_s", model::pipeline_times(chunks, 0).end()},
                   {"from_one_rank_s", model::pipeline_seconds(on_a_line(kRuns[0], ranks), ranks)},
                   {"growth", seconds.back() / seconds.front()}}},
                 ""};
}

Measure open(const Setting&) { return measure; }

REGISTER_EXPERIMENT("cpp_closed_form", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::cpp_closed_form_experiment
