// The speed of a pipeline of two stages on two cores: waiting prompts run through the engine in waves. It stands beside
// one core, a team of two threads, and two tensor ranks.
//
// Expected: N chunks of equal cost t take N t on one core. Two stages take t / 2 each, in N + 1 rounds; with 8 prompts
// of 4 chunks that is 2 * 32 / 33 times as fast. A chunk that needs no logits ends when the last layer's KV is written,
// which saves the last stage about .8 of its 8 layers: 15.2 / 8 * 32 / 33 = 1.84 times one core. With one wave (W = 1)
// a chunk of 64 is one piece and one stage waits for the other, so it is as fast as one core. W = P = 2 is lockstep:
// wave i begins when wave i - 2 has ended, which costs nothing if stages take equal time. A team of two threads has no
// bubble, but waits some ten times a layer for its slower half.
//
// The value of two cores is measured in the same rounds by two engines side by side, each with one core and half of the
// prompts. Two whole cores give 2.0 times one core. Two threads of one core give little more than 1, and no pipeline
// can be faster than that. 1.75 times one core is .875 of 2.0.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "experiments/bench/harness.h"
#include "experiments/pipelined.h"
#include "experiments/stats.h"

namespace xpyd::experiments {
namespace {

// Stages that take no time, so that only the engine's time is left.
class NullWaves final : public Model {
 public:
  explicit NullWaves(const ModelConfig& config) : config_(config) {}
  const ModelConfig& config() const override { return config_; }
  int window() const override { return 4; }
  int stages() const override { return 2; }
  void begin(const StepInput& step, std::span<const Draw>, float* logits) override {
    std::fill_n(logits, step.logit_rows.size() * size_t(config_.vocab), 0.0f);
    ++begun_;
  }
  bool ended() const override { return begun_ > 3; }
  bool wait() override { return true; }
  void end(Chosen*) override { --begun_; }
  Work work(const StepInput&) const override { return {}; }

 private:
  const ModelConfig config_;
  int begun_ = 0;
};

void bench_pipeline(Bench& bench) {
  const std::string dir = "experiments/models/llama-mini";
  ModelConfig config = load_model_config(dir).value();
  config.n_layers = 16;
  const auto weights = load_weights(dir, config, {.dtype = Dtype::bf16, .dummy = true}, bench.team(1)).value();
  struct Contestant {
    std::string name;
    std::unique_ptr<Pipelined> pipelined;
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
  add("two engines, half of them each", {.prompts = 4});
  Pipelined other_half(weights, config, {.prompts = 4});
  add("pp 2, W 1", {.pp = 2, .window = 1});
  add("pp 2, W 2 (lockstep)", {.pp = 2, .window = 2});
  add("pp 2, W 4", {.pp = 2, .window = 4});
  const uint64_t expected = all[0]->pipelined->run().hash, of_half = all[3]->pipelined->run().hash;
  std::vector<BenchCase> cases;
  for (size_t i = 0; i < all.size(); ++i)
    cases.push_back({.name = "8 prompts of 256, " + all[i]->name,
                     .n_threads = 2,
                     .run =
                         [&c = *all[i], other = i == 3 ? &other_half : nullptr] {
                           std::thread beside([&] { other ? (void)other->run() : void(); });
                           c.work_us.push_back(c.pipelined->run().work_us);
                           beside.join();
                         },
                     .check =
                         [&c = *all[i], wanted = i == 3 ? of_half : expected] {
                           return c.pipelined->run().hash == wanted
                                      ? std::string()
                                      : std::string("the logits differ from those on one core");
                         },
                     .work = {},
                     .limit = Limit::none,
                     .target = 0,
                     .versus = {}});
  const auto against = [&](size_t other, double target) {
    cases.back().versus = {cases[other].name};
    cases.back().target = target;
  };
  against(0, 1.75);
  bench.measure(cases);
  against(3, 0.875);
  bench.measure({cases[3], cases.back()});
  against(1, 0.95);
  bench.measure({cases[1], cases.back()});
  const auto budget = [&](const char* name, std::vector<double> us, double target) {
    std::sort(us.begin(), us.end());
    BenchRow row{.group = {}, .name = name, .n_threads = 1, .rounds = int(us.size())};
    row.seconds = 1e-6 * percentile(us, 50);
    row.measure = "of a budget of 15 us (budget / time)";
    row.share = 15e-6 / row.seconds;
    row.share_p10 = 15 / percentile(us, 90), row.share_p90 = 15 / percentile(us, 10);
    row.target = target;
    bench.report(row);
  };
  std::vector<double> work_us;
  Pipelined null(std::make_unique<NullWaves>(config), config, {.prompts = 32});
  for (int round = 0; round < bench.options().rounds; ++round) work_us.push_back(null.run().work_us);
  budget("engine, a wave: plan, begin, choose, emit", work_us, 1);
  budget("the same and waking, beside two busy stages", all.back()->work_us, 0);
}

REGISTER_BENCH("pipeline", bench_pipeline);

}  // namespace
}  // namespace xpyd::experiments
