// dual_path: what is it worth to load KV over the links of decode instances, too, which are idle, and when nothing?
//
// DualPath's setting (arXiv 2602.21548) on the simulator (experiments/simulate/): a store has all KV that was ever computed,
// instances keep none, and each has a link of its own to the store beside the network between them. Agents take 157
// turns, each with all that was said and 429 tokens more in the mean (exponential; a third of them are the answer, at
// most 2,000), so that a prompt has 33,700 in the mean and 98.7 % of it is loaded: the published workload. An instance
// is 8 x H200 with 8 x 400 Gb/s between instances. offline: 48 agents for each D, all at once, without pauses: the rate
// is that of their last end. online: agents come as a Poisson stream for 600 s and pause 1 s (exponential) between
// turns; the rate is the highest at which nine in ten turns have their first token within 4 s and 100 ms between
// others, in the mean of the longest tenth. One draw: of three the first ratio was 1.96 to 1.98. A block has 256
// tokens, and what is not whole is not loaded.
//
// Arithmetic, offline. Qwen2.5-32B: a turn loads 33,300 x 262 KB = 8.7 GB for 429 x (66 GFLOP + attention 43) = 47
// TFLOP: 187 GB/PFLOP. At 400 Gb/s that is .175 s for one P, 5.7 turns/s; P computes it in 15 ms. A D's 48 agents take
// 143 steps of 19 ms: 16 turns/s. So direct gives 5.7 P turns/s, dual 5.7 (P + D), at most 16 D: 1P1D 2.0, 1P2D 3.0,
// 2P1D 1.4 (16 of 17). A quarter of the rate: 2, 3, 1.5. Four times: 23 turns/s from one P, D alone counts: 1.0 (1P2D:
// 32 of 23 turns/s, 1.4). DeepSeek-V3 (attention to all, as ours has it): 2.3 GB for 103 TFLOP: 23 GB/PFLOP. At 400
// Gb/s 21 turns/s from one P, but P computes 29 and a D's agents ask for 11 (30 ms a step: weights alone 25): 1.0 (1P2D
// 1.0 to 1.3); at 100 Gb/s 5.3 turns/s: 1P1D 2.0, 1P2D 3.0. Where the network between instances is as slow as the link
// to the store, the hop costs another .175 s of 3 s and queues where P sends KV to D, too; what D has is not sent
// there: still 1.5 to 2. Nowhere less than .95: the hop is taken where it is shorter. Online, with pauses and D's in
// want of nothing, the same bottleneck: 1.7 to 2.2.
//
// weka: the 40 recorded sessions of coding agents, one a minute and without pauses, Qwen on 1P2D. A prompt has 105,000
// tokens in the mean, of which .946 are found: 26 GB, .52 s at 400 Gb/s, 24 GB/PFLOP. The sessions that are there at
// once ask for some .6 prompts a second: at 400 Gb/s a link is a third busy, and TTFT .3 to .95 of direct's, where
// several come together; at 100 Gb/s it brings .48, less than that: .1 to .6. (One a second, they have more KV than the
// instances, which then compute what they have no room to load.)
#include <cmath>

#include "base/arrivals.h"
#include "base/random.h"
#include "base/row_hash.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::dual_path_experiment {
namespace {

using namespace disagg;

constexpr int kBlock = 256;
constexpr double kTurnTokens = 429, kApart = 60;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  const auto add = [&](const char* mode, const char* model, const char* topology, double store, double net) {
    for (const char* path : {"direct", "dual"})
      all.push_back({{"mode", mode},
                     {"model", model},
                     {"topology", topology},
                     {"store_gbps", store},
                     {"net_gbps", net},
                     {"path", path}});
  };
  for (const auto& [topology, store] : {std::pair("1P1D", 400.),
                                        {"1P2D", 400.},
                                        {"2P1D", 400.},
                                        {"1P1D", 100.},
                                        {"1P2D", 100.},
                                        {"2P1D", 100.},
                                        {"1P1D", 1600.},
                                        {"1P2D", 1600.}})
    add("offline", "qwen2.5-32b", topology, store, 3200);
  add("offline", "qwen2.5-32b", "1P1D", 400, 400);
  for (double store : {100., 400.})
    for (const char* topology : {"1P1D", "1P2D"}) add("offline", "deepseek-v3", topology, store, 3200);
  add("online", "qwen2.5-32b", "1P1D", 400, 3200);
  for (double store : {100., 400.})
    if (!setting.traces.empty()) add("weka", "qwen2.5-32b", "1P2D", store, 3200);
  return all;
}

// The recorded sessions, one a minute and without pauses.
Result<Trace> recorded(const Setting& setting, uint64_t seed) {
  Result<Trace> trace = find_trace_format("weka")->load(setting.traces + "/weka",
                                                        {.limit = setting.tiny ? 40 : 0, .seed = seed});
  if (trace)
    for (TraceRequest& request : trace.value().requests) request.think_s = 0, request.arrival_s *= kApart;
  return trace;
}

