// batching: what a batching policy does to the gaps between tokens, and to throughput.
//
// Real steps of llama-mini (27M parameters, f32, random weights) on every core; 16 sequences at
// most. Requests as in Orca's evaluation (OSDI'22 section 6): prompts uniform in [32, 512], outputs
// uniform in [1, 128]. `load` is a share of what one chunked instance ends per second when all
// requests are there at once; load 0 stands for that: all at once.
//
// Arithmetic. A step costs what its tokens cost to multiply, 2 * 25M FLOP each: on two cores at 150 GFLOP/s 0.33 ms a
// prompt token; a step of decodes is bound by reading 108 MB, 5 ms. With prefill_first a gap holds the whole prompts
// that arrived, 272 tokens = 90 ms on average, several at times; chunked at 64 tokens a step has at most 64 * 0.33 + 5
// = 26 ms. So P99 gaps differ by 3 to 10. static: a batch of 16 goes on until its longest output, about 120 tokens, has
// ended, while the mean is 64: its decode steps do 0.53 of the work they could. Decoding is 64 * 5 / 16 = 20 ms a
// request of about 110 ms, so throughput is 1 / (1 + 0.18 * 0.9) = 0.86 of continuous batching's; and whoever arrives
// waits for the batch before.
#include <algorithm>

#include "base/arrivals.h"
#include "experiments/load.h"

namespace xpyd::experiments::batching_experiment {
namespace {

constexpr int kChunk = 64;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (double load : setting.tiny ? std::vector{0.0} : std::vector{0.6, 0.0})
    for (const char* policy : {"static", "prefill_first", "chunked"})
      all.push_back({{"load", load}, {"policy", policy}});
  return all;
}

// Uniform in [32, 512] and [1, 128]: mean +- ratio * mean.
std::vector<BenchRequest> requests(int n, uint64_t seed) {
  std::vector<BenchRequest> all = random_load(n, 272, 64, 0.88, seed).requests;
  const std::vector<BenchRequest> outputs = random_load(n, 1, 64, 0.98, seed + 1).requests;
  for (size_t i = 0; i < all.size(); ++i) all[i].output_tokens = std::min(128, outputs[i].output_tokens);
  return all;
}

Measure open(const Setting& setting) {
  const std::string model = setting.tiny ? "llama-tiny" : "llama-mini";
  auto bed = std::make_shared<Bed>(
      setting, std::vector<std::string>{"experiments/models/" + model, "--kv-bytes", "256MiB", "--max-model-len",
                                        setting.tiny ? "256" : "1024", "--max-batch", "16", "--chunk-tokens",
                                        std::to_string(kChunk), "--topology", "1C"});
  return [=](const Values& point) -> Result<Finding> {
    const std::vector<BenchRequest> load = setting.tiny ? random_load(4, 40, 6, 0.5, setting.seed).requests
                                                        : requests(64, setting.seed);
    Result<double> capacity = bed->capacity(load);
    if (!capacity) return capacity.error();
    Result<std::string> wrong = bed->open(
        {"--batching", point["policy"], "--max-step-tokens", "512", "--prefix-cache", "off"});
    if (!wrong) return wrong.error();
    if (!wrong.value().empty()) return Finding{{}, wrong.value()};
    const double share = point["load"], rate = share * capacity.value();
    std::vector<double> due(load.size(), 0.0);
    if (share > 0) due = arrival_times(int(load.size()), rate, false, 1, setting.seed);
    Run run = run_load(bed->stack(), load, due);
    if (!run.wrong.empty()) return Finding{{}, run.wrong};
    Values values = {{"rate", rate}, {"capacity", capacity.value()}};
    values.update(run_values(run));
    return Finding{{values}, ""};
  };
}

REGISTER_EXPERIMENT("batching", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::batching_experiment
