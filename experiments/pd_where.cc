// pd_where: Where does P/D beat the same number of colocated instances with the best chunk size, by prompt, output,
//   objective, hardware and link?
// Paper: DistServe (OSDI'24), Sarathi-Serve (OSDI'24), TaiChi; no map is published.
// Set-up: goodput of the best of 1P3D, 2P2D and 3P1D over that of 4C with the best chunk size. Goodput is the rate at
//   which 90 % of the requests keep ten times the unloaded TTFT, and `tbt` times c for the mean of the longest tenth of
//   gaps; c is a step that only reads the weights. 8 x A800, Llama-3-70B; Poisson; found on a grid of 20 rates.
// Command: make exp-pd_where (a minute; virtual).
// Expected: with an objective T a step may take T, of which c computes no prompt. Prompts have L tokens of b seconds,
//   outputs o decodes of d seconds. Per instance 4C reaches (T - c) / T / (L b + o d). P/D gains (L b + o d) T / (T -
//   c) / (L b + o d T / (T - c)): 3 at 1.5 c and 1.05 at 20 c if prompts are most of the work, less the loss of whole
//   instances. The winner changes at 3 to 6 c. At 10 Gb/s P/D is halved.
// Found: at 10 Gb/s P/D keeps no objective of 2.5 steps; 4P2D is the best ratio for long prompts, 2P4D for long
//   answers.
#include <algorithm>
#include <cmath>
#include <map>

#include "base/random.h"
#include "experiments/poisson.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::pd_where_experiment {
namespace {

namespace map {

using namespace disagg;

constexpr double kTbts[] = {1.5, 2.5, 5, 20};  // multiples of c
constexpr double kTtft = 10;                   // multiple of the unloaded TTFT
constexpr int kRates = 20, kDraws = 3;

Values cell(const char* hardware, const char* model, int prompt, int output, double gbps, int draw) {
  return {{"hardware", hardware}, {"model", model}, {"prompt", prompt},
          {"output", output},     {"gbps", gbps},   {"sample", draw}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw) {
    for (int prompt : {256, 4096})
      for (int output : {32, 128, 512}) all.push_back(cell("a800x8", "llama-3-70b", prompt, output, 100, draw));
    for (double gbps : {10., 400.}) all.push_back(cell("a800x8", "llama-3-70b", 4096, 128, gbps, draw));
  }
  return all;
}

struct Costs {
  double c, b, decode_s;  // seconds of an empty step, of a prompt token, of a decode with its KV
  double prompt_s;        // a whole prompt without load
};

Costs costs_of(const SimulationOptions& o, int prompt, int output) {
  const model::StepCost cost = step_cost(o.model, o.hardware);
  const auto terms = cost.terms();
  return {terms[0], terms[1], terms[4] + terms[5] * (prompt + output / 2.0),
          cost.seconds(model::prompt_steps(prompt, 0, 2048))};
}

// One cluster at any rate of the grid: the share of good requests for each objective. Each rate is simulated once.
class Cluster {
 public:
  Cluster(const Values& point, const std::string& topology, int step_tokens, const Setting& setting)
      : point_(point), topology_(topology), step_tokens_(step_tokens), setting_(setting) {}
  std::string wrong;

  static double rate(double full, int at) { return full * 0.08 * std::pow(1.3 / 0.08, double(at) / (kRates - 1)); }

  // The rate at which 90 % keep ten times the unloaded TTFT, and `tbt`.
  double goodput(size_t tbt) {
    int low = -1, high = kRates;  // the highest good rate, and the lowest that is not
    while (high - low > 1 && wrong.empty()) {
      const int middle = (low + high) / 2;
      (good(middle)[tbt] >= 0.9 ? low : high) = middle;
    }
    if (low < 0) return 0;
    if (high == kRates) return rate(full_, low);
    const double above = good(low)[tbt], below = good(high)[tbt], part = (above - 0.9) / (above - below);
    return rate(full_, low) * std::pow(rate(full_, high) / rate(full_, low), part);
  }

