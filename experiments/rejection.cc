// rejection: who is refused, when, and what it saves: the rows of --admission under overload, the error of t_d, and how
// the loads of P and D swing.
//
// The simulator (experiments/simulate/): instances of 8 x A800 with Llama-3-70B and four links of 200 Gb/s (one of 100
// would bind a single D: 6.8 prompts a second are 27 GB), Mooncake's conversation trace (5,000 of its requests, its
// ticks of 3 s spread; three parts) twice as fast for each D, objectives 30 s and 100 ms (or 40). A D holds 1.33 M
// tokens of KV. `table_3`: the published set-up, 8P8D and the generated tool&agent at twice its speed. P's load is the
// work of accepted prompts that are not done, over 30 s; D's the tokens that its sequences have, over its room; both
// looked at every 2 s. `predicted` has the moving mean of ended decodes as t_d, times `factor`. What a sequence will
// need at most is known here, since each answer ends at its max_tokens: better than a server knows it. `oracle`: t_d is
// each answer's own, its tokens exact and a step that of now, times `factor`, its tokens times a log-normal factor of
// mean 1.
//
// Arithmetic. 3.4 requests/s, twice: 6.8. A D at its 1.33 M tokens takes 12.4 ms for weights and 1.33 M x 328 KB / 11.4
// TB/s = 38 ms: 343 tokens of 50 ms are 17 s, and 110 sequences of 12,200 fit: 6.4/s: a little overloaded, more in
// bursts. 12 P work at 2 x .94 x 8 / 12 = 1.25 without hits, .9 with: prompts take 1 to 10 s. `late` refuses when a
// prompt is done, and wastes it: all of the 10 to 20 % that D cannot take. `early` reads D one prefill too soon: half
// of these are refused early, and more than need be. With prompts under way (early_in_flight) none is late. An unbiased
// t_d of 17 s forgets all who decode for longer, and refuses almost nobody early: as late (a pilot of another
// simulator: 97 early and 1,163 late); t_d four times as long is careful: fewer wasted. `reserve` wastes nothing by
// construction; its price is what it holds for answers that are not written yet, some 170 tokens of 12,200: nothing. So
// it keeps at least what the best t_d does, .97 to 1.1 of it, if the pilot is right that reservation is what is
// missing. Then an oracle gains no more than the mean does, .9 to 1.3 of `late`: whom it does not see is who comes
// later and joins before, the room that is left when others end is promised twice; an error of .5 and no bias changes
// nothing
// (.9 to 1.1), a bias of 2 is careful (1 to 3), and reserve keeps 1.5 to 4 times as many. Table 3 (4183, 3771, 3589 of
// 23,000) has D's that bind. With the published model (8 heads of KV) eight of these D's hold 10.6 M tokens, and 13
// requests/s of 8,600 tokens and 182 answers of 15 ms have 0.3 M at once: no D ever binds, and the three rows refuse
// the same. Swings: P's and D's loads are out of phase under early rejection: correlation below 0. With k times the P,
// D and rate the sum of D's is smoother: the swing of D's load falls, at most as 1 / sqrt(k). Of 9, 12 or 16 P prompts
// wait 8, 2 or 1 s, and the later D's load is felt, the more it swings.
#include <algorithm>
#include <map>

