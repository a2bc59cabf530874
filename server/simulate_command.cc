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

Result<SimulationOptions> simulation_options(const Options& options, const Trace& trace) {
  SimulationOptions simulation;
  options.fill(simulation);
  options.fill(simulation.engine);
  Result<Hardware> hardware = find_hardware(options.text("hardware"));
  if (!hardware) return Error{hardware.error().code, "--hardware: " + hardware.error().message};
  Result<SimulatedModel> model = find_simulated_model(options.text("model"));
  if (!model) return Error{model.error().code, "--model: " + model.error().message};
  simulation.hardware = std::move(hardware).value();
  simulation.model = std::move(model).value();
  if (Status read = check_unread(options); !read) return read.error();
  ConductorOptions& conductor = simulation.conductor;
  options.fill(conductor);
  EngineOptions& engine = simulation.engine;
  if (Status can = check_batching(options, *engine.policy); !can) return can.error();
  engine.chunk_tokens = engine.step_tokens;
  conductor.step_tokens = engine.step_tokens;
  if (engine.policy->layered) engine.step_tokens = int(options.integer("max-step-tokens"));
  engine.chunks.ttft_s = conductor.objectives.ttft_s;
  engine.chunks.tbt_s = conductor.objectives.tbt_s;
  conductor.max_queue_bytes = INT64_MAX;
  for (const TraceRequest& request : trace.requests)
    conductor.max_model_len = std::max(
        conductor.max_model_len,
        request.prompt_tokens +
            std::max(1, simulation.output_tokens < 0 ? request.output_tokens : simulation.output_tokens));
  Result<std::shared_ptr<EventLog>> log = open_event_log(options);
  if (!log) return log.error();
  conductor.log = log.value();
  conductor.patience_s = kNever;
  return simulation;
}

// What is written must not be what is read, nor the other thing that is written.
Status check_files(const Options& options) {
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
      return invalid("--" + std::string(written) + " " + path + ": it is the trace's FILE, or one of its files");
    for (const char* other : {"hardware", "model", "config", "json"})
      if (other != std::string_view(written) && same(path, options.text(other)))
        return invalid("--" + std::string(written) + " " + path + ": it is the file of --" + other);
  }
  return ok();
}

}  // namespace

int simulate_main(const Options& options) {
  if (options.positional().empty()) return fail(" simulate", invalid("expected the trace's FILE"));
  if (Status apart = check_files(options); !apart) return fail(" simulate", apart.error());
  if (Status writable = check_result_file(options); !writable) return fail(" simulate", writable.error());
  TraceOptions reading;
  options.fill(reading);
  reading.seed = uint64_t(options.integer("seed"));
  Result<Trace> trace = find_trace_format(options.text("format"))->load(options.positional()[0], reading);
  if (!trace) return fail(" simulate", trace.error());
  if (options.flag("closed-loop")) trace.value().closed_loop = true;
  for (const std::string& note : trace.value().notes) say("xpyd: " + note);
  Result<SimulationOptions> simulation = simulation_options(options, trace.value());
  if (!simulation) return fail(" simulate", simulation.error());
  const auto begin = std::chrono::steady_clock::now();
  Result<Simulation> run = simulate(simulation.value(), trace.value());
  if (!run) return fail(" simulate", run.error());
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
  const ConductorOptions& conductor = simulation.value().conductor;
  const auto wanted = [](double s) { return s > 0 ? s : kNever; };
  const Objectives objectives = {wanted(conductor.objectives.ttft_s), wanted(conductor.objectives.tbt_s)};
  auto result = nlohmann::json::parse(result_json(run.value(), objectives, wall.count()));
  for (const auto& [name, value] : result.items()) std::printf("%-24s %s\n", name.c_str(), value.dump().c_str());
  const auto failed = std::ranges::find(run.value().records, SimulatedEnd::failed, &SimulatedRecord::end);
  if (failed != run.value().records.end())
    say("xpyd: the first request that failed, " + std::to_string(failed - run.value().records.begin()) + ": " +
        failed->why);
  const Status written = write_result_file(options, std::move(result));
  return written ? 0 : fail(" simulate", written.error());
}

}  // namespace xpyd::server
