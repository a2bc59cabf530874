// append_prefill: what is it worth that D computes a conversation's next turn itself, where its KV is, and who decides
// it well: --disagg append_cost (PPD, arXiv 2603.13358), the other orders, or the best fixed length?
//
// The simulator (experiments/simulate/): the first 400 calls of the 40 recorded sessions of coding agents, Qwen2.5-32B
// on instances of 8 x H200, without pauses, a session every `apart_s` in the mean; what a session asks next begins with
// what D answered. A prompt has 105,000 tokens in the mean; from the second turn on 850 of them (the median; a tenth
// has over 4,600, where histories were rewritten) follow the prompt before, and 230 of these are the answer. P: the
// shortest queue with the prefix counted; D: the fewest sequences, where the order does not name one.
//
// PPD's first token is D's, when the KV has crossed; here P puts out the first one, and D the second. So `first_s` is
// the time until D puts out a token (the first one where no P does), TPOT the mean of the gaps from there on; the
// client's own TTFT and its TBT (the longest tenth of gaps) are columns, too. `threshold`: append where D lacks at
// most so many tokens, at the same D as append_cost; `oracle`: the best of these by PPD's score over prefill_first,
// the share of first_s saved less the share of TPOT added.
//
// Arithmetic. A token behind 100,000 others is 66 GFLOP and attention's 131, so 850 are 43 ms of 8 x 989 TFLOP/s at
// half of that, on P and on D alike; the answer, which P has not, is .27 of them. KV is 262 KB a token: 850 are 18 ms
// at 100 Gb/s, of which by layers a 64th shows. So 1P1D with nobody waiting: .6 to 1 times. (The mean says something
// else: a first prompt or a rewritten history is 5 s of P, which is busy for a sixth of the time at a session a
// minute; who comes then waits 2.5 s, .4 in the mean: .25 to .6.) 2P2D: placement by the fewest sequences finds the D
// that has the KV every other time; else 27 GB cross, 2.2 s at 100 Gb/s, .55 at 400, 8.8 at 25: prefill_first's mean
// is 1.3 s at 100, append_cost's .2: .1 to .5 (published: 0.32), at 400 .2 to .7, at 25 .02 to .3. (After some turns
// both D's have most of it, and what crosses is what the other one has seen since: .3 to .7 at a session a minute.)
// conditional_cost appends, too, where placement happened to find the D: .3 to .9. (What D computes P does not have,
// so that P is never the cheaper one again, and where placement names the other D that one computes all: 1 to 2.)
//
// A turn lasts 4 to 5 s (500 tokens of 8 ms) and its prompt .3 s of P: at 15 s between sessions twelve are there, P's
// load is .8, and what P need not compute shortens the queue for all: .1 to .7 (1P1D). TPOT: three at once on D are
// each delayed by the others' appends, 2 x .2 s in 4.5: 1 to 1.2 times. (But behind a busy P turns wait for each
// other, and then decode all at once: .85 to 1.05.) Where KV need not cross it is no worse: .9 to 1.1 (2P2D). The best
// length is one that leaves rewritten histories to P, 2K to 16K; it knows how it ends, so append_cost's score is at
// most .1 above and .25 below it.
#include <map>
#include <set>

#include "base/stats.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::append_prefill_experiment {
namespace {

using namespace disagg;

constexpr int kLengths[] = {1024, 4096, 16384, 1 << 30};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  const auto add = [&](const char* topology, double gbps, double apart_s) {
    all.push_back({{"topology", topology}, {"gbps", gbps}, {"apart_s", apart_s}});
  };
  for (const char* topology : {"1P1D", "2P2D"})
    for (double apart_s : {60., 15., 8.}) add(topology, 100, apart_s);
  for (double gbps : {25., 400.}) add("2P2D", gbps, 15);
  return all;
}

DisaggOrder up_to(const DisaggView& view, const DisaggOptions& o) {
  const bool append = view.cached_decode > 0 && view.tokens - view.cached_decode <= o.max_local_prefill_tokens;
  return append ? DisaggOrder::local : DisaggOrder::push;
}

// Of the turns from the second on.
struct Turns {
  double first_s = 0, tpot_s = 0;
  Values row;
};

