// rejection: Which requests does admission refuse under overload, when, and what does that save: early, predicted, or
//   by reservation? How do the loads of P and D swing?
// Paper: Mooncake (arXiv 2407.00079 v4) section 7, Fig. 9, Table 3; WavePP (2026-09) sections 4.2 to 4.5.
// Set-up: the rows of --admission under overload. 12P1D of 8 x A800, four links of 200 Gb/s, Mooncake's conversation at
//   twice its speed (5,000 requests, three parts), 30 s and 100 ms. table_3: 8P8D and tool&agent at twice its speed
//   (8,000 requests). P's load is the work of accepted prompts over 30 s, D's its tokens over its room. `predicted`
//   takes the moving mean of ended decodes as t_d, times `factor`.
// Command: make exp-rejection (a minute; virtual).
// Expected: a D holds 110 sequences of 17 s: 6.4 of 6.8 requests/s. `late` wastes the 10 to 20 % that D cannot take. An
//   unbiased t_d refuses hardly any request early; four times that is careful. `reserve` wastes nothing and keeps .97
//   to 1.1 of the best t_d. Under early rejection the loads of P and D are out of phase: correlation below 0. Table 3:
//   with 8 KV heads no D is ever full, so the three rows refuse the same requests.
// Found: late refusal wastes 38 % of prefill. P's and D's loads are out of phase, as published; Table 3's gains do not
//   appear.
#include <algorithm>

#include "disagg/instance/cluster.h"
#include "experiments/simulated.h"
#include "experiments/stats.h"

