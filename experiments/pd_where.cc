// pd_where: where prefill/decode disaggregation wins over as many colocated instances, and where not: goodput of the
// best of 1P3D, 2P2D and 3P1D over that of 4C with the best chunk size, by prompt, output, objective, hardware and
// link.
//
// The simulator (experiments/simulate/). Goodput is the rate at which 90 % of the requests keep both objectives: ten
// times the unloaded TTFT, and for the mean of a request's longest tenth of gaps `tbt` times c, a step's time before it
// does anything: reading the weights. (Mooncake, arXiv section 8: 10 and 5.) Prompts and outputs plus or minus a half,
// uniform; a Poisson process; nothing in common; no admission. Found on a grid of 20 rates, between two of which the
// share of good requests is a line. Three draws. Chunks of 4C: 0.25, 0.5, 1, 2, 4 and 16 times c / b tokens, b being
// the seconds of a prompt's token; P and 1P1D: steps of 2,048.
//
// Arithmetic. A step with n decodes and x tokens of prompts takes c + x b + n d, d a decode's own KV and products; of
// an objective T it may take T, and c of that buys nothing. Prompts of L and outputs of o:
//   an instance of 4C   x / n = L / o, so  (T - c) / T / (L b + o d)                    requests/s
//   a D                 (T - c) / T / (o d), and at most 256 sequences or its memory;   a P   1 / (L b (1 + c / 2048
//   b)) four, in the best ratio   1 / (L b (1 + c / 2048 b) + o d T / (T - c))
// so P/D gains (L b + o d) T / (T - c) / (L b + o d T / (T - c)): up to T / (T - c), 3 at 1.5 c and 1.05 at 20 c, where
// prompts are the work; nothing where outputs are. It loses what whole instances cannot share (of 1:3, 2:2, 3:1 the
// best may leave a third unused) and what queues of few servers wait. So the answer turns at T of 3 to 6 c: tighter,
// P/D; looser, 4C. Base (8 x A800, Llama-3-70B): c 12.8 ms, b .128 ms; prompts of 4,096 and outputs of 128: P 1.8/s, d
// 0.15 ms and .15 of KV, D at 2.5 c: 1 / 38 ms x .6: 16/s: 3P1D 5.4/s against 4 x .6 / .56 = 4.2: 1.3, less queues;
// at 1.5 c 5.4 against 2.4: 2.2; at 20 c 5.4 against 6.8: 0.8. A link of B carries 4,096 tokens of 328 KB in 107 ms at
// 100 Gb/s, hidden behind 525 ms of computation; at 10 Gb/s 1.07 s: P/D is halved, 0.3 to 0.7 of the gain at 100.
//
// Today's `pd` gives P one of two cores: a prompt takes twice as long and waits in a queue that is as much fuller, r /
// (1
// - r): with an instance cut in two its TTFT can only rise (pd_split: 2.3 and 3.2), and 4.2 is a queue near its end.
// And `pd_ratio` has 6C ahead of every ratio because its objective of 30 ms is five steps of 6 ms: on the loose side.
#include <algorithm>
#include <cmath>
#include <map>

#include "base/stats.h"
#include "experiments/poisson.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::pd_where_experiment {
namespace {

using namespace disagg;

constexpr double kTbts[] = {1.5, 2.5, 5, 20};  // times c
constexpr double kTtft = 10;                   // times the unloaded
constexpr int kRates = 20, kDraws = 3;

Values cell(const char* hardware, const char* model, int prompt, int output, double gbps, int draw) {
  return {{"hardware", hardware}, {"model", model}, {"prompt", prompt},
          {"output", output},     {"gbps", gbps},   {"sample", draw}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw) {
    for (int prompt : {256, 1024, 4096, 16384})
      for (int output : {32, 128, 512}) all.push_back(cell("a800x8", "llama-3-70b", prompt, output, 100, draw));
    for (const auto& [hardware, model] :
         {std::pair{"h100x1", "llama-3-8b"}, {"l40x1", "llama-3-8b"}, {"v100x1", "qwen2.5-7b"}})
      for (int prompt : {1024, 4096}) all.push_back(cell(hardware, model, prompt, 128, 100, draw));
    for (double gbps : {5., 10., 25., 400.}) all.push_back(cell("a800x8", "llama-3-70b", 4096, 128, gbps, draw));
  }
  return all;
}

struct Costs {
  double c, b, decode_s;  // a step, a token of a prompt, a decode with its KV
  double prompt_s;        // a whole prompt, unloaded
};

Costs costs_of(const SimulationOptions& o, int prompt, int output) {
  const model::StepCost cost = step_cost(o.model, o.hardware);
  const auto terms = cost.terms();
  return {terms[0], terms[1], terms[4] + terms[5] * (prompt + output / 2.0),
          cost.seconds(model::prompt_steps(prompt, 0, 2048))};
}

// One cluster at any rate of the grid: the share of good requests by objective, asked once each.
class Cluster {
 public:
  Cluster(const Values& point, const std::string& topology, int step_tokens, const Setting& setting)
      : point_(point), topology_(topology), step_tokens_(step_tokens), setting_(setting) {}
  std::string wrong;

  static double rate(double full, int at) { return full * 0.08 * std::pow(1.3 / 0.08, double(at) / (kRates - 1)); }

  // The rate at which 90 % keep ten times the TTFT and `tbt`.
  double goodput(size_t tbt) {
    int low = -1, high = kRates;  // good, and not
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

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("pd_where", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::pd_where_experiment
