#include "experiments/simulated.h"

#include <algorithm>
#include <filesystem>
#include <numeric>

#include "experiments/published_routers.h"
#include "experiments/stats.h"

namespace xpyd::experiments {

using namespace disagg;

Result<SimulationOptions> simulated(const std::string& hardware, const std::string& model, const std::string& topology,
                                    const Trace& trace) {
  SimulationOptions options;
  Result<Hardware> cards = find_hardware(hardware);
  if (!cards) return cards.error();
  Result<SimulatedModel> shape = find_simulated_model(model);
  if (!shape) return shape.error();
  options.hardware = cards.value();
  options.model = shape.value();
  options.topology = topology;
  options.block_tokens = trace.block_tokens;
  options.engine.policy = find_batch_policy("chunked");
  options.engine.max_batch = 256;
  options.conductor.disagg = find_disagg_policy("prefill_first");
  options.conductor.patience_s = kNever;
  for (const TraceRequest& r : trace.requests)
    options.conductor.max_model_len = std::max(options.conductor.max_model_len, r.prompt_tokens + r.output_tokens);
  set_step_tokens(options, 2048);
  return options;
}

SimulationOptions simulated_h100(const std::string& topology, const Trace& trace, double share) {
  SimulationOptions options = simulated("h100x1", "llama-3-8b", topology, trace).value();
  Hardware& card = options.hardware;
  card.flops_per_s *= share, card.bytes_per_s *= share;
  card.mfu = 0.5, card.mbu = 0.8, card.step_s = 0;
  card.link_bytes_per_s = 12.5e9, card.link_s = 0;
  options.engine.max_batch = 64;
  options.conductor.placement = find_placement_policy("least_loaded");
  return options;
}

Result<Trace> mooncake_trace(const std::string& name, const Setting& setting, const TraceOptions& reading) {
  const bool tools = name == "tool_agent";
  const std::string path = setting.traces + "/mooncake_" + (tools ? "toolagent" : name) + ".jsonl";
  if (tools && !std::filesystem::exists(path)) return find_trace_format("tool_agent")->load("", reading);
  return find_trace_format("mooncake")->load(path, reading);
}

const char* source_of(const Trace& trace) {
  const auto says = [](const std::string& note) { return note.starts_with("generated"); };
  return std::ranges::any_of(trace.notes, says) ? "generated" : "trace";
}

void add_request(Trace& trace, double arrival_s, int prompt, int output) {
  TraceRequest request{.arrival_s = arrival_s, .prompt_tokens = prompt, .output_tokens = output};
  const uint64_t own = uint64_t(trace.requests.size()) << 32;
  for (int at = 0; at < prompt; at += trace.block_tokens) request.blocks.push_back(own + uint64_t(at));
  trace.requests.push_back(std::move(request));
}

void set_step_tokens(SimulationOptions& options, int tokens) {
  options.engine.step_tokens = options.conductor.step_tokens = tokens;
}

Trace window(const Trace& trace, size_t first, size_t n) {
  Trace part = trace;
  const auto begin = trace.requests.begin() + long(first);
  part.requests.assign(begin, begin + long(std::min(n, trace.requests.size() - first)));
  for (TraceRequest& r : part.requests) r.after = r.session = -1;
  const double start_s = part.requests.front().arrival_s;
  for (TraceRequest& r : part.requests) r.arrival_s -= start_s;
  return part;
}

Trace faster(Trace trace, double times) {
  for (TraceRequest& r : trace.requests) r.arrival_s /= times;
  return trace;
}

double prefill_load(const SimulationOptions& options, const Trace& trace) {
  const model::StepCost cost = step_cost(options.model, options.hardware);
  double seconds = 0;
  for (const TraceRequest& r : trace.requests)
    seconds += cost.seconds(model::prompt_steps(r.prompt_tokens, 0, options.engine.step_tokens));
  return seconds / trace.requests.back().arrival_s;
}

namespace {
PlacementPolicy inner, outer;
Watched* watching = nullptr;

Placement watched_place(const ClusterView& view, const PlacementOptions& options) {
  const Placement placed = inner.place(view, options);
  if (placed.prefill < 0) return placed;
  const InstanceView& chosen = view.instances[size_t(placed.prefill)];
  ++watching->decisions;
  watching->regret += regret_ratio(view, placed.prefill);
  watching->tokens.resize(view.instances.size());
  watching->tokens[size_t(placed.prefill)] += view.prompt_tokens - chosen.cached_tokens;
  return placed;
}
}  // namespace

const PlacementPolicy* watch(const std::string& placement, Watched& watched) {
  outer = inner = *find_router(placement);
  outer.place = watched_place;
  watching = &watched;
  return &outer;
}

double Watched::imbalance(const std::vector<Role>& roles) const {
  const auto n = std::ranges::count_if(roles, [](Role role) { return role != Role::decode; });
  return *std::ranges::max_element(tokens) * double(n) / std::accumulate(tokens.begin(), tokens.end(), 0.0);
}

std::string unserved(const Simulation& run, const Trace& trace) {
  for (size_t i = 0; i < run.records.size(); ++i) {
    const SimulatedRecord& r = run.records[i];
    if (r.end != SimulatedEnd::completed) return "a request did not complete: " + r.why;
    if (int(r.times.gaps.size()) + 1 != trace.requests[i].output_tokens) return "a request did not get all its tokens";
  }
  return "";
}

Values outcome(const Simulation& run, const Objectives& objectives, std::string& wrong) {
  std::vector<double> ttft, tails;
  int64_t completed = 0, kept = 0, hit = 0, prompts = 0;
  for (const SimulatedRecord& r : run.records) {
    if (r.end == SimulatedEnd::failed) wrong = "a request failed: " + r.why;
    completed += r.end == SimulatedEnd::completed;
    kept += r.end == SimulatedEnd::completed && r.times.keeps(objectives, r.arrival_s);
    if (r.times.first_s < 0) continue;
    prompts += r.prompt, hit += r.cached;
    ttft.push_back(r.times.first_s - r.arrival_s);
    if (!r.times.gaps.empty()) tails.push_back(r.times.worst_tenth());
  }
  std::ranges::sort(ttft);
  std::ranges::sort(tails);
  const double n = double(run.records.size());
  const auto within = [](const std::vector<double>& sorted, double most) {
    return double(std::ranges::upper_bound(sorted, most) - sorted.begin()) / double(std::max<size_t>(1, sorted.size()));
  };
  return {{"requests", run.records.size()},
          {"completed", completed},
          {"refused_early", run.conductor.refused_early},
          {"refused_late", run.conductor.refused_late},
          {"ttft_mean_s", summarize(ttft).mean},
          {"ttft_p50_s", percentile_seen(ttft, 50)},
          {"ttft_p90_s", percentile_seen(ttft, 90)},
          {"ttft_p99_s", percentile_seen(ttft, 99)},
          {"tbt_mean_s", summarize(tails).mean},
          {"tbt_p90_s", percentile_seen(tails, 90)},
          {"within_100ms", within(tails, 0.1)},
          {"within_200ms", within(tails, 0.2)},
          {"within_300ms", within(tails, 0.3)},
          {"hit_share", double(hit) / double(std::max<int64_t>(1, prompts))},
          {"kept_share", double(kept) / n},
          {"goodput", double(kept) / run.end_s},
          {"wasted_prefill_s", run.conductor.wasted_prefill_s},
          {"prefill_busy_s", run.prefill_busy_s},
          {"decode_busy_s", run.decode_busy_s},
          {"duration_s", run.end_s},
          {"kv_gb", run.kv_gb},
          {"preemptions", run.preemptions}};
}

}  // namespace xpyd::experiments
