// fetch_or_compute: what a pool of prefixes is worth, by the rate of the links, and whether seconds tell when it is
// none:
// --kv-fetch never, always and cost.
//
// The simulator (experiments/simulate/): 8P8D of 8 x A800 with Llama-3-70B, 3,000 requests of Mooncake's conversation
// and synthetic traces (ticks of 3 s spread; three draws), each to the P with the shortest queue, whatever its cache
// holds: the pool alone brings hits together. "blind" is cost, at 25 Gb/s, with a link taken for what it gave so far in
// the mean instead of what it carries now.
//
// Arithmetic. A token's KV is 328 KB; a P computes some 8,000 tokens/s of 12,000-token prompts, so that fetching is as
// fast as computing at 2.6 GB/s, 21 Gb/s, alone on the link; prefixes are shorter than prompts and their tokens cheaper
// (attention to less), some 10,000 tokens/s: 26 Gb/s. P's links carry KV to D's, too: 3.4 requests/s of 12,000 tokens
// are 13 GB/s of eight links, 1.7 each: 13 Gb/s are gone. So at 10 Gb/s the links are full without a fetch: always
// loses by far; at 25 it loses or is even; at 100 it wins: hits on conversation go from .1 (eight caches, at random) to
// .3 (one), P's work by a fifth, and TTFT by more, as P's are two thirds busy. `cost` must be no worse than the better
// of both by more than a tenth at any rate, and its hits grow with the rate. What it lacks against knowing is seen
// where links are busy: blind is up to 1.5 times as slow at 25 Gb/s.
#include "experiments/simulated.h"

namespace xpyd::experiments::fetch_or_compute_experiment {
namespace {

using namespace disagg;

constexpr int kDraws = 3;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
    for (const char* trace : {"conversation", "synthetic"})
      for (double gbps : {10., 25., 50., 100., 400.})
        for (const char* policy : {"never", "always", "cost", "blind"})
          if (*policy != 'b' || gbps == 25)
            all.push_back({{"trace", trace}, {"gbps", gbps}, {"policy", policy}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string name = point["trace"], policy = point["policy"];
  const int draw = point["sample"];
  Result<Trace> read = find_trace_format("mooncake")
                           ->load(setting.traces + "/mooncake_" + name + ".jsonl",
                                  {.jitter_s = 3, .seed = setting.seed + uint64_t(draw)});
  if (!read) return read.error();
  const size_t all = read.value().requests.size(), n = setting.tiny ? 80 : std::min<size_t>(all, 3000);
  const Trace trace = window(read.value(), (all - n) / (kDraws - 1) * size_t(draw), n);
  Result<SimulationOptions> options = simulated("a800x8", "llama-3-70b", "8P8D", trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  o.hardware.link_bytes_per_s = double(point["gbps"]) * 1e9 / 8;
  o.conductor.placement = find_placement_policy("least_loaded");
  o.conductor.fetch = find_fetch_policy(policy == "blind" ? "cost" : policy);
  o.links_seen = policy != "blind";
  Result<Simulation> run = simulate(o, trace);
  if (!run) return run.error();
  Finding found;
  Values row = outcome(run.value(), {30, 0.1}, found.wrong);
  row["fetches"] = run.value().fetches_s.size();
  row["fetched_tokens"] = run.value().fetched_tokens;
  double seconds = 0;
  for (double s : run.value().fetches_s) seconds += s;
  row["fetch_mean_s"] = seconds / double(std::max<size_t>(1, run.value().fetches_s.size()));
  found.rows.push_back(row);
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("fetch_or_compute", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::fetch_or_compute_experiment
