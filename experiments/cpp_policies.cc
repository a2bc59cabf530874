// cpp_policies: what are the chunk policies worth to a pipeline, by load and window, and how far are they from the best
// way to cut a prompt (experiments/chunk_oracle.h): the server's own engine and policies, in virtual time?
//
// One instance of eight stages, Llama-3-70B in bf16 on one H200 each (experiments/simulate/hardware.cc), the costs that
// cpp_surface has; a boundary as there. Steps of 8,192 tokens. Loads: one prompt of 131,072 tokens; `cold`: 48 of
// these, 16 at once, each user asking again when he is answered. Output: one token.
//
// Arithmetic. A stage takes c = 5.75 ms, b = 40.6 us a token, and .75 ns for each token that one looks at: 8,192 tokens
// take .36 s at first and 1.1 s at the end of 131,072, whose sum is 11.7 s. One prompt: fixed 11.8 + 7 * 1.1 = 19.5 s;
// equal_time 13.2 (2 sqrt(7 U c) + 7 c more, and it rounds to blocks of 512): 1.4 to 1.5 times as fast, dp_oracle as
// equal_time to 2 %.
// cold: prompts follow one another, all stages are busy but where a small chunk of the next prompt waits for the large
// ones of the last: W = P loses 1.2 to 1.45 in fixed chunks (cpp_surface), little in equal ones (1 to 1.1); with W = 2P
// equal_time gains little over fixed (.97 to 1.05). WavePP (2026-09): independent waves +236 % over lockstep.
#include <algorithm>

#include "experiments/chunk_oracle.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::cpp_policies_experiment {
namespace {

using namespace disagg;

constexpr int kBlock = 512, kStages = 8, kTokens = 131072, kStepTokens = 8192;

struct Load {
  const char* name;
  int prompts, at_once;
};
constexpr Load kLoads[] = {{"one", 1, 1}, {"cold", 48, 16}};

const ChunkPolicy* find_policy(const std::string& name) {
  return name == kChunkOracle.name ? &kChunkOracle : find_chunk_policy(name);
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const Load& load : kLoads)
    for (const char* policy : {"fixed", "equal_time", "dp_oracle"})
      for (int window : {kStages, 2 * kStages})
        if (!setting.tiny || load.prompts == 1)
          all.push_back({{"load", load.name}, {"policy", policy}, {"window", window}});
  return all;
}

Trace trace_of(const Load& load, bool tiny) {
  const int tokens = kTokens / (tiny ? 16 : 1);
  Trace trace{.block_tokens = kBlock};
  trace.closed_loop = true;
  for (int i = 0; i < load.prompts; ++i) {
    TraceRequest request{.arrival_s = 0, .prompt_tokens = tokens, .output_tokens = 1};
    request.after = i < load.at_once ? -1 : i - load.at_once;
    for (int b = 0; b < tokens / kBlock; ++b) request.blocks.push_back(uint64_t(i + 2) * 100000 + uint64_t(b));
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

Result<Finding> measure(const Values& point, bool tiny) {
  const std::string name = point["load"];
  const Load& load = *std::find_if(std::begin(kLoads), std::end(kLoads), [&](const Load& l) { return l.name == name; });
  const Trace trace = trace_of(load, tiny);
  Result<SimulationOptions> made = simulated("h200x1", "llama-3-70b", "1C", trace);
  if (!made) return made.error();
  SimulationOptions options = std::move(made).value();
  options.block_tokens = kBlock;
  options.hardware.link_bytes_per_s = 50e9;
  options.prefill_pp = kStages;
  options.pipeline_window = point["window"];
  set_step_tokens(options, kStepTokens / (tiny ? 16 : 1));
  options.engine.max_batch = load.at_once;
  options.engine.chunks.policy = find_policy(point["policy"]);
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

Measure open(const Setting& setting) {
  return [tiny = setting.tiny](const Values& point) { return measure(point, tiny); };
}

REGISTER_EXPERIMENT("cpp_policies", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::cpp_policies_experiment
