// mooncake_pool: what Mooncake (FAST'25) found about its pool, on the simulator: hits of one cache for all against one
// for each (Fig. 10), copies of what is hot (Fig. 11), the network's rate (Fig. 13), Algorithm 1's threshold, and what
// goes wrong where a rule is taken at its word.
//
// Instances of 8 x A800 with Llama-3-70B and 3 M tokens of KV each; the released traces (ticks of 3 s spread; three
// seeds) and the generated tool&agent, whole. `hits`: 10 P, answers of one token, links of 800 Gb/s. Prompts go to
// "random", "prefix" (who has most of it, of equals the shortest queue: the published "local"), "local" (Algorithm 1
// without transfers), "global" (Algorithm 1, threshold 1.5), "zero" (… in which 0 tokens here are no ratio, and nothing
// is fetched); "pool" is one instance, ten times as fast, with 30 M tokens: what a pool without places would find.
// `copies`: 8P8D, global; of keys by how often they are used, the most instances that had it when it was used.
// `bandwidth`: 8P8D, synthetic, 24 to 400 Gb/s; "blind" takes a link for what it was in the mean. `threshold`: 8P8D, 50
// Gb/s, 6,000 requests. `lease`: the same, local, 3 M or 0.3 M tokens: hits that were promised at placement, and had
// gone when the prompt began.
//
// Arithmetic. Another program replays the traces on ten caches: hits on conversation are .10 at random, .136 by the
// longest prefix (all have block 0 in common, so one instance gets everything: most / mean 10), .359 in one cache for
// all; on synthetic .19, .640 (1.01) and .640. Algorithm 1 finds .357 and .645. So global / prefix is 2.4 to 2.8 and 1
// to 1.05, global / random 3 to 3.6 and 3.2 to 3.5, and P's time falls as what is left to compute: (1 - .357) / (1 -
// .136) = .74. tool&agent has four first blocks and .44 of hits in one cache of 3 M, .55 in all: 1.2 to 1.5. Against
// the pool nothing is lost but what copies push out: 0 to 5 %. A key that is used often is asked for while its holder
// is busy, so it comes to all 8; on synthetic sessions are alone with theirs: few copies. Rates: P's send 19.6 GB/s,
// 2.5 each: of 24 Gb/s four fifths, of 100 a fifth: a fetch takes 1.1 to 2 times what it would alone at 100 Gb/s, many
// times at 24. Mean TTFT at 100 Gb/s another program has as 1.51 s; nothing but fetches waits for the network. The
// threshold decides only what is nearly as long here as there: 1 to 5 within a tenth; endless is local: 1.1 to 1.4 of
// it. "zero" is as good where all have block 0, and as local on synthetic (1.05 to 1.35). Of 3 M tokens nothing goes
// while a prompt waits; .3 M are 25 prompts of 12,000, of which some wait: 1 to 20 % of what was promised.
#include <algorithm>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "experiments/simulated.h"

