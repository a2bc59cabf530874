// truth: How close is the simulation of a cluster to the cluster if it knows only an event log of another load?
// Paper: DynoSim's documents; Vidur and LLMServingSim publish errors of one engine.
// Set-up: a live cluster beside its simulation from a calibration alone. Every instance is a thread and computes
//   llama-micro. A load with other lengths and arrivals precedes the one that is measured. The simulation gets nothing
//   except the steps and transfers in the former's event log (`xpyd calibrate`). Separate columns have the error of
//   predicted steps and transfers, and the recorded decisions that would now differ (`replay_differ`).
//   /simulator_speed: the 23,608 requests of tool&agent at eight workers (DynoSim: 2.41 s on an M4).
// Command: make exp-truth (2 minutes; measured, counted).
// Expected, two cores: a prompt of 240 tokens takes 50 ms, a decode step 1 ms. At half of a core's capacity every
//   second prompt waits: the median TTFT has the step's error and the queue's. Speed: 30 steps a request, 1 to 3
//   us a sequence each: 1.2 to 12 s.
// Found: the medians of TTFT and of gaps were within 7 % in one run, and up to 27 % off in another on a busier machine.
//   Every recorded decision comes again.
#include <chrono>

#include "base/files.h"
#include "experiments/event_log/calibrate.h"
#include "experiments/event_log/replay.h"
#include "experiments/load.h"
#include "experiments/load/arrivals.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::truth_experiment {
namespace {

using namespace disagg;

struct Sizes {
  int n_requests, prompt, output;
  const char* model;
};
Sizes sizes_of(const Setting& setting) {
  if (setting.tiny) return {4, 30, 4, "experiments/models/llama-tiny"};
  return {50, 300, 32, "experiments/models/llama-micro"};
}

// The unit of `load` is the capacity of one instance with one core. A D takes little of it, and two cores give two.
std::vector<Values> points(const Setting& setting) {
  if (setting.tiny) return {{{"topology", "1P1D"}, {"load", 0.5}, {"sample", 0}}};
  std::vector<Values> all;
  for (int draw = 0; draw < 3; ++draw)
    for (const auto& [topology, load] : {std::pair{"1C", 0.5}, {"1P1D", 0.5}, {"2P2D", 0.6}})
      all.push_back({{"topology", topology}, {"load", load}, {"sample", draw}});
  return all;
}

void use(SimulationOptions& o, const Calibration& calibration) {
  o.hardware.step_terms = calibration.step_terms;
  if (calibration.link_bytes_per_s > 0)
    o.hardware.link_bytes_per_s = calibration.link_bytes_per_s, o.hardware.link_s = 0;
}

SimulationOptions simulation_of(Build& build, const std::string& topology, const Trace& trace) {
  const ClusterOptions& live = build.options;
  SimulationOptions o = simulated("a800", "llama-3-8b", topology, trace).value();
  const KvShape& shape = live.kv.shape;
  o.model.n_layers = shape.n_layers;
  o.model.kv_element_bytes = 1;
  o.model.kv_elements = double(shape.token_bytes()) / shape.n_layers;
  o.kv_tokens = double(live.kv.pool_bytes) / double(shape.token_bytes());
  o.engine.max_batch = live.max_batch;
  o.engine.policy = live.batching;
  set_step_tokens(o, live.step_tokens);
  o.conductor.placement = live.placement;
  return o;
}

// Adds columns for the measured and the simulated percentile, and for simulated / measured - 1.
void add(Values& values, const std::string& name, std::vector<double> live, std::vector<double> simulated,
         int percent) {
  std::ranges::sort(live), std::ranges::sort(simulated);
  const Value a = percentile_seen(live, percent), b = percentile_seen(simulated, percent);
  const std::string column = name + "_p" + std::to_string(percent);
  values.update({{column + "_ms", a}, {column + "_simulated_ms", b}});
  if (a.is_number()) values.update({{column + "_off", double(b) / double(a) - 1}});
}

Measure open(const Setting& setting) {
  const Sizes sizes = sizes_of(setting);
  auto bed = std::make_shared<Bed>(
      setting, std::vector<std::string>{sizes.model, "--kv-bytes", setting.tiny ? "4MiB" : "256MiB", "--max-model-len",
                                        setting.tiny ? "256" : "1024", "--max-batch", setting.tiny ? "4" : "16",
                                        "--threads", "1", "--prefix-cache", "off", "--transport", "local"});
  return [=](const Values& point) -> Result<Finding> {
    const auto load = [&](int n, uint64_t seed) {
      return random_load(n, sizes.prompt, sizes.output, 0.8, seed).requests;
    };
    Result<double> capacity = bed->capacity(load(sizes.n_requests, setting.seed + 1000));
    if (!capacity) return capacity.error();
    const double rate = double(point["load"]) * capacity.value();
    const std::string topology = point["topology"];
    const PrivateFolder folder;
    const std::string calibrated_log = folder.path() + "/calibrated", measured_log = folder.path() + "/measured";
    Run live;
    Trace trace;
    std::optional<SimulationOptions> options;
    for (const bool measured : {false, true}) {
      const uint64_t seed = setting.seed + 2 * uint64_t(int(point["sample"])) + measured;
      const std::vector<BenchRequest> requests = load(sizes.n_requests, seed);
      const std::vector<double> due = arrival_times(sizes.n_requests, rate, false, 1, seed);
      Result<std::string> wrong = bed->open(
          {"--topology", topology, "--event-log", measured ? measured_log : calibrated_log});
      if (!wrong) return wrong.error();
      live = run_load(bed->build(), requests, due);
      for (const std::string& one : {wrong.value(), live.wrong})
        if (!one.empty()) return Finding{{}, one};
      if (!measured) continue;
      trace.block_tokens = bed->build().options.kv.block_tokens;
      for (size_t k = 0; k < requests.size(); ++k)
        add_request(trace, due[k], requests[k].input_tokens, requests[k].output_tokens);
      options = simulation_of(bed->build(), topology, trace);
    }
    bed->close();  // completes the logs
    const Result<Calibration> calibration = calibrate(std::span(&calibrated_log, 1));
    if (!calibration) return calibration.error();
    const Result<Calibration> seen = compare(calibration.value(), std::span(&measured_log, 1));
    if (!seen) return seen.error();
    use(*options, calibration.value());

    int64_t decisions = 0, differ = 0;
    const auto replayed = replay(std::span(&measured_log, 1), {}, [](const std::string&, const std::string&) {});
    if (!replayed) return replayed.error();
    for (const auto& [kind, count] : replayed.value()) decisions += count.decisions, differ += count.differ;
    const Result<Simulation> simulation = simulate(*options, trace);
    if (!simulation) return simulation.error();
    std::string wrong = unserved(simulation.value(), trace);
    if (!wrong.empty()) return Finding{{}, wrong};
    std::vector<double> ttft_ms, gaps_ms;
    for (const SimulatedRecord& record : simulation.value().records) {
      ttft_ms.push_back(1e3 * (record.times.first_s - record.arrival_s));
      for (float gap : record.times.gaps) gaps_ms.push_back(1e3 * double(gap));
    }
    Values values = {{"rate", rate}};
    for (int percent : {50, 90}) {
      add(values, "tbt", live.gaps_ms, gaps_ms, percent);
      add(values, "ttft", live.ttft_ms, ttft_ms, percent);
    }
    values.update({{"step_off", seen.value().step_error.mape()},
                   {"step_bias", seen.value().step_error.bias()},
                   {"link_off", seen.value().link_error.mape()},
                   {"decisions", decisions},
                   {"replay_differ", differ}});
    return Finding{{values}, ""};
  };
}

REGISTER_EXPERIMENT("truth", "cpu", points, open);

Result<Finding> speed(const Values& point, const Setting& setting) {
  const Result<Trace> read = mooncake_trace("tool_agent", setting, {.seed = setting.seed});
  if (!read) return read.error();
  const Trace trace = window(read.value(), 0, setting.tiny ? 60 : read.value().requests.size());
  SimulationOptions o = simulated("h200x4", "llama-3-70b", "8C", trace).value();
  o.conductor.placement = find_placement_policy(std::string(point["placement"]));
  const auto began = std::chrono::steady_clock::now();
  Result<Simulation> run = simulate(o, trace);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  if (!run) return run.error();
  Finding found;
  found.wrong = unserved(run.value(), trace);
  found.rows.push_back({{"source", source_of(trace)},
                        {"requests", trace.requests.size()},
                        {"seconds", took.count()},
                        {"simulated_s", run.value().end_s},
                        {"steps", run.value().steps},
                        {"events", run.value().events}});
  return found;
}

std::vector<Values> speed_points(const Setting&) { return {{{"placement", "dynamo"}}}; }

REGISTER_EXPERIMENT("truth/simulator_speed", "cpu", speed_points, each<speed>);

}  // namespace
}  // namespace xpyd::experiments::truth_experiment
