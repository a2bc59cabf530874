// fetch_or_compute: What does a pool of prefixes gain, by link rate, and does a prediction in seconds tell when it
//   gains nothing?
// Paper: Mooncake (FAST'25) section 2.2 and Figs. 10, 11, 13, 14.
// Set-up: --kv-fetch never, always and cost, by the rate of the links. 8P8D of 8 x A800 with Llama-3-70B, 3,000
//   requests of Mooncake's traces. Each request goes to the P with the shortest queue, so hits come from the pool
//   alone.
// Command: make exp-fetch_or_compute (2 minutes; virtual, computed, measured).
// Expected: a token's KV is 328 KB and a P computes 8,000 to 10,000 tokens/s, so fetching is as fast at 21 to 26 Gb/s.
//   P's links also carry 13 Gb/s of KV to D. At 10 Gb/s always loses by far; at 100 Gb/s it wins, and hits rise from .1
//   to .3. cost is at most a tenth worse than the better of both.
// Found: always loses by 6 to 9 times at 10 Gb/s and has .5 to .7 of the TTFT at 100; cost is at most 2 % worse than
//   the better. Hits 2.23 times (Fig. 10: 2.22).
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/random.h"
#include "experiments/experiment.h"
#include "experiments/forwarding.h"
#include "experiments/mooncake_cost.h"
#include "experiments/offload.h"
#include "experiments/simulated.h"
#include "model/cost/cost_model.h"

