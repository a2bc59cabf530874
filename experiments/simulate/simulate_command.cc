// xpyd simulate: a cluster in virtual time serves a trace (experiments/simulate/).
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/table.h"
#include "disagg/instance/cluster.h"
#include "experiments/published_routers.h"
#include "experiments/simulate/cluster.h"
#include "experiments/subcommands.h"
#include "server/build.h"
#include "server/cli/commands.h"

namespace xpyd::server {
namespace {

SimulationOptions simulation_options(const Options& options, const Trace& trace) {
  SimulationOptions simulation;
  options.fill(simulation);
  options.fill(simulation.engine);
  simulation.hardware = need(find_hardware(options.text("hardware")), "--hardware: ");
  simulation.model = need(find_simulated_model(options.text("model")), "--model: ");
  ConductorOptions& conductor = simulation.conductor;
  options.fill(conductor);
  EngineOptions& engine = simulation.engine;
  conductor.step_tokens = engine.step_tokens;
  for (const TraceRequest& request : trace.requests)
    conductor.max_model_len = std::max(
        conductor.max_model_len,
        request.prompt_tokens +
            std::max(1, simulation.output_tokens < 0 ? request.output_tokens : simulation.output_tokens));
  conductor.log = open_event_log(options);
  conductor.patience_s = kNever;
  return simulation;
}

// A file that is written must be neither a file that is read nor the other file that is written.
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
      throw invalid("--" + std::string(written) + " " + path + ": this would overwrite the trace, or one of its files");
    for (const char* other : {"hardware", "model", "config", "json"})
      if (other != std::string_view(written) && same(path, options.text(other)))
        throw invalid("--" + std::string(written) + " " + path + ": this would overwrite the file of --" + other);
  }
}

}  // namespace

int simulate_main(const Options& options) {
  if (options.positional().empty()) throw invalid("expected the trace's FILE as an argument");
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
    say("xpyd: the first failed request is number " + std::to_string(failed - run.records.begin()) + ": " +
        failed->why);
  need(write_result_file(options, std::move(result)));
  return 0;
}

