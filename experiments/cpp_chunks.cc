// cpp_chunks: How much do the chunk policies gain in a pipeline of eight stages, by load and window?
// Paper: WavePP (2026-09) section 4.6 and its ablation; TeraPipe (ICML'21); SGLang's dynamic chunks.
// Set-up: the chunk policies on the server's own engine in virtual time. Eight stages, Llama-3-70B with one H200 a
//   stage, steps of 8,192 tokens. one: a prompt of 131,072 tokens. cold: 48 of these, 16 at once. `dp_oracle` is
//   TeraPipe's dynamic program over the same costs, all of which it knows.
// Command: make exp-cpp_chunks (seconds; virtual).
// Expected: a stage takes 5.75 ms, 40.6 us a token and .75 ns for each token that one attends to. 8,192 tokens take .36
//   s at first and 1.1 s at the end, 11.7 s in all. One prompt: fixed 11.8 + 7 * 1.1 = 19.5 s, equal_time 13.2 s, so
//   1.4 to 1.5 times as fast; the oracle within 3 % of that. cold: W = P loses 1.2 to 1.45 with fixed chunks, little
//   with equal ones.
// Found: equal_time is 1.39 times as fast as fixed on one prompt, as the oracle; W = P costs 1.35, not WavePP's 3.36.
#include "experiments/cpp_chunks.h"

#include <algorithm>

#include "experiments/chunk_oracle.h"
#include "experiments/experiment.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::cpp_chunks_experiment {
namespace {

namespace policies {

using namespace disagg;

constexpr int kBlock = 512, kStages = 8, kStepTokens = 8192;
constexpr double kLink = 50e9;  // bytes/s between stages

struct Load {
  const char* name;
  int prompts, at_once, tokens;
};
constexpr Load kLoads[] = {{"one", 1, 1, 131072}, {"cold", 48, 16, 131072}};
std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const Load& load : kLoads)
    for (const char* policy : {"fixed", "equal_time", "dp_oracle"})
      for (int window : {kStages, 2 * kStages})
        if (load.prompts == 1 || !setting.tiny)
          all.push_back({{"load", load.name}, {"policy", policy}, {"window", window}});
  return all;
}

Trace trace_of(const Load& load, bool tiny) {
  const int tokens = load.tokens / (tiny ? 16 : 1);
  Trace trace{.block_tokens = kBlock};
  trace.closed_loop = true;
  for (int i = 0; i < load.prompts; ++i) {
    add_request(trace, 0, tokens, 1);
    trace.requests.back().after = std::max(-1, i - load.at_once);
  }
  return trace;
}

Result<Finding> measure(const Values& point, const Setting& setting) {
  const bool tiny = setting.tiny;
  const std::string name = point["load"], wanted = point["policy"];
  const Load& load = *std::ranges::find(kLoads, name, &Load::name);
  const int step_tokens = kStepTokens / (tiny ? 16 : 1);
  const Trace trace = trace_of(load, tiny);
  SimulationOptions options = simulated("h200x1", "llama-3-70b", "1C", trace).value();
  options.block_tokens = kBlock;
  options.hardware.link_bytes_per_s = kLink;
  options.prefill_pp = kStages;
  options.pipeline_window = point["window"];
  set_step_tokens(options, step_tokens);
  options.engine.max_batch = load.at_once;
  options.engine.chunks = wanted == kChunkOracle.name ? &kChunkOracle : find_chunk_policy(wanted);
  options.conductor.placement = find_placement_policy("least_loaded");
  const Result<Simulation> run = simulate(options, trace);
  if (!run) return run.error();
  Finding finding{{}, unserved(run.value(), trace)};
  double begin = 1e300, first = 0, tokens = 0, end = 0;
  for (const SimulatedRecord& record : run.value().records) {
    begin = std::min(begin, record.arrival_s), end = std::max(end, record.last_s);
    first += record.times.first_s - record.arrival_s;
    tokens += record.prompt;
  }
  finding.rows.push_back({{"tokens_per_s", tokens / (end - begin)},
                          {"ttft_s", first / load.prompts},
                          {"waves", run.value().steps},
                          {"busy", run.value().prefill_busy_s / (end - begin)}});
  return finding;
}

