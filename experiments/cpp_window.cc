// cpp_window_sweep: what the number of chunks in flight is worth by itself.
//
// Eight stages, 16 prompts of 131,072 tokens: a stage takes c = 30 ms a chunk, and attention has q = .55 of the 55.5 s of a
// prompt on one stage. Bounds: a chunk of 6K is 2.6 s of work, and c is paid on 8 stages: 2.63 / (2.6 + 8 * .03) = .93;
// filling is (P - 1) t_max, of 16 prompts 3 %: .90. The equal-time chunks are those that are best for one prompt: 40, which
// pay c so often: .87.
#include "experiments/cpp_chunks.h"
#include "experiments/experiment.h"

namespace xpyd::experiments::cpp_window_experiment {
namespace {

constexpr double kS = 131072;
constexpr int kQueued = 16;

ChunkCost cost_of(double t1_s, double q, double c_s) {
  return {.stage_s = c_s, .b = (1 - q) * t1_s / kS, .a = q * t1_s / (kS * kS)};
}

// Until all have left; nothing but `queued` prompts of these chunks.
double makespan(const ChunkCost& cost, const std::vector<Chunk>& chunks, int stages, int queued, int window) {
  return model::pipeline_times(stream(cost, chunks, stages, queued), window).end();
}

std::vector<Values> sweep_points(const Setting&) {
  std::vector<Values> all;
  for (int queued : {1, kQueued})
    for (const char* chunks : {"6K", "dynamic 18K", "equal time"})
      for (int window : {8, 9, 10, 12, 16, 0})
        all.push_back({{"queued", queued}, {"chunks", chunks}, {"window", window}});
  return all;
}

Result<Finding> sweep(const Values& point) {
  constexpr int kStages = 8;
  const ChunkCost cost = cost_of(55.5, .55, .030);
  const std::string name = point["chunks"];
  const auto chunks = name == "equal time"
                          ? best_equal_time(cost, 0, kS, kStages)
                          : cut(0, kS, name == "6K" ? fixed_chunks(6144) : sglang_chunks(cost, 18432, .75));
  const int queued = point["queued"];
  const double end = makespan(cost, chunks, kStages, queued, point["window"]);
  double one_stage = 0;
  for (double t : stage_seconds(cost, chunks, 1)) one_stage += t;
  return Finding{
      {{{"n_chunks", int(chunks.size())}, {"efficiency", queued * one_stage / (kStages * end)}, {"seconds", end}}}, ""};
}

REGISTER_EXPERIMENT("cpp_window_sweep", "cpu", sweep_points, [](const Setting&) -> Measure { return sweep; });

}  // namespace
}  // namespace xpyd::experiments::cpp_window_experiment
