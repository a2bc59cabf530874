#include "experiments/lengths.h"

#include <cmath>
#include <span>

#include "base/random.h"
#include "experiments/load/datasets.h"

namespace xpyd::experiments {
namespace {

// exp of a normal variable with this median.
double lognormal(Random& random, double median, double sigma) {
  double radius = std::sqrt(2 * random.exponential());
  return median * std::exp(sigma * radius * std::cos(2 * M_PI * random.uniform()));
}

LengthSet sharegpt(int n, uint64_t seed) {
  Random random(seed ^ 0x5347);
  LengthSet set{{}, "generated"};
  while (int(set.requests.size()) < n) {
    int prompt = int(std::lround(lognormal(random, 96, 1.3)));
    int output = int(std::lround(lognormal(random, 240, 0.88)));
    if (prompt >= 4 && output >= 4 && prompt <= 1024 && prompt + output <= 2048)
      set.requests.push_back({prompt, output});
  }
  return set;
}

// Means of 19.3 and 58.5 tokens (SOSP'23 section 6.1).
LengthSet alpaca(int n, uint64_t seed) {
  Random random(seed ^ 0x414c);
  LengthSet set{{}, "generated"};
  while (int(set.requests.size()) < n) {
    int prompt = int(std::lround(lognormal(random, 17, 0.5)));
    int output = int(std::lround(lognormal(random, 40, 0.87)));
    if (prompt >= 4 && output >= 4 && prompt + output <= 2048) set.requests.push_back({prompt, output});
  }
  return set;
}

// The conversation trace: prompts have median 6,909 and mean 12,035, so sigma = sqrt(2 ln(mean / median)) = 1.05.
// Outputs have median 350, mean 343, and 99 % are below 1,119.
LengthSet mooncake_like(int n, uint64_t seed) {
  Random random(seed ^ 0x4d4f);
  LengthSet set{{}, "generated"};
  while (int(set.requests.size()) < n) {
    int prompt = int(std::lround(lognormal(random, 6909, 1.05)));
    int output = int(std::lround(lognormal(random, 310, 0.5)));
    if (prompt >= 4 && prompt <= 126195 && output >= 4 && output <= 2000) set.requests.push_back({prompt, output});
  }
  return set;
}

// The arXiv summaries of vAttention's Fig. 9 (427 requests): prompts 63.9K to 192.8K, mean 87.4K; outputs 17 to 5,153,
// mean 428.
LengthSet arxiv(int n, uint64_t seed) {
  Random random(seed ^ 0x4158);
  LengthSet set{{}, "generated"};
  while (int(set.requests.size()) < n) {
    int prompt = int(std::lround(63900 + 23800 * random.exponential()));
    int output = int(std::lround(lognormal(random, 250, 1.05)));
    if (prompt <= 192800 && output >= 17 && output <= 5153) set.requests.push_back({prompt, output});
  }
  return set;
}

}  // namespace

Result<LengthSet> request_lengths(const std::string& dataset, int n, const Setting& setting, int draw) {
  const uint64_t seed = seed_of(setting, draw);
  if (dataset == "sharegpt") return sharegpt(n, seed);
  if (dataset == "alpaca") return alpaca(n, seed);
  if (dataset == "arxiv") return arxiv(n, seed);
  if (setting.traces.empty()) return mooncake_like(n, seed);
  const std::string path = setting.traces + "/mooncake_conversation.jsonl";
  Result<Load> load = mooncake_load(path, n * (draw + 1), 1, 0);
  if (!load) return load.error();
  const std::vector<BenchRequest>& all = load.value().requests;
  if (all.size() < size_t(n) * size_t(draw + 1))
    return invalid(path + ": it has no " + std::to_string(draw + 1) + " times " + std::to_string(n) + " requests");
  LengthSet set{{}, "trace"};
  for (const BenchRequest& r : std::span(all).last(size_t(n)))
    set.requests.push_back({r.input_tokens, r.output_tokens});
  return set;
}

}  // namespace xpyd::experiments
