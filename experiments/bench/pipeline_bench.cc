// What a pipeline of two stages makes of two cores: prompts that wait in line, through the engine, in waves; beside one
// core, a team of two threads, and two tensor ranks.
//
// Expected. N chunks of equal cost t take N t on one core. Two stages take half of t each, and N + 1 turns: with 4
// prompts of 4 chunks (16 chunks) 2 * 16 / 17 = 1.88 times one core, less what is not halved: the embedding and the LM
// head (one row a prompt), and the imbalance of chunks that grow. With one wave under way (W = 1) a step of 128 tokens
// is cut into 2 pieces: 2 * 2 / 3 = 1.33. W = P = 2 is lockstep: wave i begins when i - 2 has ended, which costs
// nothing where stages take the same time, and max(t_i, t_i+1) where they do not. A team of two threads waits some ten
// times a layer for its slower half.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/stats.h"
#include "experiments/bench/harness.h"
#include "experiments/pipelined.h"

namespace xpyd::experiments {
namespace {

void bench_pipeline(Bench& bench) {
  const std::string dir = "experiments/models/llama-mini";
  const ModelConfig config = load_model_config(dir).value();
  const auto weights = load_weights(dir, config, {.dtype = Dtype::bf16, .dummy = true}, bench.team(1)).value();
  struct Contestant {
    std::string name;
    std::unique_ptr<Pipelined> pipelined;
    PipelinedRun last = {};
    std::vector<double> work_us = {};
  };
  std::vector<std::unique_ptr<Contestant>> all;
  const auto add = [&](const char* name, const PipelinedShape& shape) {
    all.emplace_back(new Contestant{name, std::make_unique<Pipelined>(weights, config, shape)});
  };
  if (bench.max_threads() < 2) return;
  add("one core", {});
  add("a team of two", {.threads = 2});
  add("tp 2", {.tp = 2});
  add("pp 2, W 1", {.pp = 2, .window = 1});
  add("pp 2, W 2 (lockstep)", {.pp = 2, .window = 2});
  add("pp 2, W 4", {.pp = 2, .window = 4});
  const uint64_t expected = all[0]->pipelined->run().hash;
  std::vector<BenchCase> cases;
  for (const auto& one : all)
    cases.push_back({.name = "4 prompts of 512, " + one->name,
                     .n_threads = 2,
                     .run =
                         [&c = *one] {
                           c.last = c.pipelined->run();
                           c.work_us.push_back(c.last.work_us);
                         },
                     .check =
                         [&c = *one, expected] {
                           return c.pipelined->run().hash == expected ? std::string()
                                                                     : std::string("other logits than on one core");
                         },
                     .work = {},
                     .limit = Limit::none,
                     .target = 0,
                     .versus = {}});
  cases.back().versus = {cases[0].name};
  cases.back().target = 1.75;
  bench.measure(cases);
  cases.back().versus = {cases[1].name};
  cases.back().target = 0.95;
  bench.measure({cases[1], cases.back()});
  std::vector<double>& work_us = all.back()->work_us;
  std::sort(work_us.begin(), work_us.end());
  BenchRow row{.group = {}, .name = "engine, a wave: plan, begin, choose, emit", .n_threads = 1};
  row.rounds = int(work_us.size());
  row.seconds = 1e-6 * percentile(work_us, 50);
  row.measure = "of a budget of 15 us (budget / time)";
  row.share = 15e-6 / row.seconds;
  row.share_p10 = 15 / percentile(work_us, 90), row.share_p90 = 15 / percentile(work_us, 10);
  row.target = 1;
  bench.report(row);
}

REGISTER_BENCH("pipeline", bench_pipeline);

}  // namespace
}  // namespace xpyd::experiments