namespace xpyd::experiments::fetch_or_compute_experiment {
namespace {

using namespace disagg;

namespace rates {

constexpr int kDraws = 3;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
    for (const char* trace : {"conversation", "synthetic"})
      for (double gbps : {10., 100., 400.})
        for (const char* policy : {"never", "always", "cost"})
          all.push_back({{"trace", trace}, {"gbps", gbps}, {"policy", policy}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string name = point["trace"], policy = point["policy"];
  const int draw = point["sample"];
  Result<Trace> read = mooncake_trace(name, setting, {.jitter_s = 3, .seed = setting.seed + uint64_t(draw)});
  if (!read) return read.error();
  const size_t all = read.value().requests.size(), n = setting.tiny ? 80 : std::min<size_t>(all, 2000);
  const Trace trace = window(read.value(), (all - n) / (kDraws - 1) * size_t(draw), n);
  SimulationOptions o = simulated("a800x8", "llama-3-70b", "8P8D", trace).value();
  o.hardware.link_bytes_per_s = double(point["gbps"]) * 1e9 / 8;
  o.conductor.placement = find_placement_policy("least_loaded");
  o.conductor.fetch = find_fetch_policy(policy);
  Result<Simulation> run = simulate(o, trace);
  if (!run) return run.error();
  Finding found;
  Values row = outcome(run.value(), {30, 0.1}, found.wrong);
  row["fetches"] = run.value().fetches_s.size();
  row["fetched_tokens"] = run.value().fetched_tokens;
  found.rows.push_back(row);
  return found;
}

REGISTER_EXPERIMENT("fetch_or_compute", "cpu", points, each<run>);

}  // namespace rates

// fetch_or_compute/oracle: `cost` beside a search with hindsight. 4P4D, 24 conversations of five turns. `hindsight` is
// the best of never, always, cost, one constant factor (scaled), and the best of these with each request's choice
// inverted in turn. `free` is always with transfers that take no time.
//
// Expected: at 10 Gb/s hardly a fetch pays, at 400 nearly each does: 1 to 1.1. In between, transfers that begin after a
// prediction take a share of the link: 1.05 to 1.5.
namespace oracle {

constexpr int kDraws = 4, kConversations = 24, kTurns = 5, kBlock = 512;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
    for (double gbps : {10., 25., 50., 100., 400.}) all.push_back({{"load", 1.2}, {"gbps", gbps}, {"sample", draw}});
  return all;
}

// Each turn's prompt is the previous one plus some blocks. Turns have Poisson arrivals and keep their order within a
// conversation.
Trace conversations(int n, uint64_t seed) {
  Trace trace{.block_tokens = kBlock};
  Random random(seed);
  std::vector<double> at_s;
  double now_s = 0;
  for (int i = 0; i < n * kTurns; ++i) at_s.push_back(now_s += random.exponential());
  std::vector<int> turns, blocks(size_t(n), 0);
  for (int i = 0; i < n * kTurns; ++i) turns.push_back(i / kTurns);
  for (size_t i = turns.size(); i > 1; --i) std::swap(turns[i - 1], turns[random.below(i)]);
  for (size_t i = 0; i < turns.size(); ++i) {
    int& has = blocks[size_t(turns[i])];
    has += 4 + int(random.below(9));
    TraceRequest request{.arrival_s = at_s[i], .prompt_tokens = has * kBlock + 1, .output_tokens = 32};
    for (int block = 0; block <= has; ++block)  // the last block holds one token, which is this turn's own
      request.blocks.push_back(uint64_t(turns[i] + 1) << 32 | uint64_t(block < has ? block : 1000 + has));
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

// The decisions during one run. A global, because a policy is a plain function; one run at a time.
struct Choosing {
  uint64_t number = 0;  // of the request being placed
  std::function<bool(uint64_t, const FetchView&)> fetches;
  std::vector<int> answers;  // by request: 1, 0, or -1 if no other instance had more of it
} choosing;

Placement place(const ClusterView& view, const PlacementOptions& options) {
  choosing.number = view.number;
  return find_placement_policy("least_loaded")->place(view, options);
}

bool answer(const FetchView& view) {
  const bool fetches = choosing.fetches(choosing.number, view);
  choosing.answers[choosing.number] = fetches;
  return fetches;
}

bool cost(const FetchView& view) { return find_fetch_policy("cost")->fetches(view); }

struct Done {
  double mean_s = 0;
  std::vector<int> answers;
  Values row;
};

class Search {
 public:
  Search(SimulationOptions options, const Trace& trace, uint64_t seed)
      : options_(std::move(options)), trace_(trace), random_(seed) {
    placement_.place = place;
    options_.conductor.placement = &placement_;
    options_.conductor.fetch = &fetch_;
  }

  Result<Done> run(std::function<bool(uint64_t, const FetchView&)> fetches, double link_bytes_per_s = 0) {
    choosing = {.fetches = std::move(fetches), .answers = std::vector<int>(trace_.requests.size(), -1)};
    SimulationOptions options = options_;
    if (link_bytes_per_s > 0) options.hardware.link_bytes_per_s = link_bytes_per_s;
    Result<Simulation> simulation = simulate(options, trace_);
    if (!simulation) return simulation.error();
    Done done{.answers = choosing.answers};
    std::string wrong = unserved(simulation.value(), trace_);
    if (!wrong.empty()) return invalid(wrong);
    double prompts = 0, hits = 0;
    for (const SimulatedRecord& r : simulation.value().records) {
      done.mean_s += (r.times.first_s - r.arrival_s) / double(trace_.requests.size());
      prompts += r.prompt, hits += r.cached;
    }
    double fetched = 0;
    for (int a : done.answers) fetched += a == 1;
    double asked = 0;
    for (int a : done.answers) asked += a >= 0;
    done.row = {{"ttft_mean_s", done.mean_s}, {"hit_share", hits / prompts}, {"asked", asked}, {"fetches", fetched}};
    return done;
  }

  // All requests in random order.
  std::vector<size_t> order(size_t n) {
    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = n; i > 1; --i) std::swap(order[i - 1], order[random_.below(i)]);
    return order;
  }

 private:
  PlacementPolicy placement_ = *find_placement_policy("least_loaded");
  FetchPolicy fetch_ = {.name = "oracle", .fetches = answer, .most = 0, .source = ""};
  SimulationOptions options_;
  const Trace& trace_;
  Random random_;
};

std::function<bool(uint64_t, const FetchView&)> as(std::vector<int> answers) {
  return [answers = std::move(answers)](uint64_t number, const FetchView& view) {
    return answers[number] < 0 ? cost(view) : answers[number] == 1;
  };
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const int draw = point["sample"];
  Trace trace = conversations(setting.tiny ? 6 : kConversations, setting.seed * kDraws + uint64_t(draw));
  const size_t n = trace.requests.size();
  SimulationOptions o = simulated("a800x8", "llama-3-70b", "4P4D", trace).value();
  trace = faster(std::move(trace), double(point["load"]) * 4 / prefill_load(o, trace));
  o.hardware.link_bytes_per_s = double(point["gbps"]) * 1e9 / 8;

  Search search(o, trace, setting.seed + uint64_t(draw) + 1);
  Finding found;
  Done best{.mean_s = kNever};
  std::string best_of;
  Done least;  // among the rows of one name
  int runs = 0;
  const auto look = [&](const char* name, Done done) {
    ++runs;
    if (least.answers.empty() || done.mean_s < least.mean_s) least = done;
    if (done.mean_s < best.mean_s) best = std::move(done), best_of = name;
  };
  const auto tell = [&](const char* name, const Done& done, int of) {
    Values row = {{"system", name}};
    row.update(done.row);
    row["runs"] = of;
    row["best"] = name == std::string("hindsight") ? best_of : name;
    found.rows.push_back(row);
    least = {};
  };
  using Rule = bool (*)(uint64_t, const FetchView&);
  const std::pair<const char*, Rule> rules[] = {{"never", [](uint64_t, const FetchView&) { return false; }},
                                                {"always", [](uint64_t, const FetchView&) { return true; }},
                                                {"cost", [](uint64_t, const FetchView& view) { return cost(view); }}};
  for (const auto& [name, rule] : rules) {
    Result<Done> done = search.run(rule);
    if (!done) return done.error();
    tell(name, done.value(), 1);
    look(name, std::move(done).value());
  }
  for (double times : {.25, .5, .7, 1.4, 2.}) {
    Result<Done> done = search.run([=](uint64_t, const FetchView& v) { return times * fetch_seconds(v) < v.saved_s; });
    if (!done) return done.error();
    look("scaled", std::move(done).value());
  }
  tell("scaled", least, 5);

  for (size_t at : search.order(n)) {
    if (best.answers[at] < 0) continue;
    std::vector<int> answers = best.answers;
    answers[at] = 1 - answers[at];
    Result<Done> done = search.run(as(std::move(answers)));
    if (!done) return done.error();
    look("flipped", std::move(done).value());
  }
  tell("hindsight", best, runs);
  Result<Done> free = search.run(rules[1].second, kNoTransferTime);
  if (!free) return free.error();
  tell("free", free.value(), 1);
  return found;
}

REGISTER_EXPERIMENT("fetch_or_compute/oracle", "cpu", points, each<run>);

}  // namespace oracle

// fetch_or_compute/break_even: the bandwidth from which fetching a prefix is faster, by Mooncake's own constants
// (FAST'25, equation 2) and by the widths of Llama-3-70B.
//
// Expected for 8,192 tokens: 2.68 GB / .458 s = 5.86 GB/s on 8 x A800, 18.6 on 8 x H800, and 4.13 if an A100 reaches
// 220 TFLOP/s; 100 Gb/s are 3 times that. By the widths .94 of it.
namespace break_even {

struct Machine {
  const char* name;
  double flops_per_s;
};
// Dense bf16 on paper, as Mooncake uses it, with the share of it at which a replay of its trace comes near its TTFTs.
// The last row is what an A100 reaches by the notes of Mooncake's author.
constexpr Machine kMachines[] = {{"8xA800", 8 * 312e12}, {"8xH800", 8 * 989e12}, {"8xA100 at 220", 8 * 220e12}};

CostModel llama_70b() {
  CostModel cost;
  ModelConfig& c = cost.config;
  c.n_layers = 80;
  c.hidden = 8192;
  c.intermediate = 28672;
  c.n_heads = 64;
  c.n_kv_heads = 8;
  c.head_dim = 128;
  c.vocab = 128256;
  return cost;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const Machine& m : kMachines)
    for (int prefix = 256; prefix <= 1 << 20; prefix *= 2) all.push_back({{"machine", m.name}, {"prefix", prefix}});
  return all;
}

Result<Finding> run(const Values& point, const Setting&) {
  const int prefix = point["prefix"];
  double flops_per_s = 0;
  for (const Machine& m : kMachines)
    if (point["machine"] == m.name) flops_per_s = m.flops_per_s;
  const CostModel real = llama_70b();
  const double bytes = prefix * real.kv_token_bytes();
  const double recompute = real.prefill(prefix, 0, false).flops / flops_per_s;
  return Finding{{{{"kv_gb", 1e-9 * bytes},
                   {"paper_recompute_s", kMooncakeLlama70b.flops(prefix) / flops_per_s},
                   {"paper_gbps", 1e-9 * kMooncakeLlama70b.break_even_bytes_per_s(prefix, flops_per_s)},
                   {"recompute_s", recompute},
                   {"gbps", 1e-9 * real.break_even_bytes_per_s(prefix, flops_per_s)},
                   {"fetch_at_100gbit_s", bytes / 12.5e9}}},
                 ""};
}

REGISTER_EXPERIMENT("fetch_or_compute/break_even", "cpu", points, each<run>);

}  // namespace break_even

// fetch_or_compute/breakdown: the parts of one long request's time, with 95 % of its prompt in another instance's
// memory and with none cached (Fig. 14): schedule, fetch, prefill, exposed transfer, decode. 2P1D, 128 output tokens.
//
// Expected: 128K tokens take 37 s; with 95 % cached 2.9 s: .08 (published .08). The prefix is 41 GB: .41 s at 800 Gb/s,
// 3.3 s at 100. So the first token takes .08 to .1, and .15 to .18 of the time (.14).
namespace breakdown {

constexpr int kBlock = 512, kOutput = 128;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (double gbps : {800., 200., 100.})
    for (int prompt : setting.tiny ? std::vector{8192} : std::vector{8192, 16384, 32768, 65536, 131072})
      for (double known : {0., .95}) all.push_back({{"gbps", gbps}, {"prompt", prompt}, {"known", known}});
  return all;
}

Placement place(const ClusterView& view, const PlacementOptions&) {
  return {.prefill = view.number == 0 ? 0 : 1, .decode = 2};
}

Result<Finding> run(const Values& point, const Setting&) {
  const int prompt = point["prompt"], known = int(double(point["known"]) * prompt) / kBlock * kBlock;
  constexpr double kLater = 1e4;  // seconds; the first request is over by then
  Trace trace{.block_tokens = kBlock};
  for (const auto& [at_s, tokens, output] : {std::tuple(0., known + 1, 1), std::tuple(kLater, prompt, kOutput)}) {
    TraceRequest request{.arrival_s = at_s, .prompt_tokens = tokens, .output_tokens = output};
    for (int at = 0; at < tokens; at += kBlock)
      request.blocks.push_back(uint64_t(at + 1) | (at < known ? 0 : uint64_t(output) << 32));
    trace.requests.push_back(std::move(request));
  }
  SimulationOptions o = simulated("a800x8", "llama-3-70b", "2P1D", trace).value();
  o.hardware.link_bytes_per_s = double(point["gbps"]) * 1e9 / 8;
  o.conductor.stream_kv = StreamKv::layer;
  PlacementPolicy policy = *find_placement_policy("least_loaded");
  policy.place = place;
  o.conductor.placement = &policy;
  o.conductor.fetch = find_fetch_policy("always");
  Result<Simulation> simulation = simulate(o, trace);
  if (!simulation) return simulation.error();
  Finding found;
  found.wrong = unserved(simulation.value(), trace);
  if (!found.wrong.empty()) return found;
  const SimulatedRecord& r = simulation.value().records[1];
  const std::vector<double>& fetches = simulation.value().fetches_s;
  const double fetch_s = fetches.empty() ? 0 : fetches.back(), schedule_s = o.message_s;
  const std::vector<float>& gaps = r.times.gaps;
  const double step_s = *std::ranges::min_element(gaps), exposed_s = std::max(0., double(gaps[0]) - step_s);
  found.rows.push_back({{"cached", r.cached},
                        {"schedule_s", schedule_s},
                        {"fetch_s", fetch_s},
                        {"prefill_s", r.times.first_s - r.arrival_s - schedule_s - fetch_s},
                        {"exposed_s", exposed_s},
                        {"decode_s", r.times.last_s - r.times.first_s - exposed_s},
                        {"ttft_s", r.times.first_s - r.arrival_s},
                        {"total_s", r.times.last_s - r.arrival_s}});
  return found;
}

REGISTER_EXPERIMENT("fetch_or_compute/breakdown", "cpu", points, each<run>);

}  // namespace breakdown

// fetch_or_compute/pool: Mooncake's findings about its pool (FAST'25). hits (Fig. 10): 10 P with prompts placed at
// random, by the longest prefix, by Algorithm 1 without transfers (local) and with them (global), and one instance ten
// times as large (pool). copies (Fig. 11): the greatest number of instances that have a key, by how often it is used.
// bandwidth (Fig. 13): 8P8D, synthetic, 24 to 400 Gb/s.
//
// Expected, from another program: hits in one cache .10, .136, .359 on conversation; .19, .640, .640 on synthetic. So
// global / prefix is 2.4 to 2.8 and 1 to 1.05, and P's time falls to .74. A hot key reaches all 8. At 24 Gb/s P's own
// KV takes four fifths of the link, so a fetch takes many times as long; at 100 Gb/s 1.1 to 2.
namespace pool {

constexpr int kDraws = 3;
constexpr double kFast = 800;  // Gb/s
constexpr int kRanks[] = {10, 100, 1000, 10000};

Values of(const char* part, const char* trace, const char* topology, const char* system, double gbps, double kv_tokens,
          int draw) {
  return {{"part", part}, {"trace", trace},         {"topology", topology}, {"system", system},
          {"gbps", gbps}, {"kv_tokens", kv_tokens}, {"sample", draw}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw) {
    for (const char* trace : {"conversation", "tool_agent", "synthetic"}) {
      for (const char* system : {"random", "prefix", "local", "global"})
        all.push_back(of("hits", trace, "10P1D", system, kFast, 3e6, draw));
      all.push_back(of("hits", trace, "1P1D", "pool", kFast, 30e6, draw));
      all.push_back(of("copies", trace, "8P8D", "global", kFast, 3e6, draw));
    }
    for (double gbps : {24., 50., 100., 200., 400.})
      all.push_back(of("bandwidth", "synthetic", "8P8D", "global", gbps, 3e6, draw));
    all.push_back(of("bandwidth", "synthetic", "8P8D", "local", 100, 3e6, draw));
  }
  return all;
}

// The decisions of placement. One run at a time.
struct Placing {
  std::string system;
  const Trace* trace = nullptr;
  std::vector<double> requests;              // by instance
  std::unordered_map<uint64_t, int> copies;  // of the observed keys: the most instances that have one
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

Placement choose(const ClusterView& view, const PlacementOptions& options) {
  const std::string& system = placing.system;
  if (system == "prefix") return longest_prefix(view);
  return find_placement_policy(system == "random" ? "random" : "mooncake")->place(view, options);
}

Placement place(const ClusterView& view, const PlacementOptions& options) {
  const Placement placed = choose(view, options);
  placing.requests.resize(view.instances.size());
  ++placing.requests[size_t(placed.prefill)];
  const std::vector<uint64_t>& blocks = placing.trace->requests[size_t(view.number)].blocks;
  for (size_t at = 0; at < blocks.size(); ++at)
    if (const auto looked_at = placing.copies.find(blocks[at]); looked_at != placing.copies.end())
      looked_at->second = std::max(looked_at->second, int(std::ranges::count_if(view.instances, [&](const auto& one) {
                                     return one.cached_tokens >= int(at + 1) * view.block_tokens;
                                   })));
  return placed;
}

// Whole blocks, the most used first. Among equals, the one that occurs first.
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

// The keys from this rank on, a tenth of the rank and one in number.
std::span<const uint64_t> around(std::span<const uint64_t> keys, int rank) {
  const size_t first = std::min(keys.size(), size_t(rank) - 1);
  return keys.subspan(first, std::min(keys.size() - first, size_t(rank / 10 + 1)));
}

Result<Trace> trace_of(const Values& point, const Setting& setting) {
  const std::string name = point["trace"];
  const int draw = point["sample"];
  TraceOptions reading{.jitter_s = 3, .seed = setting.seed + uint64_t(draw)};
  if (setting.tiny)
    reading.limit = 60;
  else if (name == "tool_agent")
    reading.limit = 12000;
  return mooncake_trace(name, setting, reading);
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const Result<Trace> read = trace_of(point, setting);
  if (!read) return read.error();
  const Trace& trace = read.value();
  const std::string part = point["part"], system = point["system"];
  SimulationOptions o = simulated("a800x8", "llama-3-70b", point["topology"], trace).value();
  const double gbps = point["gbps"];
  o.hardware.link_bytes_per_s = gbps / 8 * 1e9;
  o.kv_tokens = point["kv_tokens"];
  if (part == "hits") o.output_tokens = 0;
  if (system == "pool") o.hardware.flops_per_s *= 10, o.hardware.bytes_per_s *= 10, o.hardware.step_s /= 10;
  o.fetch = system != "local";

  const std::vector<uint64_t> keys = part == "copies" ? by_use(trace) : std::vector<uint64_t>();
  placing = {.system = system, .trace = &trace};
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
  double took_s = 0;
  for (double seconds : done.fetches_s) took_s += seconds;
  const double fetches = std::max<double>(1, double(done.fetches_s.size()));
  const double most = *std::ranges::max_element(placing.requests);
  const auto n_prefill = double(std::stoi(point["topology"]));
  row["source"] = source_of(trace);
  row["most_over_mean"] = most * n_prefill / double(trace.requests.size());
  row["fetch_share"] = double(done.fetches_s.size()) / double(trace.requests.size());
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

REGISTER_EXPERIMENT("fetch_or_compute/pool", "cpu", points, each<run>);

}  // namespace pool

// fetch_or_compute/pool_live: real instances of llama-micro with one thread each, over shm. rate (Fig. 13): one
// instance computes a prompt. Then the other is asked for it over a throttled transport, on which the KV takes 1 / `x`
// of that time. caches (Fig. 10): six conversations on three instances, placed at random, by Algorithm 1 without
// transfers, and with them. Logits must not depend on where KV came from.
//
// Expected, always: 1 / x plus a step: 4 at x = .25, .5 at 2, .12 to .35 at 8. Expected, caches: at random .2 to .4 of
// the tokens are found, with global .5 to .62.
namespace pool_live {

// ---- a throttled transport

std::atomic<double> wire_bytes_per_s{0};  // 0: not throttled

class HeldBack final : public ForwardingTransport {
 public:
  HeldBack(std::unique_ptr<KvTransport> inner, Clock& clock) : ForwardingTransport(std::move(inner)), clock_(clock) {}
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    const TransferId id = inner().post(transfer, plan);
    const double rate = wire_bytes_per_s;
    free_s_ = std::max(free_s_, clock_.now()) + (rate > 0 ? double(plan.bytes) / rate : 0);
    due_s_[id] = free_s_;
    return id;
  }
  TransferState poll(TransferId id) override {
    if (clock_.now() < due_s_.at(id)) return TransferState::in_flight;
    const TransferState state = inner().poll(id);
    if (state != TransferState::in_flight) due_s_.erase(id);
    return state;
  }
  void cancel(TransferId id) override {
    due_s_.at(id) = 0;
    inner().cancel(id);
  }

