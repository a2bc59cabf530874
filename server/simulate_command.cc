// xpyd simulate: a trace, served by a cluster in virtual time (disagg/simulate/).
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "disagg/cluster.h"
#include "disagg/simulate/cluster.h"
#include "server/commands.h"
#include "server/stack.h"

namespace xpyd::server {
namespace {

SimulationOptions simulation_options(const Options& options, const Trace& trace) {
  SimulationOptions simulation;
  options.fill(simulation);
  options.fill(simulation.engine);
  simulation.hardware = need(find_hardware(options.text("hardware")), "--hardware: ");
  simulation.model = need(find_simulated_model(options.text("model")), "--model: ");
  need(check_unread(options));
  ConductorOptions& conductor = simulation.conductor;
  options.fill(conductor);
  EngineOptions& engine = simulation.engine;
  conductor.step_tokens = engine.step_tokens;
  conductor.max_queue_bytes = INT64_MAX;
  for (const TraceRequest& request : trace.requests)
    conductor.max_model_len = std::max(
        conductor.max_model_len,
        request.prompt_tokens +
            std::max(1, simulation.output_tokens < 0 ? request.output_tokens : simulation.output_tokens));
  conductor.log = open_event_log(options);
  conductor.patience_s = kNever;
  return simulation;
}

// What is written must not be what is read, nor the other thing that is written.
void check_files(const Options& options) {
  namespace fs = std::filesystem;
  const auto same = [](const std::string& a, const std::string& b) {
    std::error_code none, absent;
    return !a.empty() && !b.empty() &&
           (fs::equivalent(a, b, none) || fs::weakly_canonical(a, none) == fs::weakly_canonical(b, absent));
  };
  for (const char* written : {"event-log", "json"}) {
    const std::string& path = options.text(written);
    const fs::path file = options.positional()[0];
    std::error_code none;
    const fs::path folder = fs::weakly_canonical(path, none).parent_path();
    if (same(path, file) || (fs::is_directory(file, none) && same(folder, file)))
      throw invalid("--" + std::string(written) + " " + path + ": it is the trace's FILE, or one of its files");
    for (const char* other : {"hardware", "model", "config", "json"})
      if (other != std::string_view(written) && same(path, options.text(other)))
        throw invalid("--" + std::string(written) + " " + path + ": it is the file of --" + other);
  }
}

}  // namespace

int simulate_main(const Options& options) {
  if (options.positional().empty()) throw invalid("expected the trace's FILE");
  check_files(options);
  need(check_result_file(options));
  TraceOptions reading;
  options.fill(reading);
  reading.seed = uint64_t(options.integer("seed"));
  Trace trace = need(find_trace_format(options.text("format"))->load(options.positional()[0], reading));
  if (options.flag("closed-loop")) trace.closed_loop = true;
  for (const std::string& note : trace.notes) say("xpyd: " + note);
  const SimulationOptions simulation = simulation_options(options, trace);
  const auto begin = std::chrono::steady_clock::now();
  const Simulation run = need(simulate(simulation, trace));
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
  const ConductorOptions& conductor = simulation.conductor;
  const auto wanted = [](double s) { return s > 0 ? s : kNever; };
  const Objectives objectives = {wanted(conductor.objectives.ttft_s), wanted(conductor.objectives.tbt_s)};
  auto result = nlohmann::json::parse(result_json(run, objectives, wall.count()));
  for (const auto& [name, value] : result.items()) std::printf("%-24s %s\n", name.c_str(), value.dump().c_str());
  const auto failed = std::ranges::find(run.records, SimulatedEnd::failed, &SimulatedRecord::end);
  if (failed != run.records.end())
    say("xpyd: the first request that failed, " + std::to_string(failed - run.records.begin()) + ": " + failed->why);
  need(write_result_file(options, std::move(result)));
  return 0;
}

}  // namespace xpyd::server