#include "base/stats.h"
#include "disagg/cluster.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::rejection_experiment {
namespace {

using namespace disagg;

constexpr int kDraws = 3;
constexpr double kLookS = 2;
constexpr double kLink = 100e9;  // four of 200 Gb/s

// `error` below 0: t_d is the mean of decodes that have ended, and no oracle's.
Values of(const char* part, const char* topology, double speed, double tbt, const char* admission, double factor,
          int draw, double error = -1) {
  return {{"part", part},           {"topology", topology}, {"speed", speed},        {"slo_tbt_s", tbt},
          {"admission", admission}, {"factor", factor},     {"oracle_error", error}, {"sample", draw}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw) {
    for (const char* admission : {"none", "late", "early", "early_in_flight", "reserve"})
      all.push_back(of("overload", "12P1D", 2, 0.1, admission, 1, draw));
    for (double factor : {0.25, 0.5, 1., 2., 4., 8.})
      all.push_back(of("overload", "12P1D", 2, 0.1, "predicted", factor, draw));
    // Where a step, and not the room, is what D lacks.
    for (const char* admission : {"late", "early", "early_in_flight", "reserve"})
      all.push_back(of("overload", "12P1D", 2, 0.04, admission, 1, draw));
    for (double factor : {1., 4.}) all.push_back(of("overload", "12P1D", 2, 0.04, "predicted", factor, draw));
    // An oracle's t_d: without error, biased, and with an error that is none of the mean.
    for (double factor : {0.5, 1., 2., 4.}) all.push_back(of("oracle", "12P1D", 2, 0.1, "predicted", factor, draw, 0));
    for (double error : {0.5, 1.}) all.push_back(of("oracle", "12P1D", 2, 0.1, "predicted", 1, draw, error));
    all.push_back(of("oracle", "12P1D", 2, 0.04, "predicted", 1, draw, 0));
    // More of everything; then prompts that wait longer, and less.
    for (const auto& [topology, speed] : {std::pair{"24P2D", 4.}, {"48P4D", 8.}})
      for (const char* admission : {"early", "predicted", "reserve"})
        all.push_back(of("swing", topology, speed, 0.1, admission, 1, draw));
    for (const char* topology : {"9P1D", "16P1D"})
      for (const char* admission : {"early", "reserve"})
        all.push_back(of("swing", topology, 2, 0.1, admission, 1, draw));
    for (const char* admission : {"late", "early", "predicted"})
      all.push_back(of("table_3", "8P8D", 2, 0.1, admission, 1, draw));
  }
  return all;
}

Result<Trace> trace_of(const Values& point, const Setting& setting) {
  const int draw = point["sample"];
  const bool table = point["part"] == "table_3";
  TraceOptions reading{.jitter_s = 3, .seed = setting.seed + uint64_t(draw)};
  Result<Trace> trace = find_trace_format(table ? "tool_agent" : "mooncake")
                            ->load(setting.traces + "/mooncake_conversation.jsonl", reading);
  if (!trace) return trace;
  const size_t all = trace.value().requests.size(), n = setting.tiny ? 80 : table ? all : 5000;
  return window(trace.value(), (all - n) / (kDraws - 1) * size_t(draw), n);
}

// The two loads, and what they have to do with each other.
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
    if (r.end == SimulatedEnd::refused && r.last_s <= r.arrival_s) continue;  // at once
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

// Of those that were refused when their prompt was done: who came later and had joined before.
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
  const Trace trace = faster(std::move(read).value(), point["speed"]);
  Result<SimulationOptions> options = simulated("a800x8", "llama-3-70b", point["topology"], trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  o.hardware.link_bytes_per_s = kLink;
  o.conductor.placement = find_placement_policy("mooncake");
  o.conductor.admission = find_admission_policy(std::string(point["admission"]));
  o.conductor.admission_options.factor = point["factor"];
  if (const double error = point["oracle_error"]; error >= 0) {
    o.conductor.admission_options.decode = DecodeSeconds::oracle;
    o.oracle_error = error, o.oracle_seed = setting.seed + uint64_t(point["sample"]) * (1 << 20);
  }
  o.conductor.objectives = {30, point["slo_tbt_s"]};
  Result<Simulation> run = simulate(o, trace);
  if (!run) return run.error();
  Finding found;
  Values row = outcome(run.value(), o.conductor.objectives, found.wrong);
  const Loads loads = loads_of(o, run.value());
  row["wasted_share"] = double(row["wasted_prefill_s"]) / double(row["prefill_busy_s"]);
  row["overtaken_share"] = overtaken(run.value());
  row["p_load"] = summarize(loads.p).mean, row["p_swing"] = summarize(loads.p).std;
  row["d_load"] = summarize(loads.d).mean, row["d_swing"] = summarize(loads.d).std;
  row["correlation"] = loads.correlation();
  found.rows.push_back(row);
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("rejection", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::rejection_experiment
