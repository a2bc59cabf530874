// sarathi_capacity: how many requests a second one instance gets within an objective for the gaps between tokens, with
// prompts cut into chunks beside decodes, and with whole prompts first (Sarathi-Serve, OSDI'24, section 5.1).
//
// The simulator. Mistral-7B on one A100 and Yi-34B on two, by what a step costs there (an A800 computes as an A100
// does; Mistral's window of 4,096 tokens is left out). Its two data sets by the median and the 90th percentile of
// prompts and outputs, log-normal, independent of each other: openchat_sharegpt4 1,730 and 5,696, 415 and 834, at most
// 8,192 of both; arxiv_summarization 7,059 and 12,985, 208 and 371, at most 16,384. Poisson. Objectives as theirs: the
// 99th percentile of all gaps within 0.1 s (strict) and 0.5 s (relaxed), of Yi-34B 0.2 and 1 s; and a median of 2 s of
// waiting: what a first token takes, less what its prompt takes alone. `chunked`: budgets of 512 tokens (strict) and
// 2,048 (relaxed); `prefill_first`, as vLLM was: whole prompts, together at most 16,384 tokens, before any decode. At
// most 128 sequences. Rates are found by bisection.
//
// Arithmetic. Mistral-7B: a step 11 ms, a prompt's token .105 ms, a decode with 2.8 K tokens of KV .25 ms. ShareGPT's
// prompts have 2,400 tokens in the mean, .26 s. Whole prompts: each is one long gap of everybody, so of all gaps 1 %
// are long when there is one such prompt for 99 steps of decodes, of 15 ms. Strict: three quarters of the prompts are
// longer than 100 ms: .75 r = .01 / 15 ms * (1 - .26 r), r = .7 requests/s. Chunks of 512: a step takes 11 + 54 + 15 =
// 80 ms, within the objective, and has 512 of the 2,840 tokens of a request: 2.25. So 3.1 times, 2 to 5. Relaxed:
// prompts of more than 4,500 tokens, an eighth, or two together: 1.3 to 2; chunks of 2,048 get as far as their
// sequences are 128, 2.8: 1.3 to 2.5 times. ArXiv's prompts, 7,600 tokens, .92 s: strict .66 (1 - .92 r) = r, .41;
// chunks 6.6 K tokens/s of 7,800, .85: 1.6 to 3 times, and relaxed hardly less whole (.45, and 1.0 with chunks): 1.5
// to 3. Yi-34B: 25 ms and .25 ms: everything takes 2.4 times as long and the objective is 2 times: strict .33 (1 - .62
// r) = .85 r, .31; a step with 512 takes 170 ms: 1.05: 2 to 6 times, if decodes leave the 99th percentile within 200
// ms; relaxed 1.2 to 2.5. So the most of four is what is published, 2 to 5 and 2.2 to 6. (ArXiv's came lower: prompts
// that come while one is computed make one long gap with it, so that r (1 - .92 r) a second are long, by which r could
// be .8: whole prompts get .55, between the two, and Yi-34B's .26 of the .28 that chunks get.)
#include <algorithm>
#include <cmath>

#include "base/random.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::sarathi_capacity_experiment {
namespace {

using namespace disagg;

constexpr int kDraws = 3, kMostBatch = 128, kWhole = 16384;
constexpr double kWait_s = 2;

struct Data {
  const char* name;
  double prompt, prompt_p90, output, output_p90;
  int most;
};
constexpr Data kData[] = {{"sharegpt4", 1730, 5696, 415, 834, 8192}, {"arxiv", 7059, 12985, 208, 371, 16384}};

struct Goal {
  const char* name;
  double times;  // of 0.1 s, or of Yi-34B's 0.2
  int budget;
};
constexpr Goal kGoals[] = {{"strict", 1, 512}, {"relaxed", 5, 2048}};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* model : {"mistral-7b", "yi-34b"})
    for (const Data& data : kData)
      for (const Goal& goal : kGoals)
        for (const char* system : {"chunked", "prefill_first"})
          for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
            all.push_back({{"model", model},
                           {"data", data.name},
                           {"objective", goal.name},
                           {"system", system},
                           {"sample", draw}});
  return all;
}

