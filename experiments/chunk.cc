// chunk: what the size of a prefill chunk does to the gaps between tokens and to the first one.
//
// Chunked prefill (Sarathi-Serve, OSDI'24) on one colocated instance, real steps. CPU: llama-mini
// in f32; a card: llama-8b in bf16. Requests arrive at 0.6 of what the instance can end.
//
// Arithmetic, CPU: a step of c prompt tokens costs c * 0.33 ms at 150 GFLOP/s and at least the 5 ms of reading the
// weights. So the P99 gap is about 5 + 0.33 c ms: 15, 26, 47, 90, 174 ms for 32 to 512; from 64 to 512 a factor of 5 to
// 7. A prompt of 768 tokens takes 768 / c steps that each also decode: small chunks delay the first token by the 5 ms
// of each step, 24 steps at 32: 120 ms on 250 ms. H200: 16 GFLOP a token at 400 TFLOP/s is 0.04 ms, reading 16 GB is 4
// ms: the gap is 4 ms up to a chunk of 100 and 4 + 0.04 c above: 24 ms at 512, 86 ms at 2048 (Sarathi's strict and
// relaxed budgets).
#include <algorithm>

#include "base/arrivals.h"
#include "experiments/load.h"

namespace xpyd::experiments::chunk_experiment {
namespace {

struct Sizes {
  int n_requests, prompt, output;
  std::vector<int> chunks;
  std::vector<std::string> common;
};

Sizes sizes_of(const Setting& setting) {
  if (setting.tiny)
    return {3, 40, 4, {16, 64}, {"experiments/models/llama-tiny", "--kv-bytes", "4MiB", "--max-batch", "4"}};
  if (setting.device == "cuda")
    return {48,
            4096,
            128,
            {128, 256, 512, 1024, 2048, 4096},
            {"experiments/models/llama-8b", "--dtype", "bf16", "--kv-dtype", "bf16", "--kv-bytes", "32GiB",
             "--max-model-len", "8192", "--max-batch", "64"}};
  return {20,
          768,
          112,  // 2,200 gaps: 22 beyond the P99
          {32, 64, 128, 256, 512, 1024},
          {"experiments/models/llama-mini", "--kv-bytes", "256MiB", "--max-model-len", "2048", "--max-batch", "16"}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int chunk : sizes_of(setting).chunks) all.push_back({{"chunk", chunk}});
  return all;
}

Measure open(const Setting& setting) {
  const Sizes sizes = sizes_of(setting);
  auto bed = std::make_shared<Bed>(setting, sizes.common);
  return [=](const Values& point) -> Result<Finding> {
    const std::vector<BenchRequest> load =
        random_load(sizes.n_requests, sizes.prompt, sizes.output, 0.25, setting.seed).requests;
    Result<double> capacity = bed->capacity(load);
    if (!capacity) return capacity.error();
    Result<std::string> wrong = bed->open({"--topology", "1C", "--batching", "chunked", "--prefix-cache", "off",
                                           "--chunk-tokens", point["chunk"].dump()});
    if (!wrong) return wrong.error();
    if (!wrong.value().empty()) return Finding{{}, wrong.value()};
    const double rate = 0.6 * capacity.value();
    Run run = run_load(bed->stack(), load, arrival_times(sizes.n_requests, rate, false, 1, setting.seed));
    if (!run.wrong.empty()) return Finding{{}, run.wrong};
    Values values = {{"rate", rate}};
    values.update(run_values(run));
    return Finding{{values}, ""};
  };
}

REGISTER_EXPERIMENT("chunk", "any", points, open);

}  // namespace
}  // namespace xpyd::experiments::chunk_experiment