// Each agent's turns in a row; `rate` of agents that come, infinite: at once.
Trace agents(int n, double rate, double pause_s, int turns, uint64_t seed) {
  Trace trace{.block_tokens = kBlock, .closed_loop = true};
  Random arrivals(seed);
  double at_s = 0;
  for (int agent = 0; agent < n; ++agent) {
    Random random(mix_seed(seed, uint64_t(agent)));
    int prompt = 1, last = -1;
    for (int turn = 0; turn < turns; ++turn) {
      const int more = std::min(2000, 1 + int(kTurnTokens * random.exponential()));
      prompt += more;
      TraceRequest request{.arrival_s = at_s,
                           .prompt_tokens = prompt,
                           .output_tokens = 1 + more / 3,
                           .session = agent,
                           .after = last,
                           .think_s = turn > 0 && pause_s > 0 ? pause_s * random.exponential() : 0};
      for (int block = 0; block * kBlock < prompt; ++block) {
        const bool whole = (block + 1) * kBlock <= prompt;
        request.blocks.push_back(uint64_t(agent) << 32 | uint64_t(block) | (whole ? 0 : uint64_t(turn + 1) << 20));
      }
      last = int(trace.requests.size());
      trace.requests.push_back(std::move(request));
    }
    if (std::isfinite(rate)) at_s += arrivals.exponential() / rate;
  }
  return trace;
}

Result<SimulationOptions> options_of(const Values& point, const Trace& trace) {
  Result<SimulationOptions> options = simulated("h200x8", point["model"], point["topology"], trace);
  if (!options) return options;
  SimulationOptions& o = options.value();
  o.store_gbps = point["store_gbps"];
  o.hardware.link_bytes_per_s = double(point["net_gbps"]) * 1e9 / 8;
  o.conductor.placement = find_placement_policy("least_loaded");
  o.conductor.path = find_path_policy(std::string(point["path"]));
  return options;
}

// GB that are loaded for each 10^15 FLOP that are computed.
double gb_per_pflop(const SimulationOptions& o, const Simulation& run) {
  double gb = 0, flop = 0;
  for (const SimulatedRecord& r : run.records) {
    const double computed = r.prompt - r.cached;
    gb += r.cached * o.model.kv_token_bytes() * 1e-9;
    flop += computed * (2 * o.model.active_parameters +
                        4.0 * o.model.n_layers * o.model.n_heads * o.model.head_dim * (r.cached + computed / 2));
  }
  return gb / flop * 1e15;
}

constexpr Objectives kObjectives = {4, 0.1};

Values row_of(const SimulationOptions& options, const Simulation& run, double rate, std::string& wrong) {
  Values row = outcome(run, kObjectives, wrong);
  row["rate"] = rate;
  row["relayed_share"] = double(run.relayed) / double(std::max<int64_t>(1, run.loads));
  row["gb_per_pflop"] = gb_per_pflop(options, run);
  return row;
}

Result<Finding> at_once(const Values& point, const Trace& trace) {
  Result<SimulationOptions> options = options_of(point, trace);
  if (!options) return options.error();
  Result<Simulation> run = simulate(options.value(), trace);
  if (!run) return run.error();
  Finding found;
  found.rows.push_back(
      row_of(options.value(), run.value(), double(trace.requests.size()) / run.value().end_s, found.wrong));
  if (found.wrong.empty()) found.wrong = unserved(run.value(), trace);
  return found;
}

// The highest rate of agents, within a twentieth, that keeps the objective.
Result<Finding> online(const Values& point, int turns, double seconds, uint64_t seed) {
  Finding found;
  double low = 0, high = INFINITY;
  for (double rate = 0.01; high > 1.05 * low; rate = std::isfinite(high) ? std::sqrt(low * high) : 1.5 * rate) {
    const Trace trace = agents(std::max(1, int(rate * seconds)), rate, 1, turns, seed);
    Result<SimulationOptions> options = options_of(point, trace);
    if (!options) return options.error();
    Result<Simulation> run = simulate(options.value(), trace);
    if (!run) return run.error();
    const Values row = row_of(options.value(), run.value(), rate, found.wrong);
    const bool keeps = double(row["kept_share"]) >= 0.9;
    (keeps ? low : high) = rate;
    if (keeps) found.rows = {row};
    if (low == 0) found.wrong = "no rate keeps the objectives";
    if (!found.wrong.empty()) break;
  }
  return found;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string mode = point["mode"], topology = point["topology"];
  const uint64_t seed = setting.seed;
  const int turns = setting.tiny ? 4 : 157;
  if (mode == "online") return online(point, turns, setting.tiny ? 100 : 600, seed);
  if (mode == "offline")
    return at_once(point, agents((setting.tiny ? 4 : 48) * (topology[2] - '0'), INFINITY, 0, turns, seed));
  Result<Trace> trace = recorded(setting, seed);
  return trace ? at_once(point, trace.value()) : Result<Finding>(trace.error());
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("dual_path", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::dual_path_experiment