int drawn(Random& random, double median, double p90) {
  const double normal = std::sqrt(2 * random.exponential()) * std::cos(2 * M_PI * random.uniform());
  return int(std::lround(median * std::exp(std::log(p90 / median) / 1.2816 * normal)));
}

// At one request a second.
Trace make_trace(const Data& data, int n, uint64_t seed) {
  Random random(seed);
  Trace trace{.block_tokens = 64};
  double now_s = 0;
  while (int(trace.requests.size()) < n) {
    const int prompt = drawn(random, data.prompt, data.prompt_p90),
              output = drawn(random, data.output, data.output_p90);
    if (prompt >= 4 && output >= 4 && prompt + output <= data.most)
      add_request(trace, now_s += random.exponential(), prompt, output);
  }
  return trace;
}

Result<SimulationOptions> options_of(const std::string& model, const Trace& trace) {
  const bool yi = model == "yi-34b";
  Result<SimulationOptions> options = simulated(yi ? "a800x2" : "a800x1", yi ? "yi-34b" : "llama-3-8b", "1C", trace);
  if (!options) return options;
  if (!yi)
    options.value().model = {"mistral-7b", 32, 32, 128, 7.24e9, 7.24e9, 2 * 8 * 128, 2, 2, "Mistral-7B, config.json"};
  options.value().engine.max_batch = kMostBatch;
  options.value().conductor.placement = find_placement_policy("least_loaded");
  return options;
}

struct Seen {
  double gap_p99_s = 0, wait_s = 0;
};

Seen look(const Simulation& run, const model::StepCost& cost, int step_tokens) {
  std::vector<double> gaps, waits;
  for (const SimulatedRecord& r : run.records) {
    gaps.insert(gaps.end(), r.times.gaps.begin(), r.times.gaps.end());
    waits.push_back(r.times.first_s - r.arrival_s - cost.seconds(model::prompt_steps(r.prompt, 0, step_tokens)));
  }
  const auto at = [](std::vector<double>& all, double p) {
    std::ranges::sort(all);
    const Value seen = percentile_seen(all, p);
    return seen.is_number() ? double(seen) : all.back();  // tiny sizes alone have so few
  };
  return {at(gaps, 99), at(waits, 50)};
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string model = point["model"], data_name = point["data"], goal_name = point["objective"],
                    system = point["system"];
  const Data& data = *std::ranges::find_if(kData, [&](const Data& d) { return d.name == data_name; });
  const Goal& goal = *std::ranges::find_if(kGoals, [&](const Goal& g) { return g.name == goal_name; });
  const double gap_s = goal.times * (model == "yi-34b" ? .2 : .1);
  const int step_tokens = system == "chunked" ? goal.budget : kWhole;
  const Trace trace = make_trace(data, setting.tiny ? 20 : 200,
                                 setting.seed + 41 + 1000 * uint64_t(int(point["sample"])));
  Result<SimulationOptions> made = options_of(model, trace);
  if (!made) return made.error();
  SimulationOptions& options = made.value();
  options.engine.policy = find_batch_policy(system);
  set_step_tokens(options, step_tokens);
  const model::StepCost cost = step_cost(options.model, options.hardware);
  Finding found;
  Seen best;
  double low = 0, high = 2 / prefill_load(options, trace);  // twice what its prompts alone would keep busy
  for (int i = 0; i < 8; ++i) {
    const double rate = low > 0 ? std::sqrt(low * high) : high / 3;
    const Trace there = faster(trace, rate);
    const Result<Simulation> simulated_run = simulate(options, there);
    if (!simulated_run) return simulated_run.error();
    if (found.wrong = unserved(simulated_run.value(), there); !found.wrong.empty()) return found;
    const Seen seen = look(simulated_run.value(), cost, step_tokens);
    if (seen.gap_p99_s <= gap_s && seen.wait_s <= kWait_s)
      low = rate, best = seen;
    else
      high = rate;
  }
  found.rows.push_back({{"requests_per_s", low}, {"gap_p99_s", best.gap_p99_s}, {"wait_p50_s", best.wait_s}});
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("sarathi_capacity", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::sarathi_capacity_experiment
