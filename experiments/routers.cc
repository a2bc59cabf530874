// routers: every row of --placement over the same view, on five loads and three pools: first tokens, tails of gaps, hit
// rate, and regret: of the tokens that a choice made somebody compute, the share that another choice would have found.
//
// The simulator (experiments/simulate/): instances of 8 x A800 with Llama-3-70B. Pools of eight: 8C, where a router
// sees one queue of prompts and decodes; 4P4D, half the caches and half the queues; 6P2D, where many prompts meet few
// decodes. Loads: Mooncake's conversation (a start of its prompts in common, hits .37 at most), its synthetic trace (no
// common start, .65), the generated tool&agent (three hot starts), the generated pool of clients (short prompts, few
// hits), and the agents of WEKA (long prompts, .96, turn after turn in a closed loop). Arrivals are made as much closer
// or further apart as keeps those that compute prompts busy for 0.9 of the time (8C: 0.6, since they decode, too) if
// they find nothing; of the agents, whose turns wait for answers, sessions start every 20 s. Three draws: parts of a
// trace, or seeds. Objectives, which two rows read: 30 s and 100 ms. Prefixes are not fetched.
//
// Arithmetic. What random places finds a prefix with a chance of 1 in 8, 4 or 6, and works at 0.9 less a ninth or so of
// the hits: a queue of r / (2 (1 - r)) services with prompts of uneven length (c^2 of 2 and more): tens of services of
// 1.5 to 2 s. Who counts seconds or tokens and the hit works at 0.9 (1 - .3) = 0.6: a service and a half. So random /
// best of mean TTFTs 4 to 60 on conversation. lmetric multiplies tokens by requests, and on a pool of P alone loses to
// seconds (a pilot of another simulator: 1.13 and 1.14): 1 to 1.5. Where all prompts begin alike (conversation, block
// 0) who weighs the best prefix 10 against a queue of 1 (llm_d) sends all to one of four: most / mean of the computed
// tokens 3.5 to 4, and its queue grows by 2.7 seconds a second: TTFTs of hundreds of seconds. On synthetic, where
// nothing is common, the same rule spreads: 1 to 1.6.
#include <algorithm>
#include <map>

#include "disagg/cluster.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::routers_experiment {
namespace {

using namespace disagg;

constexpr int kDraws = 3;

struct Pool {
  const char* topology;
  double busy;
};
constexpr Pool kPools[] = {{"8C", 0.6}, {"4P4D", 0.9}, {"6P2D", 0.9}};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (const char* load : {"conversation", "synthetic", "tool_agent", "clients", "agents"})
    for (const Pool& pool : kPools)
      for (const PlacementPolicy& row : placement_policies())
        for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
          all.push_back({{"load", load}, {"pool", pool.topology}, {"placement", row.name}, {"sample", draw}});
  return all;
}

Result<Trace> load_of(const std::string& load, int draw, const Setting& setting) {
  const size_t n = setting.tiny ? 60 : 1000;
  TraceOptions reading{.jitter_s = 3, .seed = setting.seed + uint64_t(draw)};  // Mooncake's times are ticks of 3 s
  std::string format = "mooncake", file = setting.traces + "/mooncake_" + load + ".jsonl";
  if (load == "tool_agent" || load == "clients") {
    format = load == "clients" ? "servegen" : load;
    reading.limit = int(n);
    reading.rate = 20;
  } else if (load == "agents") {
    format = "weka", file = setting.traces + "/weka";
    reading.rate = 0.05;
    reading.limit = int(n) * 2 / 5;
  }
  Result<Trace> trace = find_trace_format(format)->load(file, reading);
  if (!trace || trace.value().closed_loop || format != "mooncake") return trace;
  const size_t apart = (trace.value().requests.size() - n) / (kDraws - 1);
  return window(trace.value(), apart * size_t(draw), n);
}

Result<Finding> run(const Values& point, Trace trace) {
  Result<SimulationOptions> options = simulated("a800x8", "llama-3-70b", point["pool"], trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
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

}  // namespace
}  // namespace xpyd::experiments::routers_experiment