Turns turns_of(const Simulation& run, const Trace& trace) {
  std::set<int> begun;
  std::vector<double> first, client, tpot, tails;
  double appended = 0;
  for (size_t i = 0; i < trace.requests.size(); ++i) {
    const SimulatedRecord& r = run.records[i];
    if (begun.insert(trace.requests[i].session).second) continue;
    client.push_back(r.times.first_s - r.arrival_s);
    const size_t ours = r.order == DisaggOrder::push;  // the first token was P's
    if (r.times.gaps.size() < ours + 1) continue;
    appended += r.order == DisaggOrder::local;
    double gaps_s = 0;
    for (size_t g = ours; g < r.times.gaps.size(); ++g) gaps_s += r.times.gaps[g];
    first.push_back(client.back() + (ours ? r.times.gaps[0] : 0));
    tpot.push_back(gaps_s / double(r.times.gaps.size() - ours));
    tails.push_back(r.times.worst_tenth());
  }
  std::ranges::sort(first);
  Turns turns{.first_s = summarize(first).mean, .tpot_s = summarize(tpot).mean};
  turns.row = {{"turns", first.size()},
               {"first_s", turns.first_s},
               {"first_p50_s", percentile_seen(first, 50)},
               {"first_p90_s", percentile_seen(first, 90)},
               {"ttft_s", summarize(client).mean},
               {"tpot_s", turns.tpot_s},
               {"tbt_s", summarize(tails).mean},
               {"appended", appended / double(first.size())},
               {"kv_gb", run.kv_gb},
               {"prefill_busy_s", run.prefill_busy_s},
               {"decode_busy_s", run.decode_busy_s},
               {"duration_s", run.end_s}};
  return turns;
}

Result<Finding> run(const Values& point, const Trace& trace) {
  Result<SimulationOptions> options = simulated("h200x8", "qwen2.5-32b", point["topology"], trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  o.hardware.link_bytes_per_s = double(point["gbps"]) * 1e9 / 8;
  o.conductor.placement = find_placement_policy("prefix_aware");
  o.answers = true;
  o.fetch = false;
  Finding found;
  Turns base, best;
  const auto score = [&](const Turns& t) {
    return (base.first_s - t.first_s) / base.first_s - (t.tpot_s - base.tpot_s) / base.tpot_s;
  };
  const auto serve = [&](const DisaggPolicy& policy, const std::string& system) -> Result<Turns> {
    o.conductor.disagg = &policy;
    const Result<Simulation> run = simulate(o, trace);
    if (!run) return run.error();
    if (found.wrong.empty()) found.wrong = unserved(run.value(), trace);
    Turns turns = turns_of(run.value(), trace);
    if (base.first_s == 0) base = turns;
    turns.row["score"] = score(turns);
    turns.row["system"] = system;
    turns.row["tokens"] = "";
    return turns;
  };
  for (const char* system : {"prefill_first", "conditional_threshold", "conditional_cost", "append_cost"}) {
    const Result<Turns> turns = serve(*find_disagg_policy(system), system);
    if (!turns) return turns.error();
    found.rows.push_back(turns.value().row);
  }
  DisaggPolicy threshold = *find_disagg_policy("append_cost");
  threshold.decide = up_to;
  for (int tokens : kLengths) {
    o.conductor.disagg_options.max_local_prefill_tokens = tokens;
    const Result<Turns> turns = serve(threshold, "threshold");
    if (!turns) return turns.error();
    found.rows.push_back(turns.value().row);
    found.rows.back()["tokens"] = tokens;
    if (best.first_s == 0 || score(turns.value()) > score(best)) best = turns.value(), best.row["tokens"] = tokens;
  }
  best.row["system"] = "oracle";
  found.rows.push_back(best.row);
  return found;
}

Measure open(const Setting& setting) {
  return [setting, traces = std::make_shared<std::map<double, Trace>>()](const Values& point) -> Result<Finding> {
    const double apart_s = point["apart_s"];
    if (!traces->contains(apart_s)) {
      Result<Trace> trace = find_trace_format("weka")->load(
          setting.traces + "/weka", {.limit = setting.tiny ? 60 : 400, .seed = setting.seed, .rate = 1 / apart_s});
      if (!trace) return trace.error();
      for (TraceRequest& request : trace.value().requests) request.think_s = 0;
      traces->emplace(apart_s, std::move(trace).value());
    }
    return run(point, traces->at(apart_s));
  };
}

REGISTER_EXPERIMENT("append_prefill", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::append_prefill_experiment
