// regret: how far Algorithm 1 (--placement mooncake) is from what could be known: from caches that lose nothing, and
// from a look ahead.
//
// The simulator: eight instances of 8 x A800 with Llama-3-70B as 4P4D, Mooncake's conversation, its ticks of 3 s
// spread, arrivals such that the P's would work for 0.5, 0.9 or 1.3 of the time if they found nothing; three draws:
// parts of the trace. Prefixes are not fetched. `cache`: 1,000 requests with the 1.3 M tokens of KV that an instance
// has, and with 20 M, more than all P's compute. `ahead`: 60 requests, and a rollout (Bertsekas): one request after
// the other, each P is tried for it while all that come after it go by Algorithm 1, all with their real times; the P
// with the least sum of all TTFTs is kept. It knows the future, its first try is Algorithm 1's own choice, so it is
// never worse; and it is no optimum.
//
// Arithmetic. The trace has .37 of its tokens in common at most, an eighth of them in what is common to all; 1,000
// requests are 12 M tokens, 3 M a P: .43 of what one computes is still there, and most turns come soon: an endless
// cache finds 1 to 1.5 times as much and takes 1 to .6 of the TTFT, less of it the more a queue amplifies. What a look
// ahead can avoid is that a short prompt waits behind a long one, and that the one P with a prefix is taken: with .5 a
// queue is rare (0.85 to 1 of the TTFT); with .9 and 1.3 every request meets one, whose order is fixed but not its
// place: .6 to .95.
#include <algorithm>
#include <string>

#include "experiments/draws.h"

namespace xpyd::experiments::regret_experiment {
namespace {

using namespace disagg;

constexpr int kDraws = 3;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (const char* what : {"cache", "endless", "short", "ahead"})
    for (double load : {0.5, 0.9, 1.3})
      for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
        all.push_back({{"what", what}, {"load", load}, {"sample", draw}});
  return all;
}

// Whose prompt goes where: by the number of the placement; beyond these by Algorithm 1.
std::vector<int> chosen_prefill;

Placement as_chosen(const ClusterView& view, const PlacementOptions& options) {
  Placement placed = find_placement_policy("mooncake")->place(view, options);
  if (view.number < chosen_prefill.size()) placed.prefill = chosen_prefill[view.number];
  return placed;
}

double ttft_sum(const Simulation& run) {
  double sum = 0;
  for (const SimulatedRecord& r : run.records) sum += r.times.first_s - r.arrival_s;
  return sum;
}

Result<Simulation> look_ahead(SimulationOptions o, const Trace& trace, int prefills) {
  PlacementPolicy policy = *find_placement_policy("mooncake");
  policy.place = as_chosen;
  o.conductor.placement = &policy;
  chosen_prefill.clear();
  Result<Simulation> best = simulate(o, trace);
  for (size_t i = 0; best && i < trace.requests.size(); ++i) {
    int kept = -1;  // Algorithm 1's, which need not be known by its number
    for (int p = 0; p < prefills; ++p) {
      chosen_prefill.resize(i), chosen_prefill.push_back(p);
      Result<Simulation> run = simulate(o, trace);
      if (!run) return run;
      const double gain = ttft_sum(best.value()) - ttft_sum(run.value());
      if (gain > 0 || (gain == 0 && kept < 0)) best = std::move(run), kept = p;
    }
    chosen_prefill.back() = kept;
  }
  return best;
}

Result<Finding> run(const Values& point, const Trace& all, const Setting& setting) {
  const std::string what = point["what"];
  const bool few = what == "short" || what == "ahead";
  const size_t n = setting.tiny ? 8 : few ? 60 : 1000, apart = (all.requests.size() - n) / (kDraws - 1);
  Trace trace = window(all, apart * size_t(int(point["sample"])), n);
  Result<SimulationOptions> options = simulated("a800x8", "llama-3-70b", "4P4D", trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  trace = faster(std::move(trace), double(point["load"]) * 4 / prefill_load(o, trace));
  o.conductor.placement = find_placement_policy("mooncake");
  o.conductor.objectives = {30, 0.1};
  o.fetch = false;
  if (what == "endless") o.kv_tokens = 20e6;
  Result<Simulation> run = what == "ahead" ? look_ahead(o, trace, 4) : simulate(o, trace);
  if (!run) return run.error();
  Finding found;
  found.rows.push_back(outcome(run.value(), o.conductor.objectives, found.wrong));
  return found;
}

Measure open(const Setting& setting) {
  return over_draws(setting, [setting](const Values& point, const Trace& trace) { return run(point, trace, setting); });
}

REGISTER_EXPERIMENT("regret", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::regret_experiment
