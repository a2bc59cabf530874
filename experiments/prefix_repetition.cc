// prefix_repetition: how much the prompts of the Mooncake traces repeat, by the radix-tree metric of the xPyD notes
// (`xpyd prefix-stats`) over its two thresholds, and by what an unlimited cache would find.
//
// Expected for N = 2, L = 0 (figures computed from the same traces by another program):
// conversation R_leaf 0.194, R_conv 0.417, blocks 0.366, tokens 0.374; synthetic 0.139, 0.530,
// 0.640, 0.651.
#include <map>
#include <memory>

#include "experiments/experiment.h"
#include "experiments/load/prefix_stats.h"

namespace xpyd::experiments::prefix_repetition_experiment {
namespace {

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (const char* trace : {"conversation", "synthetic"})
    for (int n : {2, 3, 5, 10, 20, 50, 100})
      for (int length : {0, 1024, 2048, 3584})
        all.push_back({{"trace", trace}, {"min_count", n}, {"min_length", length}});
  return all;
}

Measure open(const Setting& setting) {
  auto inputs = std::make_shared<std::map<std::string, PrefixInput>>();
  return [=](const Values& point) -> Result<Finding> {
    const std::string trace = point["trace"];
    if (!inputs->count(trace)) {
      Result<PrefixInput> input = read_prefix_input(setting.traces + "/mooncake_" + trace + ".jsonl");
      if (!input) return input.error();
      (*inputs)[trace] = std::move(input).value();
    }
    const PrefixStats s = prefix_stats((*inputs)[trace], point["min_count"], point["min_length"]);
    return Finding{{{{"r_leaf", s.r_leaf},
                     {"r_conv", s.r_conv},
                     {"leaves", s.leaves},
                     {"prompts", s.prompts},
                     {"block_reuse", s.unit_reuse},
                     {"token_reuse", s.length_reuse}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("prefix_repetition", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::prefix_repetition_experiment
