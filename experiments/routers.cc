// routers: How do all placement rules, over the same view, compare in TTFT, tails, hits and regret, for four loads and
//   two pools of eight instances?
// Paper: Mooncake (FAST'25) Algorithm 1; LMetric; DynoSim's documents.
// Set-up: 8 instances of 8 x A800 with Llama-3-70B as 8C and 4P4D. Mooncake's conversation and synthetic traces,
//   tool&agent, WEKA's agents. The arrival rate keeps the instances that compute prompts busy for .9 of the time (8C
//   .6) if they find nothing. Regret: the share of computed tokens that another choice would have found. Prefixes are
//   not fetched.
// Command: make exp-routers (a minute; virtual).
// Expected: a random choice finds a prefix with a chance of 1 in 4 to 8, and the queue is r / (2 (1 - r)) services:
//   random / best 4 to 60 on conversation. Rules that count seconds or tokens with the hit run at .6: a service and a
//   half.
// Found: a random choice waits 5 times as long as the best rule; Algorithm 1 is the best or within 5 %. Four blind
//   routers cost 1.9 times.
#include <algorithm>
#include <map>
#include <string>

#include "disagg/instance/cluster.h"
#include "experiments/draws.h"
#include "experiments/published_routers.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::routers_experiment {
namespace {

using namespace disagg;

namespace rows {

constexpr int kDraws = 3;

struct Pool {
  const char* topology;
  double busy;
};
constexpr Pool kPools[] = {{"8C", 0.6}, {"4P4D", 0.9}};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (const char* load : {"conversation", "synthetic", "tool_agent", "agents"})
    for (const Pool& pool : kPools)
      for (const auto rows : {placement_policies(), published_routers()})
        for (const PlacementPolicy& row : rows)
          for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
            all.push_back({{"load", load}, {"pool", pool.topology}, {"placement", row.name}, {"sample", draw}});
  return all;
}

Result<Trace> load_of(const std::string& load, int draw, const Setting& setting) {
  const size_t n = setting.tiny ? 60 : 1000;
  TraceOptions reading{.jitter_s = 3, .seed = setting.seed + uint64_t(draw)};  // Mooncake's times are multiples of 3 s
  if (load == "agents") {
    reading.rate = 0.05;
    reading.limit = int(n) * 2 / 5;
    return find_trace_format("weka")->load(setting.traces + "/weka", reading);
  }
  Result<Trace> trace = mooncake_trace(load, setting, reading);
  if (!trace) return trace;
  const size_t apart = (trace.value().requests.size() - n) / (kDraws - 1);
  return window(trace.value(), apart * size_t(draw), n);
}

Result<Finding> run(const Values& point, Trace trace) {
  SimulationOptions o = simulated("a800x8", "llama-3-70b", point["pool"], trace).value();
  o.fetch = false;
  const std::vector<Role> roles = parse_topology(o.topology).value();
  const Pool& pool = *std::ranges::find(kPools, o.topology, &Pool::topology);
  if (!trace.closed_loop) {
    const auto n = double(std::ranges::count_if(roles, [](Role role) { return role != Role::decode; }));
    trace = faster(std::move(trace), pool.busy * n / prefill_load(o, trace));
  }
  Watched watched;
  o.conductor.placement = watch(point["placement"], watched);
  o.conductor.objectives = {30, 0.1};
  Result<Simulation> run = simulate(o, trace);
  if (!run) return run.error();
  Finding found;
  Values row = outcome(run.value(), o.conductor.objectives, found.wrong);
  row["source"] = source_of(trace);
  row["regret"] = watched.regret / double(watched.decisions);
  row["imbalance"] = watched.imbalance(roles);
  found.rows.push_back(row);
  return found;
}

Measure open(const Setting& setting) {
  auto known = std::make_shared<std::map<std::string, Trace>>();
  return [=](const Values& point) -> Result<Finding> {
    const std::string load = point["load"], key = load + point["sample"].dump();
    if (!known->contains(key)) {
      Result<Trace> trace = load_of(load, point["sample"], setting);
      if (!trace) return trace.error();
      known->emplace(key, std::move(trace).value());
    }
    return run(point, known->at(key));
  };
}

REGISTER_EXPERIMENT("routers", "cpu", points, open);

}  // namespace rows

