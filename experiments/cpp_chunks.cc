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

}  // namespace
}  // namespace xpyd::experiments::cpp_chunks_experiment