std::vector<OptionRow> simulate_options() {
  using enum OptionKind;
  // Static, because the rows keep pointers into these strings.
  static const std::string allocators = names_of(kv_schemes(), "|"), batchings = names_of(batch_policies(), "|"),
                           admissions = "auto|" + names_of(admission_rules(), "|"),
                           chunks = names_of(chunk_policies(), "|"), formats = names_of(trace_formats(), "|"),
                           hardware = names_of(hardware_table(), "|") + "|FILE.json",
                           models = names_of(model_table(), "|") + "|FILE.json",
                           orders = names_of(disagg_policies(), "|"), routers = router_names();
  return {
      {"format", choice, "mooncake", "", formats.c_str(), 0, 0, "format of the trace", "simulate"},
      {"hardware", text, "a800x8", "", hardware.c_str(), 0, 0,
       "hardware of each instance: a name with a number of cards, or a JSON file", "simulate"},
      {"model", text, "llama-3-70b", "", models.c_str(), 0, 0, "model with its published shape, or a JSON file",
       "simulate"},
      {"topology", text, "1P1D", "", "xPyDzC", 0, 0, "instances of the cluster; at most 4096 of each role", "simulate",
       sets<&SimulationOptions::topology>},
      {"prefill-pp", integer, "1", "stages", "", 1, 1024,
       "pipeline stages of each prefill or colocated instance; each stage has its own --hardware", "simulate",
       sets<&SimulationOptions::prefill_pp>},
      {"decode-pp", integer, "1", "stages", "", 1, 1024, "pipeline stages of each decode instance", "simulate",
       sets<&SimulationOptions::decode_pp>},
      {"pipeline-window", integer, "0", "waves", "", 0, 1024,
       "number of waves (micro-batches) that a pipeline-parallel instance keeps in flight; 0: two per stage; 1: the "
       "next step starts when the last one has ended",
       "simulate", sets<&SimulationOptions::pipeline_window>},
      {"allocator", choice, "paged", "", allocators.c_str(), 0, 0, "KV memory scheme", "simulate",
       sets<&SimulationOptions::scheme>},
      {"batching", choice, "chunked", "", batchings.c_str(), 0, 0,
       "which sequences run in a step, and how many tokens each gets", "simulate",
       sets_as<find_batch_policy, &EngineOptions::policy>},
      {"admit", choice, "auto", "", admissions.c_str(), 0, 0,
       "how much free memory a sequence needs to start; auto: the rule of the batching policy", "simulate",
       sets_as<find_admission_rule, &EngineOptions::admission>},
      {"chunk-tokens", integer, "2048", "tokens", "", 1, 1 << 20, "maximum tokens of one step", "simulate",
       sets<&EngineOptions::step_tokens>},
      {"chunk-policy", choice, "fixed", "", chunks.c_str(), 0, 0, "how many tokens of each prompt a step computes",
       "simulate", sets_as<find_chunk_policy, &EngineOptions::chunks>},
      {"max-batch", integer, "256", "sequences", "", 1, 65536, "maximum running sequences in each instance", "simulate",
       sets<&EngineOptions::max_batch>},
      {"block-tokens", integer, "512", "tokens", "", 1, 4096, "tokens in one KV block", "simulate",
       sets<&SimulationOptions::block_tokens>},
      {"kv-tokens", number, "0", "tokens", "", 0, 1e12, "KV pool of each instance; 0: the memory that the model leaves",
       "simulate", sets<&SimulationOptions::kv_tokens>},
      {"host-tokens", number, "0", "tokens", "", 0, 1e12, "KV in each instance's host memory; 0: no host tier",
       "simulate", sets<&SimulationOptions::host_tokens>},
      {"routers", integer, "1", "", "", 1, 1024, "number of independent conductors, which get the requests in turn",
       "simulate", sets<&SimulationOptions::routers, &RouterOptions::routers>},
      {"event-delay", number, "0", "s", "", 0, 1e6,
       "delay until a router knows that a prefix cache has stored or removed a block", "simulate",
       sets<&SimulationOptions::routers, &RouterOptions::event_delay_s>},
      {"event-loss", number, "0", "", "", 0, 1, "share of these events that a router never gets, drawn by --seed",
       "simulate", sets<&SimulationOptions::routers, &RouterOptions::event_loss>},
      {"placement", choice, "least_loaded", "", routers.c_str(), 0, 0, "how P and D are chosen for a request",
       "simulate", sets_as<find_router, &ConductorOptions::placement>},
      {"fetch", choice, "on", "", "on|off", 0, 0, "instances fetch prefixes from others (--placement mooncake)",
       "simulate", sets_as<is<"on">, &SimulationOptions::fetch>},
      {"stream-kv", choice, "layer", "", "layer|chunk|request", 0, 0,
       "when P sends KV: after each layer, each chunk, or the whole prompt", "simulate",
       sets<&ConductorOptions::stream_kv>},
      {"disagg", choice, "prefill_first", "", orders.c_str(), 0, 0,
       "in which order P and D take a request, or when one instance does both phases; conditional_tbt: a prompt joins "
       "D's batch if one step holds all of it and is predicted to keep the request's TBT objective",
       "simulate",
       sets_as<find_disagg_policy, &ConductorOptions::disagg>},
      {"speed", number, "1", "times", "", 1e-6, 1e6, "factor by which arrivals are faster than in the trace",
       "simulate", sets<&TraceOptions::speed>},
      {"jitter", number, "0", "s", "", 0, 1e6, "maximum of a uniform random delay that is added to each arrival",
       "simulate", sets<&TraceOptions::jitter_s>},
      {"repeat", integer, "1", "times", "", 1, 1e6,
       "how many times the trace is repeated, one after another; each repetition has new blocks", "simulate",
       sets<&TraceOptions::repeat>},
      {"requests", integer, "0", "requests", "", 0, 1e9,
       "number of requests to read from the beginning of the trace; 0: all", "simulate", sets<&TraceOptions::limit>},
      {"rate", number, "1", "requests/s", "", 1e-6, kInf, "arrival rate for a trace that has no times", "simulate",
       sets<&TraceOptions::rate>},
      {"hash-block-tokens", integer, "512", "tokens", "", 1, kMaxTokens,
       "with --format mooncake: tokens that each entry of hash_ids stands for", "simulate",
       sets<&TraceOptions::hash_block_tokens>},
      {"closed-loop", flag, "off", "", "", 0, 0,
       "a session's next request waits for the answer before it, even if the trace has times", "simulate"},
      {"decode-tokens", integer, "-1", "tokens", "", -1, kMaxTokens,
       "output tokens of every request; 0: only the first token; -1: as in the trace", "simulate",
       sets<&SimulationOptions::output_tokens>},
  };
}

}  // namespace xpyd::server