namespace xpyd::experiments::rejection_experiment {
namespace {

using namespace disagg;

namespace admission {

constexpr int kDraws = 3;
constexpr double kLookS = 2;
constexpr double kLink = 100e9;  // four links of 200 Gb/s

Values of(const char* part, const char* topology, const char* admission, double factor, int draw) {
  return {{"part", part}, {"topology", topology}, {"admission", admission}, {"factor", factor}, {"sample", draw}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw) {
    for (const char* admission : {"none", "late", "early", "reserve"})
      all.push_back(of("overload", "12P1D", admission, 1, draw));
    for (double factor : {0.25, 1., 4.}) all.push_back(of("overload", "12P1D", "predicted", factor, draw));
    for (const char* admission : {"late", "early", "predicted"})
      all.push_back(of("table_3", "8P8D", admission, 1, draw));
  }
  return all;
}

Result<Trace> trace_of(const Values& point, const Setting& setting) {
  const int draw = point["sample"];
  const bool table = point["part"] == "table_3";
  TraceOptions reading{.jitter_s = 3, .seed = setting.seed + uint64_t(draw)};
  Result<Trace> trace = mooncake_trace(table ? "tool_agent" : "conversation", setting, reading);
  if (!trace) return trace;
  const size_t all = trace.value().requests.size(), n = setting.tiny ? 80 : table ? 8000 : 5000;
  return window(trace.value(), (all - n) / (kDraws - 1) * size_t(draw), n);
}

// The loads of P and D over time, and their correlation.
struct Loads {
  std::vector<double> p, d;
  double correlation() const {
    const Summary a = summarize(p), b = summarize(d);
    double sum = 0;
    for (size_t i = 0; i < p.size(); ++i) sum += (p[i] - a.mean) * (d[i] - b.mean);
    return sum / double(p.size()) / std::max(1e-12, a.std * b.std);
  }
};

// From the first minute on, until the last arrival.
Loads loads_of(const SimulationOptions& o, const Simulation& run) {
  const std::vector<Role> roles = parse_topology(o.topology).value();
  const auto n_p = double(std::ranges::count(roles, Role::prefill)), n_d = double(roles.size()) - n_p;
  const double room = n_d * kv_tokens(o.model, o.hardware), last_s = run.records.back().arrival_s;
  const model::StepCost cost = step_cost(o.model, o.hardware);
  Loads loads;
  const auto n = size_t(std::max(1.0, (last_s - 60) / kLookS));
  loads.p.resize(n), loads.d.resize(n);
  const auto at = [n](double time_s) { return size_t(std::clamp((time_s - 60) / kLookS, 0.0, double(n))); };
  for (const SimulatedRecord& r : run.records) {
    if (r.end == SimulatedEnd::refused && r.last_s <= r.arrival_s) continue;  // refused on arrival
    const double prompt_s = cost.seconds(model::prompt_steps(r.prompt - r.cached, r.cached, o.engine.step_tokens)) /
                            n_p / 30;
    const double done_s = r.times.first_s >= 0 ? r.times.first_s : r.last_s;
    for (size_t i = at(r.arrival_s); i < at(done_s); ++i) loads.p[i] += prompt_s;
    const double tokens = double(r.times.gaps.size()), lasts_s = std::max(1e-9, r.last_s - done_s);
    for (size_t i = at(done_s); i < at(r.last_s); ++i)
      loads.d[i] += (r.prompt + tokens * (60 + double(i) * kLookS - done_s) / lasts_s) / room;
  }
  return loads;
}

// Share of the requests refused after their prefill that a later request overtook: it arrived later and had joined D
// before.
double overtaken(const Simulation& run) {
  std::vector<const SimulatedRecord*> late, joined;
  for (const SimulatedRecord& r : run.records) {
    if (r.end == SimulatedEnd::refused && r.last_s > r.arrival_s) late.push_back(&r);
    if (r.times.first_s >= 0) joined.push_back(&r);
  }
  const auto was = [&](const SimulatedRecord* r) {
    return std::ranges::any_of(joined, [r](const SimulatedRecord* other) {
      return other->arrival_s > r->arrival_s && other->times.first_s < r->last_s && other->last_s > r->last_s;
    });
  };
  return late.empty() ? 0 : double(std::ranges::count_if(late, was)) / double(late.size());
}

Result<Finding> run(const Values& point, const Setting& setting) {
  Result<Trace> read = trace_of(point, setting);
  if (!read) return read.error();
  const Trace trace = faster(std::move(read).value(), 2);
  SimulationOptions o = simulated("a800x8", "llama-3-70b", point["topology"], trace).value();
  o.hardware.link_bytes_per_s = kLink;
  o.conductor.placement = find_placement_policy("mooncake");
  o.conductor.admission = find_admission_policy(std::string(point["admission"]));
  o.conductor.admission_options.factor = point["factor"];
  o.conductor.objectives = {30, 0.1};
  Result<Simulation> run = simulate(o, trace);
  if (!run) return run.error();
  Finding found;
  Values row = outcome(run.value(), o.conductor.objectives, found.wrong);
  row["source"] = source_of(trace);
  const Loads loads = loads_of(o, run.value());
  row["wasted_share"] = double(row["wasted_prefill_s"]) / double(row["prefill_busy_s"]);
  row["overtaken_share"] = overtaken(run.value());
  row["p_load"] = summarize(loads.p).mean, row["p_swing"] = summarize(loads.p).std;
  row["d_load"] = summarize(loads.d).mean, row["d_swing"] = summarize(loads.d).std;
  row["correlation"] = loads.correlation();
  found.rows.push_back(row);
  return found;
}

REGISTER_EXPERIMENT("rejection", "cpu", points, each<run>);

}  // namespace admission

// rejection/reservation: the gain if a prompt begins only when its prefix is pinned and both the room of its suffix and
// D's room are reserved (--reservation escrow). overload: as above. reuse: WavePP's ablation
// in its shape: eight clients in a closed loop, prompts of 131,072 tokens, nine tenths of which repeat the client's
// previous prompt, eight stages. P and D hold .7, .9 or 1.1 of the prompts.
//
// Expected: without it, a request that waits for D waits between two tokens, beyond 100 ms. With it, the request waits
// before the first token, where 30 s are allowed: 1.2 to 4 times as many within both, throughput .95 to 1.05. reuse:
// LRU with clients in turn loses each prefix before it is used again: 1 to 1.6 times at .7 and .9; at 1.1 .98 to 1.02.
namespace reserve_blocks {

constexpr Objectives kObjectives = {30, 0.1};
constexpr int kDraws = 3;
constexpr int kClients = 8, kTurns = 6, kPrompt = 131072, kBlock = 512;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  const auto add = [&](const char* part, double speed, const char* admission, double pool, int draw) {
    for (const char* reservation : {"off", "escrow"})
      all.push_back({{"part", part},
                     {"speed", speed},
                     {"admission", admission},
                     {"pool", pool},
                     {"reservation", reservation},
                     {"sample", draw}});
  };
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw) {
    add("overload", 2, "none", 0, draw);
    for (double pool : {0.7, 0.9, 1.1}) add("reuse", 1, "none", pool, draw);
  }
  return all;
}

// The prompts of a client have nine tenths in common. Their order is drawn for each round.
Trace reuse_trace(const Setting& setting, uint64_t seed) {
  Trace trace{.requests = {}, .block_tokens = kBlock, .closed_loop = true, .notes = {}};
  const int prompt = setting.tiny ? 8 * kBlock : kPrompt, turns = setting.tiny ? 2 : kTurns;
  Random random(seed);
  for (int turn = 0; turn < turns; ++turn)
    for (int client = 0; client < kClients; ++client) {
      TraceRequest request{.arrival_s = turn == 0 ? 1e-3 * random.uniform() : 0,
                           .prompt_tokens = prompt,
                           .output_tokens = 2 + int(random.below(16)),
                           .session = client,
                           .after = turn == 0 ? -1 : int(trace.requests.size()) - kClients};
      for (int block = 0; block < prompt / kBlock; ++block) {
        const bool common = block < prompt / kBlock * 9 / 10;
        request.blocks.push_back(uint64_t(client + 1) << 40 | uint64_t(common ? 0 : turn + 1) << 24 | uint64_t(block));
      }
      trace.requests.push_back(std::move(request));
    }
  return trace;
}

Result<Trace> trace_of(const Values& point, const Setting& setting) {
  const int draw = point["sample"];
  if (point["part"] == "reuse") return reuse_trace(setting, setting.seed + uint64_t(draw));
  TraceOptions reading{.jitter_s = 3, .seed = setting.seed + uint64_t(draw)};
  Result<Trace> trace = mooncake_trace("conversation", setting, reading);
  if (!trace) return trace;
  const size_t all = trace.value().requests.size(), n = setting.tiny ? 80 : 5000;
  return faster(window(trace.value(), (all - n) / (kDraws - 1) * size_t(draw), n), point["speed"]);
}

SimulationOptions options_of(const Values& point, const Trace& trace) {
  if (point["part"] == "overload") {
    SimulationOptions o = simulated("a800x8", "llama-3-70b", "12P1D", trace).value();
    o.hardware.link_bytes_per_s = 100e9;
    o.conductor.placement = find_placement_policy("mooncake");
    return o;
  }
  SimulationOptions o = simulated("h200x1", "llama-3-70b", "1P1D", trace).value();
  o.prefill_pp = o.decode_pp = 8;
  o.hardware.link_bytes_per_s = 200e9;
  o.kv_tokens = double(point["pool"]) * kClients * trace.requests[0].prompt_tokens;
  o.conductor.placement = find_placement_policy("least_loaded");
  set_step_tokens(o, 16384);
  return o;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const Result<Trace> trace = trace_of(point, setting);
  if (!trace) return trace.error();
  SimulationOptions o = options_of(point, trace.value());
  o.conductor.objectives = kObjectives;
  o.conductor.admission = find_admission_policy(std::string(point["admission"]));
  o.conductor.reserve_blocks = point["reservation"] == "escrow";
  const Result<Simulation> run = simulate(o, trace.value());
  if (!run) return run.error();
  Finding found;
  Values row = outcome(run.value(), kObjectives, found.wrong);
  double tokens = 0, last_s = 0;
  for (const SimulatedRecord& r : run.value().records) {
    last_s = std::max(last_s, r.last_s);
    if (r.end == SimulatedEnd::completed) tokens += r.prompt + double(r.times.gaps.size()) + 1;
  }
  row["wasted_share"] = double(row["wasted_prefill_s"]) / double(row["prefill_busy_s"]);  // work lost by refusals
  row["tokens_s"] = tokens / std::max(1e-9, last_s);
  row["evictions"] = run.value().prefill_evictions;
  found.rows.push_back(row);
  return found;
}

REGISTER_EXPERIMENT("rejection/reservation", "cpu", points, each<run>);

}  // namespace reserve_blocks

}  // namespace
}  // namespace xpyd::experiments::rejection_experiment
