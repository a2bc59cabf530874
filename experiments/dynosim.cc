// dynosim: DynoSim's published figures of a KV router against round robin, on the simulator: eight colocated workers,
// the tool&agent load in a closed loop of 256 or 512 requests at once. simulator_speed: the seconds that simulating
// takes.
//
// Theirs: MiniMax-M2.5 on four B200 a worker, the trace itself. Here: Llama-3-70B on four H200 (neither card nor model
// is in the tables), and the generated tool&agent, 6,000 of its requests: request i comes when request i - c has ended.
// `dynamo` is their router's published logit (no decay, temperature 0), `mooncake` Algorithm 1.
//
// Arithmetic. Reuse is the load's and the caches': of round robin what is hot everywhere, .38 in theirs, and here (4P4D
// finds .36); the router finds what is somewhere, up to .55: .40 to .50. With c requests at eight workers 32 or 64
// share each; a prompt waits for those queued at its worker, and round robin's queues are uneven by prompts of uneven
// length: TTFT 1.5 to 5 times. Requests a second: c / (TTFT + decode), of which decode is most: 1 to 1.3 times.
//
// Speed. DynoSim: 23,608 requests, eight workers, blocks of 512 in 2.41 s on one thread of an M4, 60.1 simulated
// minutes. The generated tool&agent is 23,608 requests in an hour of blocks of 512. Here a step is planned by the
// server's own policy over its own memory; a request takes some 30 steps that are not alike, 1 to 3 us a sequence each,
// and its conductor's messages: 50 to 500 us, 1.2 to 12 s, on one thread of a slower processor.
#include <chrono>

#include "experiments/simulated.h"

namespace xpyd::experiments::dynosim_experiment {
namespace {

using namespace disagg;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int concurrency : {256, 512})
    for (const char* placement : {"round_robin", "dynamo", "mooncake"})
      for (int draw = 0; draw < (setting.tiny ? 1 : 3); ++draw)
        all.push_back({{"concurrency", concurrency}, {"placement", placement}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const int concurrency = setting.tiny ? 8 : int(point["concurrency"]);
  Trace trace = generate_tool_agent({.seed = setting.seed + uint64_t(int(point["sample"]))});
  trace = window(trace, 0, setting.tiny ? 60 : 6000);
  trace.closed_loop = true;
  for (int i = 0; i < int(trace.requests.size()); ++i) {
    TraceRequest& request = trace.requests[size_t(i)];
    request.arrival_s = 0;
    request.think_s = 0;
    request.after = i - concurrency;
  }
  Result<SimulationOptions> options = simulated("h200x4", "llama-3-70b", "8C", trace);
  if (!options) return options.error();
  options.value().conductor.placement = find_placement_policy(std::string(point["placement"]));
  Result<Simulation> run = simulate(options.value(), trace);
  if (!run) return run.error();
  Finding found;
  Values row = outcome(run.value(), kNoObjectives, found.wrong);
  row["requests_per_s"] = double(trace.requests.size()) / run.value().end_s;
  found.rows.push_back(row);
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("dynosim", "cpu", points, open);

// ---- simulator_speed.

Result<Finding> speed(const Values& point, const Setting& setting) {
  Trace trace = generate_tool_agent({.seed = setting.seed});
  trace = window(trace, 0, setting.tiny ? 60 : trace.requests.size());
  Result<SimulationOptions> options = simulated("h200x4", "llama-3-70b", "8C", trace);
  if (!options) return options.error();
  options.value().conductor.placement = find_placement_policy(std::string(point["placement"]));
  const auto began = std::chrono::steady_clock::now();
  Result<Simulation> run = simulate(options.value(), trace);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  if (!run) return run.error();
  Finding found;
  found.wrong = unserved(run.value(), trace);
  found.rows.push_back({{"requests", trace.requests.size()},
                        {"seconds", took.count()},
                        {"simulated_s", run.value().end_s},
                        {"steps", run.value().steps},
                        {"events", run.value().events}});
  return found;
}

std::vector<Values> speed_points(const Setting&) { return {{{"placement", "dynamo"}}}; }

REGISTER_EXPERIMENT("simulator_speed", "cpu", speed_points, [](const Setting& setting) -> Measure {
  return [setting](const Values& point) { return speed(point, setting); };
});

}  // namespace
}  // namespace xpyd::experiments::dynosim_experiment