REGISTER_EXPERIMENT("cpp_chunks", "cpu", points, each<measure>);

}  // namespace policies

// cpp_chunks/window: 16 prompts, and one, by the number of chunks in flight. A prompt takes 55.5 s on one stage, of
// which attention has .55, and 30 ms a chunk.
//
// Expected: a chunk of 6K is 2.6 s of work: 2.63 / (2.6 + 8 * .03) = .93. Filling the pipeline takes 3 %: .90.
namespace window {

constexpr double kS = 131072;
constexpr int kQueued = 16;

ChunkCost cost_of(double t1_s, double q, double c_s) {
  return {.stage_s = c_s, .b = (1 - q) * t1_s / kS, .a = q * t1_s / (kS * kS)};
}

// The time until all chunks have left, with `queued` prompts of these chunks and nothing else.
double makespan(const ChunkCost& cost, const std::vector<Chunk>& chunks, int stages, int queued, int window) {
  return pipeline_times(stream(cost, chunks, stages, queued), window).end();
}

std::vector<Values> sweep_points(const Setting&) {
  std::vector<Values> all;
  for (int queued : {1, kQueued})
    for (const char* chunks : {"6K", "equal time"})
      for (int window : {8, 9, 10, 12, 16, 0})
        all.push_back({{"queued", queued}, {"chunks", chunks}, {"window", window}});
  return all;
}

Result<Finding> sweep(const Values& point) {
  constexpr int kStages = 8;
  const ChunkCost cost = cost_of(55.5, .55, .030);
  const std::string name = point["chunks"];
  const auto chunks = name == "equal time" ? best_equal_time(cost, 0, kS, kStages) : cut(0, kS, fixed_chunks(6144));
  const int queued = point["queued"];
  const double end = makespan(cost, chunks, kStages, queued, point["window"]);
  double one_stage = 0;
  for (double t : stage_seconds(cost, chunks, 1)) one_stage += t;
  return Finding{
      {{{"n_chunks", int(chunks.size())}, {"efficiency", queued * one_stage / (kStages * end)}, {"seconds", end}}}, ""};
}

REGISTER_EXPERIMENT("cpp_chunks/window", "cpu", sweep_points, [](const Setting&) -> Measure { return sweep; });

}  // namespace window

// cpp_chunks/lockstep: WavePP's ablation (lockstep 8,826, waves 29,692 tokens/s): 16 prompts of 16 chunks whose length
// grows linearly by `growth`.
//
// Expected: W < P uses W / P of the pipeline. With W = P the eighth chunk waits for the longest before it: 5.6 of 24 at
// growth 2, 16.8 of 40 at 4. So 2P gains 1.1 to 1.3, and 1.25 to 1.55. Their factor of 3.36 is another loss.
namespace lockstep {

constexpr int kStages = 8;

std::vector<Values> lockstep_points(const Setting&) {
  std::vector<Values> all;
  for (double growth : {1., 2., 4.})
    for (int window : {1, 2, 4, 8, 16, 0}) all.push_back({{"growth", growth}, {"window", window}});
  return all;
}

Result<Finding> lockstep(const Values& point) {
  constexpr int kQueued = 16, kChunks = 16;
  const double growth = point["growth"];
  std::vector<double> seconds;
  double sum = 0;
  for (int i = 0; i < kChunks; ++i) sum += seconds.emplace_back(1 + (growth - 1) * i / (kChunks - 1));
  std::vector<PipelineChunk> chunks;
  for (int i = 0; i < kQueued * kChunks; ++i)
    chunks.push_back({std::vector<double>(kStages, seconds[size_t(i % kChunks)])});
  return Finding{{{{"efficiency", kQueued * sum / pipeline_times(chunks, point["window"]).end()}}}, ""};
}

REGISTER_EXPERIMENT("cpp_chunks/lockstep", "cpu", lockstep_points, [](const Setting&) -> Measure { return lockstep; });

}  // namespace lockstep

}  // namespace
}  // namespace xpyd::experiments::cpp_chunks_experiment