 private:
  const std::vector<double>& good(int at) {
    std::vector<double>& shares = known_[at];
    if (!shares.empty()) return shares;
    shares.assign(std::size(kTbts), 0);
    const int prompt = point_["prompt"], output = point_["output"];
    Trace trace = poisson(1, 2, prompt, output, 0);
    Result<SimulationOptions> found = simulated(point_["hardware"], point_["model"], topology_, trace);
    if (!found) return wrong = found.error().message, shares;
    SimulationOptions& options = found.value();
    const Costs costs = costs_of(options, prompt, output);
    full_ = 4 / (prompt * costs.b + output * (costs.decode_s + costs.c / 256));
    const double at_rate = rate(full_, at);
    const int n = setting_.tiny ? 8 : 150 + int(std::min(450.0, 3 * at_rate * output * costs.c));
    trace = poisson(at_rate, n, prompt, output, setting_.seed + 31 + 1000 * uint64_t(int(point_["sample"])));
    options = simulated(point_["hardware"], point_["model"], topology_, trace).value();
    set_step_tokens(options, step_tokens_);
    options.hardware.link_bytes_per_s = double(point_["gbps"]) * 1e9 / 8;
    options.conductor.placement = find_placement_policy("mooncake");
    Result<Simulation> run = simulate(options, trace);
    if (!run) return wrong = run.error().message, shares;
    for (const SimulatedRecord& r : run.value().records) {
      if (r.end != SimulatedEnd::completed) wrong = "a request did not get its tokens: " + r.why;
      const Costs own = costs_of(options, r.prompt, output);
      for (size_t i = 0; i < std::size(kTbts); ++i)
        shares[i] += r.times.keeps({kTtft * own.prompt_s, kTbts[i] * costs.c}, r.arrival_s) / double(n);
    }
    return shares;
  }

  const Values point_;
  const std::string topology_;
  const int step_tokens_;
  const Setting setting_;
  double full_ = 0;
  std::map<int, std::vector<double>> known_;
};

Result<Finding> run(const Values& point, const Setting& setting) {
  Result<SimulationOptions> options = simulated(point["hardware"], point["model"], "4C",
                                                poisson(1, 1, point["prompt"], point["output"], 0));
  if (!options) return options.error();
  const Costs costs = costs_of(options.value(), point["prompt"], point["output"]);
  std::map<std::string, Cluster> pd, colocated;
  for (const char* topology : {"1P3D", "2P2D", "3P1D"}) pd.try_emplace(topology, point, topology, 2048, setting);
  for (double share : {0.25, 0.5, 1.0, 2.0, 4.0, 16.0}) {
    const int chunk = std::max(16, int(share * costs.c / costs.b));
    colocated.try_emplace(std::to_string(chunk), point, "4C", chunk, setting);
  }
  Finding found;
  for (size_t i = 0; i < std::size(kTbts); ++i) {
    const auto best = [&](std::map<std::string, Cluster>& clusters) {
      std::pair<double, std::string> most{0, "none"};
      for (auto& [name, cluster] : clusters) {
        most = std::max(most, {cluster.goodput(i), name});
        if (!cluster.wrong.empty()) found.wrong = cluster.wrong;
      }
      return most;
    };
    const auto [pd_goodput, ratio] = best(pd);
    const auto [c_goodput, chunk] = best(colocated);
    if (!found.wrong.empty()) return found;
    const double L = double(point["prompt"]) * costs.b, d = double(point["output"]) * costs.decode_s;
    const double stretch = kTbts[i] / (kTbts[i] - 1);
    found.rows.push_back({{"tbt", kTbts[i]},
                          {"tbt_ms", 1e3 * kTbts[i] * costs.c},
                          {"pd", pd_goodput},
                          {"ratio", ratio},
                          {"colocated", c_goodput},
                          {"chunk", chunk},
                          {"gain", c_goodput > 0    ? pd_goodput / c_goodput
                                   : pd_goodput > 0 ? 99.0
                                                    : 1.0},
                          {"arithmetic", (L + d) * stretch / (L * (1 + costs.c / (2048 * costs.b)) + d * stretch)}});
  }
  return found;
}

REGISTER_EXPERIMENT("pd_where", "cpu", points, each<run>);

}  // namespace map

// pd_where/split: one card as a whole, or cut in two for P and D. Llama-3.1-8B, H100 (or half of it), 400 requests,
// prompts of 2,000 and outputs of 128 plus or minus a half, steps of 512.
//
// Expected: a load of .4 keeps 1C busy for .33 and P, at half the speed, for .66: first tokens by M/D/1 81 and 256 ms:
// 2 to 3.6 times. Gaps: 1C's decodes wait for chunks of 17 ms, D reads in 12: P99 .6 to .85.
namespace split {

using namespace disagg;

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* topology : {"1C", "1P1D"})
    for (double load : {0.2, 0.4, 0.6})
      for (int draw = 0; draw < 9; ++draw) all.push_back({{"topology", topology}, {"load", load}, {"sample", draw}});
  return all;
}