namespace xpyd::experiments::mooncake_pool_experiment {
namespace {

using namespace disagg;

constexpr int kDraws = 3;
constexpr double kFast = 800, kBusy = 50;  // Gb/s
constexpr double kUsual = 1.5, kEndless = 1e9;
constexpr int kRanks[] = {10, 100, 1000, 10000};

Values of(const char* part, const char* trace, const char* topology, const char* system, double gbps, double threshold,
          double kv_tokens, int draw) {
  return {{"part", part}, {"trace", trace},         {"topology", topology},   {"system", system},
          {"gbps", gbps}, {"threshold", threshold}, {"kv_tokens", kv_tokens}, {"sample", draw}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw) {
    for (const char* trace : {"conversation", "tool_agent", "synthetic"}) {
      for (const char* system : {"random", "prefix", "local", "global"})
        all.push_back(of("hits", trace, "10P1D", system, kFast, kUsual, 3e6, draw));
      all.push_back(of("hits", trace, "1P1D", "pool", kFast, kUsual, 30e6, draw));
      all.push_back(of("copies", trace, "8P8D", "global", kFast, kUsual, 3e6, draw));
    }
    all.push_back(of("hits", "synthetic", "10P1D", "zero", kFast, kUsual, 3e6, draw));
    for (double gbps : {24., 50., 100., 200., 400.})
      all.push_back(of("bandwidth", "synthetic", "8P8D", "global", gbps, kUsual, 3e6, draw));
    for (double gbps : {24., 100.})
      all.push_back(of("bandwidth", "synthetic", "8P8D", "blind", gbps, kUsual, 3e6, draw));
    all.push_back(of("bandwidth", "synthetic", "8P8D", "local", 100, kUsual, 3e6, draw));
    for (const char* trace : {"conversation", "synthetic"})
      for (double threshold : {1., 1.3, 2., 3., 5., kEndless})
        all.push_back(of("threshold", trace, "8P8D", "global", kBusy, threshold, 3e6, draw));
    for (double kv_tokens : {3e6, 3e5})
      all.push_back(of("lease", "conversation", "8P8D", "local", kFast, kUsual, kv_tokens, draw));
  }
  return all;
}

// What placement saw and did, of one run at a time.
struct Placing {
  std::string system;
  const Trace* trace = nullptr;
  std::vector<double> requests;  // by instance
  std::vector<int> promised;     // by request: tokens
  double said_s = 0;             // fetches, as predicted
  int64_t fetches = 0;
  std::unordered_map<uint64_t, int> copies;  // of the keys that are looked at: the most
} placing;

Placement longest_prefix(const ClusterView& view) {
  Placement placed;
  for (int i = 0; i < int(view.instances.size()); ++i) {
    const InstanceView &one = view.instances[size_t(i)], &best = view.instances[size_t(std::max(0, placed.prefill))];
    if (one.role == Role::decode) {
      if (placed.decode < 0) placed.decode = i;
    } else if (placed.prefill < 0 || one.cached_tokens > best.cached_tokens ||
               (one.cached_tokens == best.cached_tokens && one.queued_tokens < best.queued_tokens)) {
      placed.prefill = i;
    }
  }
  return placed;
}

Placement choose(ClusterView view, const PlacementOptions& options) {
  const std::string& system = placing.system;
  if (system == "prefix") return longest_prefix(view);
  std::vector<InstanceView> cold;
  if (system == "zero") {
    cold.assign(view.instances.begin(), view.instances.end());
    for (InstanceView& instance : cold)
      if (instance.cached_tokens == 0) instance.fetch_s = kNever;
    view.instances = cold;
  }
  return find_placement_policy(system == "random" ? "random" : "mooncake")->place(view, options);
}

Placement place(const ClusterView& view, const PlacementOptions& options) {
  const Placement placed = choose(view, options);
  const InstanceView& chosen = view.instances[size_t(placed.prefill)];
  placing.requests.resize(view.instances.size());
  ++placing.requests[size_t(placed.prefill)];
  if (placed.source >= 0) ++placing.fetches, placing.said_s += chosen.fetch_s;
  const int most = (view.prompt_tokens - 1) / view.block_tokens * view.block_tokens;  // a token is always computed
  const int there = placed.source >= 0 ? view.instances[size_t(placed.source)].cached_tokens : chosen.cached_tokens;
  placing.promised[size_t(view.number)] = std::min(most, there);
  const std::vector<uint64_t>& blocks = placing.trace->requests[size_t(view.number)].blocks;
  for (size_t at = 0; at < blocks.size(); ++at)
    if (const auto looked_at = placing.copies.find(blocks[at]); looked_at != placing.copies.end())
      looked_at->second = std::max(looked_at->second, int(std::ranges::count_if(view.instances, [&](const auto& one) {
                                     return one.cached_tokens >= int(at + 1) * view.block_tokens;
                                   })));
  return placed;
}

// Whole blocks by how often they are used, the most used one first; of equals the one that comes first.
std::vector<uint64_t> by_use(const Trace& trace) {
  std::unordered_map<uint64_t, std::pair<int, size_t>> used;
  for (const TraceRequest& request : trace.requests)
    for (size_t at = 0; int(at + 1) * trace.block_tokens <= request.prompt_tokens && at < request.blocks.size(); ++at)
      ++used.try_emplace(request.blocks[at], 0, used.size()).first->second.first;
  std::vector<uint64_t> keys;
  for (const auto& [key, use] : used) keys.push_back(key);
  std::ranges::sort(keys, {}, [&](uint64_t key) { return std::pair(-used.at(key).first, used.at(key).second); });
  return keys;
}

// The keys of this rank and a tenth more.
std::span<const uint64_t> around(std::span<const uint64_t> keys, int rank) {
  const size_t first = std::min(keys.size(), size_t(rank) - 1);
  return keys.subspan(first, std::min(keys.size() - first, size_t(rank / 10 + 1)));
}

Result<Trace> trace_of(const Values& point, const Setting& setting) {
  const std::string name = point["trace"];
  const int draw = point["sample"];
  const bool generated = name == "tool_agent";
  TraceOptions reading{.jitter_s = 3, .seed = setting.seed + uint64_t(draw)};
  if (setting.tiny)
    reading.limit = 60;
  else if (generated)
    reading.limit = 12000;
  else if (point["part"] == "threshold" || point["part"] == "lease")
    reading.limit = 6000;
  return find_trace_format(generated ? "tool_agent" : "mooncake")
      ->load(setting.traces + "/mooncake_" + name + ".jsonl", reading);
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const Result<Trace> read = trace_of(point, setting);
  if (!read) return read.error();
  const Trace& trace = read.value();
  const std::string part = point["part"], system = point["system"];
  Result<SimulationOptions> options = simulated("a800x8", "llama-3-70b", point["topology"], trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  const double gbps = point["gbps"];
  o.hardware.link_bytes_per_s = gbps / 8 * 1e9;
  o.kv_tokens = point["kv_tokens"];
  o.links_seen = system != "blind";
  if (part == "hits") o.output_tokens = 0;
  if (system == "pool") o.hardware.flops_per_s *= 10, o.hardware.bytes_per_s *= 10, o.hardware.step_s /= 10;
  o.fetch = system != "local";
  o.conductor.placement_options.fetch_threshold = point["threshold"];

  const std::vector<uint64_t> keys = part == "copies" ? by_use(trace) : std::vector<uint64_t>();
  placing = {.system = system, .trace = &trace, .promised = std::vector<int>(trace.requests.size())};
  for (int rank : kRanks)
    for (uint64_t key : around(keys, rank)) placing.copies[key] = 0;
  PlacementPolicy policy = *find_placement_policy("mooncake");
  policy.place = place;
  o.conductor.placement = &policy;
  o.conductor.objectives = {30, 0.1};
  const Result<Simulation> simulation = simulate(o, trace);
  if (!simulation) return simulation.error();
  const Simulation& done = simulation.value();

  Finding found;
  Values row = outcome(done, o.conductor.objectives, found.wrong);
  double prompts = 0, promised = 0, lost = 0, took_s = 0;
  for (size_t i = 0; i < done.records.size(); ++i) {
    prompts += done.records[i].prompt;
    promised += placing.promised[i];
    lost += std::max(0, placing.promised[i] - done.records[i].cached);
  }
  for (double seconds : done.fetches_s) took_s += seconds;
  const double fetches = std::max<double>(1, double(done.fetches_s.size()));
  const double most = *std::ranges::max_element(placing.requests);
  const auto n_prefill = double(std::stoi(point["topology"]));
  row["most_over_mean"] = most * n_prefill / double(trace.requests.size());
  row["promised_share"] = promised / prompts;
  row["lost_share"] = promised > 0 ? lost / promised : 0;
  row["fetch_share"] = double(done.fetches_s.size()) / double(trace.requests.size());
  row["fetch_said_s"] = placing.said_s / std::max<double>(1, double(placing.fetches));
  row["fetch_took_s"] = took_s / fetches;
  row["fetch_alone_s"] = double(done.fetched_tokens) * o.model.kv_token_bytes() / o.hardware.link_bytes_per_s / fetches;
  for (int rank : kRanks) {
    const std::span<const uint64_t> band = around(keys, rank);
    double copies = 0;
    for (uint64_t key : band) copies += placing.copies.at(key);
    row["copies_" + std::to_string(rank)] = copies / std::max<double>(1, double(band.size()));
  }
  placing = {};
  found.rows.push_back(row);
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("mooncake_pool", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::mooncake_pool_experiment