// routers/views: the cost of stale views: cache events that come `delay_s` late or are lost, and routers that do not
// know of each other. 4P4D, 1,000 requests of conversation.
//
// Expected: the next turn comes after tens of seconds, so 2 s hide few prefixes: hits .95 to 1. With 5 % of events
// lost, .64 of a prefix of 20 blocks is seen: hits .8 to 1. Each of four routers sees a quarter of the load: TTFT 1.1
// to 4 times.
namespace views {

constexpr int kDraws = 3;

std::vector<Values> points(const Setting& setting) {
  if (setting.traces.empty()) return {};
  struct View {
    double delay_s, loss;
    int routers;
  };
  constexpr View kViews[] = {{0, 0, 1}, {2, 0, 1}, {0, 0.05, 1}, {0, 0, 4}, {2, 0.05, 4}};
  std::vector<Values> all;
  for (const char* placement : {"mooncake", "lmetric", "dynamo"})
    for (const View& view : kViews)
      for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
        all.push_back({{"placement", placement},
                       {"delay_s", view.delay_s},
                       {"loss", view.loss},
                       {"routers", view.routers},
                       {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Trace& all, const Setting& setting) {
  const size_t n = setting.tiny ? 60 : 1000, apart = (all.requests.size() - n) / (kDraws - 1);
  Trace trace = window(all, apart * size_t(int(point["sample"])), n);
  SimulationOptions o = simulated("a800x8", "llama-3-70b", "4P4D", trace).value();
  trace = faster(std::move(trace), 0.9 * 4 / prefill_load(o, trace));
  o.conductor.placement = find_placement_policy(std::string(point["placement"]));
  o.conductor.objectives = {30, 0.1};
  o.routers = {.routers = point["routers"], .event_delay_s = point["delay_s"], .event_loss = point["loss"]};
  Result<Simulation> run = simulate(o, trace);
  if (!run) return run.error();
  Finding found;
  found.rows.push_back(outcome(run.value(), o.conductor.objectives, found.wrong));
  return found;
}

Measure open(const Setting& setting) {
  return over_draws(setting, [setting](const Values& point, const Trace& trace) { return run(point, trace, setting); });
}

REGISTER_EXPERIMENT("routers/views", "cpu", points, open);

}  // namespace views

// routers/dynosim: DynoSim's KV router beside round robin: eight colocated workers, tool&agent in a
// closed loop of 256, Llama-3-70B on four H200.
//
// Expected: the load limits reuse: .38 with round robin, .40 to .50 with the router. Round robin's queues are uneven:
// TTFT 1.5 to 5 times; requests per second 1 to 1.3.
namespace dynosim {

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* placement : {"round_robin", "dynamo"})
    for (int draw = 0; draw < (setting.tiny ? 1 : 3); ++draw)
      all.push_back({{"concurrency", 256}, {"placement", placement}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const int concurrency = setting.tiny ? 8 : int(point["concurrency"]);
  const int draw = point["sample"];
  const Result<Trace> read = mooncake_trace("tool_agent", setting, {.seed = setting.seed + uint64_t(draw)});
  if (!read) return read.error();
  const size_t n = setting.tiny ? 60 : 6000;
  Trace trace = window(read.value(), (read.value().requests.size() - n) / 2 * size_t(draw), n);
  trace.closed_loop = true;
  for (int i = 0; i < int(trace.requests.size()); ++i) {
    TraceRequest& request = trace.requests[size_t(i)];
    request.arrival_s = 0;
    request.think_s = 0;
    request.after = i - concurrency;
  }
  SimulationOptions o = simulated("h200x4", "llama-3-70b", "8C", trace).value();
  o.conductor.placement = find_placement_policy(std::string(point["placement"]));
  Result<Simulation> run = simulate(o, trace);
  if (!run) return run.error();
  Finding found;
  Values row = outcome(run.value(), kNoObjectives, found.wrong);
  row["source"] = source_of(trace);
  row["requests_per_s"] = double(trace.requests.size()) / run.value().end_s;
  found.rows.push_back(row);
  return found;
}

REGISTER_EXPERIMENT("routers/dynosim", "cpu", points, each<run>);

}  // namespace dynosim

}  // namespace
}  // namespace xpyd::experiments::routers_experiment