 private:
  Clock& clock_;
  double free_s_ = 0;
  std::map<TransferId, double> due_s_;
};

Result<std::unique_ptr<KvTransport>> make_held_back(const TransportOptions& options) {
  Result<std::unique_ptr<KvTransport>> inner = find_transport("shm")->make(options);
  if (!inner) return inner;
  return {std::make_unique<HeldBack>(std::move(inner).value(), *options.clock)};
}

const TransportRow& held_back() {
  static const TransportRow row = [] {
    TransportRow held = *find_transport("shm");
    held.name = "held back", held.make = make_held_back;
    return held;
  }();
  return row;
}

const char* pool_model(const Setting& setting) {
  return setting.tiny ? "experiments/models/llama-tiny" : "experiments/models/llama-micro";
}

Result<std::unique_ptr<Build>> open_pool(const Setting& setting, const std::vector<std::string>& more) {
  std::vector<std::string> words = {pool_model(setting), "--load-format", "dummy", "--transport", "shm"};
  words.insert(words.end(), {"--kv-bytes", setting.tiny ? "4MiB" : "16MiB", "--max-batch", "8", "--threads", "1"});
  if (!setting.tiny) words.insert(words.end(), {"--max-model-len", "512"});
  words.insert(words.end(), more.begin(), more.end());
  Result<Options> parsed = Options::parse(option_table(), "serve", words, 1);
  if (!parsed) return parsed.error();
  if (Status status = check_options(parsed.value(), "serve"); !status) return status.error();
  Result<std::unique_ptr<Build>> made = prepare_build(parsed.value());
  if (!made) return made;
  Build& build = *made.value();
  build.options.transport = &held_back();
  if (Status status = open_backend(build); !status) return status.error();
  Result<std::unique_ptr<Cluster>> cluster = Cluster::create(build.options, build.clock);
  if (!cluster) return cluster.error();
  build.cluster = cluster.value().get();
  build.runtime = std::move(cluster).value();
  if (Status status = build.cluster->start(); !status) return status.error();
  return made;
}

// ---- one request after the other

struct One {
  double ms = 0, hit_share = 0;
  uint64_t logits_hash = 0;
};

class Pool {
 public:
  Pool(const Setting& setting, const std::vector<std::string>& options) : made_(open_pool(setting, options)) {}
  Build& build() { return *made_.value(); }
  Status opened() const { return made_ ? ok() : Status(made_.error()); }
  One ask(const BenchRequest& request) {
    Run run = run_load(build(), {request}, {});
    if (!run.wrong.empty() && wrong.empty()) wrong = run.wrong;
    return run.ttft_ms.empty() ? One{} : One{run.ttft_ms[0], run.hit_share, run.logits_hash};
  }
  int64_t sum(int64_t FetchStats::*of) {
    int64_t sum = 0;
    for (const auto& instance : build().cluster->instances()) sum += instance->stats().fetch.*of;
    return sum;
  }
  std::string wrong;

