// pd: How do colocated, 1P1D and 2P1D on the same two cores compare in TTFT and TBT, by load?
// Paper: DistServe (OSDI'24) section 2, which has no figure of these sizes.
// Set-up: one pool of hardware, shared by both phases or split between prefill and decode instances. Real steps; all
//   instances are on the same cores (llama-mini, f32) or on the same card (llama-1b, bf16; `split` is --gpu-split).
//   `load` is a share of the requests per second that 1C completes when all are present at once. The columns are those
//   of the xPyD notes' table.
// Command: make exp-pd (4 minutes; measured).
// Expected, two cores: 1C runs a chunk of 512 in 170 ms, and decodes wait for it. 1P1D: D has one core and steps of 6
//   to 10 ms: P99 ITL 8 to 30 ms. P has half of the arithmetic: twice the TTFT, and a queue. A second P adds no
//   arithmetic. The transfer of 4.4 MB takes below 1 ms.
// Found: at a load of .4, 1P1D has .15 of 1C's P99 gap; at .2, where gaps of 1C are rare, its TTFT is 1.9 times as
//   long.
#include "experiments/load.h"
#include "experiments/load/arrivals.h"

namespace xpyd::experiments::pd_experiment {
namespace {

struct Sizes {
  int n_requests;
  std::vector<double> loads;
  std::vector<std::string> common;
};

Sizes sizes_of(const Setting& setting) {
  if (setting.tiny) return {3, {0.5}, {"experiments/models/llama-tiny", "--kv-bytes", "4MiB", "--max-batch", "4"}};
  if (setting.device == "cuda")
    return {192,
            {0.6},
            {"experiments/models/llama-1b", "--dtype", "bf16", "--kv-dtype", "bf16", "--kv-bytes", "24GiB",
             "--max-model-len", "8192", "--max-batch", "64", "--chunk-tokens", "2048"}};
  return {20,
          {0.2, 0.4},
          {"experiments/models/llama-mini", "--kv-bytes", "256MiB", "--max-model-len", "1024", "--max-batch", "16"}};
}

struct Shape {
  const char *topology, *transport, *split, *chunk;
};
// On a card: chunks of two sizes; streams alone, or with priorities; handoff.
std::vector<Shape> shapes_of(const Setting& setting) {
  if (setting.tiny) return {{"1C", "local", "off", "32"}, {"1P1D", "handoff", "off", "32"}};
  if (setting.device == "cuda")
    return {{"1C", "local", "off", "2048"},
            {"1C", "local", "off", "512"},
            {"1P1D", "local", "off", "2048"},
            {"1P1D", "local", "priority", "2048"},
            {"1P1D", "handoff", "priority", "2048"}};
  return {{"1C", "local", "off", "512"}, {"1P1D", "local", "off", "512"}, {"2P1D", "local", "off", "512"}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const Shape& s : shapes_of(setting))
    for (double load : sizes_of(setting).loads) {
      // A second P shows where P has a queue.
      if (s.topology == std::string("2P1D") && load < 0.4) continue;
      all.push_back({{"topology", s.topology},
                     {"transport", s.transport},
                     {"split", s.split},
                     {"chunk", std::stoi(s.chunk)},
                     {"load", load}});
    }
  return all;
}

Measure open(const Setting& setting) {
  const Sizes sizes = sizes_of(setting);
  auto bed = std::make_shared<Bed>(setting, sizes.common);
  return [=](const Values& point) -> Result<Finding> {
    // A card multiplies 200 times as fast, so its prompts are longer.
    const int prompt = setting.tiny               ? 30
                       : setting.device == "cuda" ? 2048
                                                  : 272,
              output = setting.tiny               ? 4
                       : setting.device == "cuda" ? 128
                                                  : 112;  // 2,180 gaps, of which 21 lie beyond the P99
    const std::vector<BenchRequest> load = random_load(sizes.n_requests, prompt, output, 0.8, setting.seed).requests;
    Result<double> capacity = bed->capacity(load);
    if (!capacity) return capacity.error();
    std::vector<std::string> options = {"--topology",       point["topology"],    "--transport",
                                        point["transport"], "--prefix-cache",     "off",
                                        "--chunk-tokens",   point["chunk"].dump()};
    if (setting.device == "cuda") options.insert(options.end(), {"--gpu-split", point["split"]});
    Result<std::string> wrong = bed->open(options);
    if (!wrong) return wrong.error();
    if (!wrong.value().empty()) return Finding{{}, wrong.value()};
    const double rate = double(point["load"]) * capacity.value();
    Run run = run_load(bed->build(), load, arrival_times(sizes.n_requests, rate, false, 1, setting.seed));
    if (!run.wrong.empty()) return Finding{{}, run.wrong};
    Values values = {{"rate", rate}, {"capacity", capacity.value()}};
    values.update(run_values(run));
    return Finding{{values}, ""};
  };
}

REGISTER_EXPERIMENT("pd", "any", points, open);

}  // namespace
}  // namespace xpyd::experiments::pd_experiment
