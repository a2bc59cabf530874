// fetch_oracle: how far `--kv-fetch cost` is from somebody who knows how it ends, by the rate of the links and the
// load.
//
// The simulator (experiments/simulate/): 4P4D of 8 x A800 with Llama-3-70B; 24 conversations of five turns (four
// draws), each turn 2,048 to 6,144 tokens longer than the one before it, answers of 32 tokens, at random times, at the
// rate at which they would keep `load` of the P's busy if nothing was found. Each goes to the P with the shortest
// queue, whatever its cache holds, so some 70 of the 120 meet a choice: another instance has more of the prompt; fetch
// that, or compute it. Nobody can try all choices of a run, so the oracle is what two bounds leave:
//
// `hindsight`, from above: the best mean TTFT of some 90 runs of the same requests, of which each has choices of its
// own, made knowing how the runs before went. never, always, cost; `once`: cost without the queue at the holder.
// `scaled`: fetch where the prediction times .25 to 4 is less than what it saves, with what the holder sends already
// counted or not (one constant for all). `informed`: each request does what gave it the earlier first token when it
// last did either (four runs: it knows its fetch's real duration, and its own interest alone). `flipped`: from the best
// of all these, each request's choice is turned round, one after the other, and stays so where the mean of all is
// better. An oracle that tried more would be as good or better, so the gap to it is at least the one to this. A part of
// that is luck: requests in a slightly other order wait for others.
//
// `free`, from below: always, over a wire that takes no time. No choice is better, but for such luck.
//
// Arithmetic. As fetch_or_compute: a fetch is as fast as computing at some 26 Gb/s alone on its link, of which P's KV
// for D takes a share. At 10 Gb/s hardly any fetch pays, at 400 nearly each one does: there a rule by prediction has
// nothing to lose: 1 to 1.1. Between, a prediction is wrong where what comes after it takes a share of the link, and
// where others would have gained from a P that is free earlier, which `cost` does not count: 1.05 to 1.5 at 25 to 100.
// It counts what a holder already sends twice, as a queue and as the share of its link, which the simulator's
// conductor sees: a constant below 1, less fear, and `once` should be better.
#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::fetch_oracle_experiment {
namespace {

using namespace disagg;

constexpr int kDraws = 4, kConversations = 24, kTurns = 5, kBlock = 512, kInformed = 4;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
    for (double load : {.6, 1.2})
      for (double gbps : {10., 25., 50., 100., 400.}) all.push_back({{"load", load}, {"gbps", gbps}, {"sample", draw}});
  return all;
}

// Each turn's prompt is the one before it and some blocks more; turns come when they come, in their order.
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
    for (int block = 0; block <= has; ++block)  // of the last one a token, which is this turn's own
      request.blocks.push_back(uint64_t(turns[i] + 1) << 32 | uint64_t(block < has ? block : 1000 + has));
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

// What is asked and answered during one run; one at a time, since a policy is a plain function.
struct Choosing {
  uint64_t number = 0;  // of the request that is being placed
  std::function<bool(uint64_t, const FetchView&)> fetches;
  std::vector<int> answers;  // by request: 1, 0; -1: nobody had more of it
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
  std::vector<double> ttft_s;
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
      done.ttft_s.push_back(r.times.first_s - r.arrival_s);
      done.mean_s += done.ttft_s.back() / double(trace_.requests.size());
      prompts += r.prompt, hits += r.cached;
    }
    double fetched = 0;
    for (int a : done.answers) fetched += a == 1;
    double asked = 0;
    for (int a : done.answers) asked += a >= 0;
    done.row = {{"ttft_mean_s", done.mean_s}, {"hit_share", hits / prompts}, {"asked", asked}, {"fetches", fetched}};
    return done;
  }

  // Of all requests, by the dice.
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
  Result<SimulationOptions> options = simulated("a800x8", "llama-3-70b", "4P4D", trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  trace = faster(std::move(trace), double(point["load"]) * 4 / prefill_load(o, trace));
  o.hardware.link_bytes_per_s = double(point["gbps"]) * 1e9 / 8;

  Search search(o, trace, setting.seed + uint64_t(draw) + 1);
  Finding found;
  Done best{.mean_s = kNever};
  std::string best_of;
  std::vector<Done> tried;  // never, always
  Done least;               // of the rows of one name
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
  const std::pair<const char*, Rule> rules[] = {
      {"never", [](uint64_t, const FetchView&) { return false; }},
      {"always", [](uint64_t, const FetchView&) { return true; }},
      {"cost", [](uint64_t, const FetchView& view) { return cost(view); }},
      {"once", [](uint64_t, const FetchView& view) { return view.handshake_s + view.bytes_s < view.saved_s; }}};
  for (const auto& [name, rule] : rules) {
    Result<Done> done = search.run(rule);
    if (!done) return done.error();
    tried.push_back(done.value());
    look(name, std::move(done).value());
    tell(name, tried.back(), 1);
  }
  for (double times : {.25, .5, .7, 1.4, 2.}) {
    Result<Done> done = search.run([=](uint64_t, const FetchView& v) { return times * fetch_seconds(v) < v.saved_s; });
    if (!done) return done.error();
    look("scaled", std::move(done).value());
  }
  for (double times : {.25, .5, 2., 4.}) {
    Result<Done> done = search.run(
        [=](uint64_t, const FetchView& v) { return times * (v.handshake_s + v.bytes_s) < v.saved_s; });
    if (!done) return done.error();
    look("scaled", std::move(done).value());
  }
  tell("scaled", least, 9);

  std::vector<double> computed_s = tried[0].ttft_s, fetched_s = tried[1].ttft_s;  // when it last did so
  for (int i = 0; i < kInformed; ++i) {
    std::vector<int> answers;
    for (size_t r = 0; r < n; ++r) answers.push_back(fetched_s[r] < computed_s[r]);
    Result<Done> done = search.run(as(answers));
    if (!done) return done.error();
    for (size_t r = 0; r < n; ++r) (done.value().answers[r] == 1 ? fetched_s : computed_s)[r] = done.value().ttft_s[r];
    look("informed", std::move(done).value());
  }
  tell("informed", least, kInformed);
  for (size_t at : search.order(n)) {
    if (best.answers[at] < 0) continue;
    std::vector<int> answers = best.answers;
    answers[at] = 1 - answers[at];
    Result<Done> done = search.run(as(std::move(answers)));
    if (!done) return done.error();
    look("flipped", std::move(done).value());
  }
  tell("hindsight", best, runs);
  Result<Done> free = search.run(rules[1].second, kNoWire);
  if (!free) return free.error();
  tell("free", free.value(), 1);
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("fetch_oracle", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::fetch_oracle_experiment