 private:
  Result<std::unique_ptr<Build>> made_;
};

Values row(const char* arm, double x, int sample, double ms, double hit_share, int64_t given_up = 0) {
  return {{"arm", arm}, {"x", x}, {"sample", sample}, {"ms", ms}, {"hit_share", hit_share}, {"given_up", given_up}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all = {{{"part", "rate"}, {"option", "always"}},
                             {{"part", "rate"}, {"option", "cost"}},
                             {{"part", "caches"}, {"option", "always"}}};
  if (setting.tiny) all.erase(all.begin() + 1);
  return all;
}

constexpr int kSamples = 6;

struct Sizes {
  int tokens, pairs;
};
Sizes sizes(const Setting& setting) { return setting.tiny ? Sizes{48, 1} : Sizes{320, kSamples}; }

// Sets the transport's rate so that the KV takes 1 / x of `computed_ms`.
void hold_back(const Setting& setting, double x, double computed_ms) {
  const double token_bytes = double(kv_shape(load_model_config(pool_model(setting)).value(), Dtype::f32).token_bytes());
  wire_bytes_per_s = x > 0 ? x * sizes(setting).tokens * token_bytes / (1e-3 * computed_ms) : 0;
}

std::vector<std::string> pair_options(const std::string& fetch) {
  return {"--topology", "2C", "--placement", "round_robin", "--kv-fetch", fetch};
}

Result<Finding> rate(const std::string& policy, const Setting& setting) {
  Finding found;
  int number = 0;
  int64_t fetched_tokens = 0, n_given_up = 0;  // (with --tiny the fetch may be too slow on a busy machine)
  for (double x : setting.tiny ? std::vector<double>{2} : std::vector<double>{.25, .6, 2, 8}) {
    Pool pool(setting, pair_options(policy));  // a new pool, so that its estimate of the rate is for this rate alone
    if (Status status = pool.opened(); !status) return status.error();
    const auto prompt = [&] { return document(setting.seed, number++, sizes(setting).tokens + 1, 1); };
    for (int i = 0; i < 6; ++i) pool.ask(prompt());  // warm-up
    for (int pair = -1; pair < sizes(setting).pairs; ++pair) {
      const BenchRequest request = prompt();
      const One computed = pool.ask(request);
      hold_back(setting, x, computed.ms);
      const int64_t before = pool.sum(&FetchStats::failed);
      const One fetched = pool.ask(request);
      const int64_t given_up = pool.sum(&FetchStats::failed) - before;
      if (!pool.wrong.empty()) return Finding{{}, pool.wrong};
      if (computed.logits_hash != fetched.logits_hash)
        return Finding{{}, "the logits differ between fetched and computed KV"};
      if (pair < 0) continue;
      found.rows.push_back(row("computed", x, pair, computed.ms, computed.hit_share));
      found.rows.push_back(row("fetched", x, pair, fetched.ms, fetched.hit_share, given_up));
    }
    fetched_tokens += pool.sum(&FetchStats::tokens), n_given_up += pool.sum(&FetchStats::failed);
  }
  if (fetched_tokens == 0 && !(setting.tiny && n_given_up > 0)) found.wrong = "no KV was fetched";
  return found;
}

Result<Finding> caches(const Setting& setting) {
  const int conversations = setting.tiny ? 2 : 6, turns = 4, step = setting.tiny ? 16 : 64;
  const double rate = 32;  // requests per second
  hold_back(setting, 0, 1);
  const std::pair<const char*, const char*> arms[] = {
      {"random", "random"}, {"local", "prefix_aware"}, {"global", "mooncake"}};
  std::vector<std::unique_ptr<Pool>> pools;
  for (const auto& [arm, placement] : arms) {
    pools.push_back(
        std::make_unique<Pool>(setting, std::vector<std::string>{"--topology", "3C", "--placement", placement}));
    if (Status status = pools.back()->opened(); !status) return status.error();
  }
  Finding found;
  for (int sample = 0; sample < sizes(setting).pairs; ++sample) {
    Random random(setting.seed * 100 + uint64_t(sample));
    std::vector<int> order, turn(size_t(conversations), 0);
    for (int i = 0; i < conversations * turns; ++i) order.push_back(i / turns);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    std::vector<BenchRequest> requests;
    std::vector<double> due;
    double now = 0;
    for (int of : order) {
      requests.push_back(
          document(setting.seed, 2000 + 100 * sample + of, ++turn[size_t(of)] * step + 1, setting.tiny ? 1 : 4));
      due.push_back(now += setting.tiny ? 0 : random.exponential() / rate);
    }
    uint64_t hash = 0;
    for (size_t arm = 0; arm < pools.size(); ++arm) {
      const size_t at = (arm + size_t(sample)) % pools.size();
      Run run = run_load(pools[at]->build(), requests, due);
      if (!run.wrong.empty()) return Finding{{}, run.wrong};
      if (std::exchange(hash, run.logits_hash) != run.logits_hash && arm > 0)
        return Finding{{}, "the logits depend on the placement of the prompts"};
      found.rows.push_back(row(arms[at].first, 0, sample, run.result.ttft_ms.mean, run.hit_share));
    }
  }
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) -> Result<Finding> {
    const std::string part = point["part"], option = point["option"];
    return part == "rate" ? rate(option, setting) : caches(setting);
  };
}

REGISTER_EXPERIMENT("fetch_or_compute/pool_live", "cpu", points, open);

}  // namespace pool_live

}  // namespace
}  // namespace xpyd::experiments::fetch_or_compute_experiment
