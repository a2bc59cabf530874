// cpp_policies: what are the chunk policies worth to a pipeline, by load and window: the server's own engine and
// policies, in virtual time?
//
// One instance of eight stages, Llama-3-70B in bf16 on one H200 each (experiments/simulate/hardware.cc), the costs that
// cpp_surface has; a boundary as there. Steps of 8,192 tokens; mpu, and `fixed 16K` beside it, have 16,384, and mpu's
// b_min is 8,192, as in WavePP (2026-09). Loads: one prompt of 131,072 tokens; `cold`: 48 of these, 16 at once, each
// user asking again when he is answered; `reuse 131K`: 64 prompts, 8 at once, of which 90 % is common and in the cache;
// `reuse 262K`: 128 of 262,144, 32 at once, 90 %. Output: one token.
//
// Arithmetic. A stage takes c = 5.75 ms, b = 40.6 us a token, and .75 ns for each token that one looks at: 8,192 tokens
// take .36 s at first and 1.1 s at the end of 131,072, whose sum is 11.7 s. One prompt: fixed 11.8 + 7 * 1.1 = 19.5 s;
// equal_time 13.2 (2 sqrt(7 U c) + 7 c more, and it rounds to blocks of 512): 1.4 to 1.5 times as fast, dp_oracle as
// equal_time to 2 %. sglang keeps a chunk's time near the first one's: 30 chunks, 11.9 + 7 * .45: 1.2 to 1.4. dcp's
// candidates end at 2,048: 64 chunks, 12.0 + 7 * .28: 1.3 to 1.45. mpu finds 8 waves of 16,384 where it wants 16, and
// halves: as fixed.
// cold: prompts follow one another, all stages are busy but where a small chunk of the next prompt waits for the large
// ones of the last: W = P loses 1.2 to 1.45 in fixed chunks (cpp_surface), little in equal ones (1 to 1.1); with W = 2P
// equal_time gains little over fixed (.97 to 1.05). WavePP: independent waves +236 % over lockstep, MPU +1.4 %.
// reuse 131K, 8 at once: 13,107 new tokens each, 104,858 in the pipeline: 12.8 waves of 8,192 fill eight stages,
// and 6.4 of 16,384 do not: mpu, which halves, is 1.15 to 1.35 times fixed 16K. WavePP: +41.7 %. reuse 262K, 32 at
// once: 838,861 tokens are 51 waves of 16,384: mpu has nothing to gain, .93 to 1.03. WavePP: -9.7 %.
#include <algorithm>

#include "experiments/simulated.h"

namespace xpyd::experiments::cpp_policies_experiment {
namespace {

using namespace disagg;

constexpr int kBlock = 512, kStages = 8;

struct Load {
  const char* name;
  int prompts, at_once, tokens;
  double reused;
};
constexpr Load kLoads[] = {{"one", 1, 1, 131072, 0},
                           {"cold", 48, 16, 131072, 0},
                           {"reuse 131K", 64, 8, 131072, .9},
                           {"reuse 262K", 128, 32, 262144, .9}};
constexpr struct {
  const char *name, *policy;
  int step_tokens, minimum;
} kPolicies[] = {{"fixed", "fixed", 8192, 0},           {"fixed 16K", "fixed", 16384, 0},
                 {"sglang", "sglang", 8192, 0},         {"equal_time", "equal_time", 8192, 0},
                 {"dp_oracle", "dp_oracle", 8192, 0},   {"mpu", "mpu", 16384, 8192},
                 {"dcp_greedy", "dcp_greedy", 8192, 0}, {"dcp_predictive", "dcp_predictive", 8192, 0}};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const Load& load : kLoads)
    for (const auto& policy : kPolicies)
      for (int window : {kStages, 2 * kStages})
        if (!setting.tiny || load.prompts == 1)
          all.push_back({{"load", load.name}, {"policy", policy.name}, {"window", window}});
  return all;
}

// What is common is asked for once before, by nobody who counts.
Trace trace_of(const Load& load, bool tiny) {
  const int tokens = load.tokens / (tiny ? 16 : 1), common = int(load.reused * tokens) / kBlock;
  Trace trace{.block_tokens = kBlock};
  trace.closed_loop = true;
  const int warm = common > 0 ? 1 : 0;
  for (int i = -warm; i < load.prompts; ++i) {
    const int before = i < 0 ? -1 : i < load.at_once ? warm - 1 : warm + i - load.at_once;
    TraceRequest request{.arrival_s = 0, .prompt_tokens = tokens, .output_tokens = 1};
    request.after = before;
    for (int b = 0; b < tokens / kBlock; ++b)
      request.blocks.push_back(b < common ? uint64_t(b) + 1 : uint64_t(i + 2) * 100000 + uint64_t(b));
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

Result<Finding> measure(const Values& point, bool tiny) {
  const std::string name = point["load"], wanted = point["policy"];
  const Load& load = *std::find_if(std::begin(kLoads), std::end(kLoads), [&](const Load& l) { return l.name == name; });
  const auto& policy = *std::find_if(std::begin(kPolicies), std::end(kPolicies),
                                     [&](const auto& p) { return p.name == wanted; });
  const Trace trace = trace_of(load, tiny);
  Result<SimulationOptions> made = simulated("h200x1", "llama-3-70b", "1C", trace);
  if (!made) return made.error();
  SimulationOptions options = std::move(made).value();
  options.block_tokens = kBlock;
  options.hardware.link_bytes_per_s = 50e9;
  options.prefill_pp = kStages;
  options.pipeline_window = point["window"];
  set_step_tokens(options, policy.step_tokens / (tiny ? 16 : 1));
  options.engine.max_batch = load.at_once;
  options.engine.chunks.policy = find_chunk_policy(policy.policy);
  options.engine.chunks.minimum = policy.minimum;
  options.conductor.placement = find_placement_policy("least_loaded");
  const Result<Simulation> run = simulate(options, trace);
  if (!run) return run.error();
  Finding finding{{}, unserved(run.value(), trace)};
  double begin = 1e300, first = 0, tokens = 0, end = 0;
  for (size_t i = trace.requests.size() - size_t(load.prompts); i < trace.requests.size(); ++i) {
    const SimulatedRecord& record = run.value().records[i];
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