// rate 0: all requests at once.
Trace trace_of(int n, double rate, int draw, const Setting& setting) {
  Random random(setting.seed + 23 + 1000 * uint64_t(draw));
  auto around = [&](int tokens) { return int(tokens * (0.5 + random.uniform())); };
  Trace trace{.block_tokens = 16};
  double now = 0;
  for (int i = 0; i < n; ++i) {
    const double gap = random.exponential();
    if (rate > 0) now += gap / rate;
    const int prompt = around(setting.tiny ? 60 : 2000);
    add_request(trace, now, prompt, around(setting.tiny ? 6 : 128));
  }
  return trace;
}

Measure open(const Setting& setting) {
  auto capacity = std::make_shared<double>(0);
  const auto run_split = [setting](const std::string& topology, const Trace& trace) -> Result<Simulation> {
    const double share = topology == "1C" ? 1 : .5;
    SimulationOptions options = simulated_h100(topology, trace, share);
    options.hardware.link_bytes_per_s = kNoTransferTime;
    set_step_tokens(options, 512);
    options.kv_tokens = setting.tiny ? 8000 : 200000;
    Result<Simulation> run = simulate(options, trace);
    const std::string wrong = run ? unserved(run.value(), trace) : "";
    return wrong.empty() ? std::move(run) : invalid(wrong);
  };
  return [=](const Values& point) -> Result<Finding> {
    const int n = setting.tiny ? 6 : 400;
    if (*capacity == 0) {
      const Result<Simulation> all = run_split("1C", trace_of(n, 0, 0, setting));
      if (!all) return all.error();
      *capacity = n / all.value().end_s;
    }
    const double rate = double(point["load"]) * *capacity;
    const Result<Simulation> run = run_split(point["topology"], trace_of(n, rate, point["sample"], setting));
    if (!run) return run.error();
    std::vector<double> ttft, gaps;
    for (const SimulatedRecord& r : run.value().records) {
      ttft.push_back(1e3 * (r.times.first_s - r.arrival_s));
      for (float gap : r.times.gaps) gaps.push_back(1e3 * double(gap));
    }
    std::sort(ttft.begin(), ttft.end());
    std::sort(gaps.begin(), gaps.end());
    return Finding{{{{"capacity", *capacity},
                     {"rate", rate},
                     {"requests", n},
                     {"gaps", gaps.size()},
                     {"median_ttft_ms", percentile_seen(ttft, 50)},
                     {"p90_ttft_ms", percentile_seen(ttft, 90)},
                     {"median_itl_ms", percentile_seen(gaps, 50)},
                     {"p99_itl_ms", percentile_seen(gaps, 99)},
                     {"duration_s", run.value().end_s}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("pd_where/split", "cpu", points, open);

}  // namespace split

// pd_where/ratio: six instances as 1P5D to 5P1D, and 6C: the rate at which 90 % keep 1 s and 30 ms. Llama-3.1-8B;
// `prompts` 4,000 + 200 tokens, `outputs` 500 + 300. Found by bisection.
//
// Expected, prompts: a P 8.2 requests/s, a D 17: best with 4P2D, 33 less queues. Expected, outputs: a P 65, a D 27:
// best with 2P4D. 6C in chunks of 512 has steps of 17 to 25 ms: .5 to 1.4 of the best ratio.
namespace ratio {

using namespace disagg;

constexpr double kTtft = 1, kTbt = 0.030;  // seconds
constexpr int kDraws = 3;                  // traces
constexpr int kSteps = 6;                  // of a bisection between 0.4 and 1.6 of the carried rate: within 2 % of it

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* work : {"prompts", "outputs"})
    for (const char* topology : {"1P5D", "2P4D", "3P3D", "4P2D", "5P1D", "6C"})
      for (int draw = 0; draw < kDraws; ++draw)
        all.push_back({{"work", work}, {"topology", topology}, {"sample", draw}});
  return all;
}

// Requests per second that the slower of the two sides carries, by the arithmetic above.
double carried(bool prompts, const std::string& topology) {
  const double of_p = prompts ? 8.2 : 65, of_d = prompts ? 17 : 27;
  if (topology == "6C") return prompts ? 33 : 108;  // the figure of the best ratio
  const int p = topology[0] - '0';
  return std::min(p * of_p, (6 - p) * of_d);
}

// One rate: its row, or an error in `wrong`.
Result<Values> at_rate(const Values& point, double rate, const Setting& setting, std::string& wrong) {
  const bool prompts = point["work"] == "prompts";
  const int prompt = prompts ? 4000 : 500, output = prompts ? 200 : 300;
  const double seconds = setting.tiny ? 0.3 : 8;
  Random random(setting.seed + 11 + 1000 * uint64_t(int(point["sample"])));
  Trace trace{.block_tokens = 16};
  auto around = [&random](int n) { return int(n * (0.5 + random.uniform())); };
  for (double now = random.exponential() / rate; now < seconds || trace.requests.empty();
       now += random.exponential() / rate) {
    const int tokens = around(prompt);
    add_request(trace, now, tokens, setting.tiny ? 8 : around(output));
  }
  SimulationOptions options = simulated_h100(point["topology"], trace);
  if (options.topology == "6C") set_step_tokens(options, 512);
  options.kv_tokens = setting.tiny ? 24000 : 400000;
  const Result<Simulation> simulation = simulate(options, trace);
  if (!simulation) return simulation.error();
  const Simulation& run = simulation.value();
  wrong = unserved(run, trace);
  if (!wrong.empty()) return Values();
  int good = 0;
  for (const SimulatedRecord& r : run.records) good += r.times.keeps({kTtft, kTbt}, r.arrival_s);
  return Values{{"rate", rate},
                {"requests", run.records.size()},
                {"good_share", double(good) / double(run.records.size())},
                {"preemptions", run.preemptions}};
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const double all = carried(point["work"] == "prompts", point["topology"]);
  double low = 0.4 * all, high = 1.6 * all;
  Finding found;
  for (int step = 0; step < (setting.tiny ? 1 : kSteps); ++step) {
    const double rate = (low + high) / 2;
    Result<Values> row = at_rate(point, rate, setting, found.wrong);
    if (!row) return row.error();
    if (!found.wrong.empty()) return found;
    found.rows.push_back(row.value());
    (double(row.value()["good_share"]) >= 0.9 ? low : high) = rate;
  }
  for (Values& row : found.rows) row["goodput"] = (low + high) / 2;
  return found;
}

REGISTER_EXPERIMENT("pd_where/ratio", "cpu", points, each<run>);

}  // namespace ratio

}  // namespace
}  // namespace xpyd::experiments::pd_where_experiment
