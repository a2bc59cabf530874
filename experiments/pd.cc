// pd: one pool of hardware, shared by both phases or split between prefill and decode instances.
//
// Real steps, all instances on the same cores (CPU: llama-mini, f32, each instance the cores
// divided by the instances, at least one) or on the same card (llama-1b, bf16, `split` as
// --gpu-split: streams of one priority, decode first, or so many SMs for prefill). `load` is a
// share of what 1C ends per second when all requests are there at once. The columns are those of
// vLLM's benchmark, whose table the xPyD notes print; paper_figures/pd.py prints it too.
//
// Arithmetic, two cores. 1C runs a chunk of 512 in about 170 ms on both cores; whoever decodes meanwhile waits so long:
// P99 ITL 100 to 200 ms. 1P1D: D has one core, reads 108 MB in 6 to 10 ms, and never waits for a prompt: P99 ITL 8 to
// 30 ms plus what the two take from each other. P has half the arithmetic: TTFT twice as long and, with a load of 0.6
// of 1C's rate on half its speed, a queue. A second P on two cores adds no arithmetic: 2P1D shares P's core, and takes
// some of D's. The first gap carries the transfer: 272 tokens of 16 KiB, 4.4 MB, below 1 ms; handoff none.
// Bound to a core each (`cpus`), P and D never wait for one while another stands idle, and keep their L2: a few percent,
// and a shorter tail. `pages` of 4 KiB: a step of D reads 26,000 of them, whose walks the caches answer in 20 to 30 ns
// each where they are not hidden: up to 0.5 of 7 ms.
#include <algorithm>

#include "base/arrivals.h"
#include "experiments/load.h"

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
          {0.2, 0.4, 0.6},
          {"experiments/models/llama-mini", "--kv-bytes", "256MiB", "--max-model-len", "1024", "--max-batch", "16"}};
}

struct Shape {
  const char *topology, *transport, *split, *chunk;
  const char* cpus = "";
  const char* pages = "transparent";
};
// On a card: chunks of two sizes; streams alone, with priorities, with parts of the SMs; handoff.
std::vector<Shape> shapes_of(const Setting& setting) {
  if (setting.tiny) return {{"1C", "local", "off", "32"}, {"1P1D", "handoff", "off", "32"}};
  if (setting.device == "cuda")
    return {{"1C", "local", "off", "2048"},          {"1C", "local", "off", "512"},
            {"1P1D", "local", "off", "2048"},        {"1P1D", "local", "priority", "2048"},
            {"1P1D", "handoff", "priority", "2048"}, {"1P1D", "local", "96", "2048"},
            {"1P1D", "local", "64", "2048"}};
  return {{"1C", "local", "off", "512"},
          {"2C", "local", "off", "512"},
          {"1P1D", "local", "off", "512"},
          {"1P1D", "handoff", "off", "512"},
          {"2P1D", "local", "off", "512"},
          {"1P1D", "local", "off", "512", "P0=0,D0=1"},
          {"1P1D", "local", "off", "512", "P0=0,D0=1", "off"}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const Shape& s : shapes_of(setting))
    for (double load : sizes_of(setting).loads)
      all.push_back({{"topology", s.topology},
                     {"transport", s.transport},
                     {"split", s.split},
                     {"chunk", std::stoi(s.chunk)},
                     {"cpus", s.cpus},
                     {"pages", s.pages},
                     {"load", load}});
  return all;
}

Measure open(const Setting& setting) {
  const Sizes sizes = sizes_of(setting);
  auto bed = std::make_shared<Bed>(setting, sizes.common);
  return [=](const Values& point) -> Result<Finding> {
    // A card multiplies 200 times as fast: longer prompts.
    const int prompt = setting.tiny               ? 30
                       : setting.device == "cuda" ? 2048
                                                  : 272,
              output = setting.tiny               ? 4
                       : setting.device == "cuda" ? 128
                                                  : 112;  // 2,180 gaps: 21 beyond the P99
    const std::vector<BenchRequest> load = random_load(sizes.n_requests, prompt, output, 0.8, setting.seed).requests;
    Result<double> capacity = bed->capacity(load);
    if (!capacity) return capacity.error();
    std::vector<std::string> options = {"--topology",       point["topology"],    "--transport",
                                        point["transport"], "--prefix-cache",     "off",
                                        "--chunk-tokens",   point["chunk"].dump()};
    if (setting.device == "cuda")
      options.insert(options.end(), {"--gpu-split", point["split"]});
    else
      options.insert(options.end(), {"--cpus", point["cpus"], "--huge-pages", point["pages"]});
    Result<std::string> wrong = bed->open(options);
    if (!wrong) return wrong.error();
    if (!wrong.value().empty()) return Finding{{}, wrong.value()};
    const double rate = double(point["load"]) * capacity.value();
    Run run = run_load(bed->stack(), load, arrival_times(sizes.n_requests, rate, false, 1, setting.seed));
    if (!run.wrong.empty()) return Finding{{}, run.wrong};
    Values values = {{"rate", rate}, {"capacity", capacity.value()}};
    values.update(run_values(run));
    return Finding{{values}, ""};
  };
}

REGISTER_EXPERIMENT("pd", "any", points, open);

}  // namespace
}  // namespace xpyd::experiments::pd_experiment
