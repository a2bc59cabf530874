// What a pipeline of two stages makes of two cores: prompts that wait in line, through the engine, in waves; beside one
// core, a team of two threads, and two tensor ranks.
//
// Expected. N chunks of equal cost t take N t on one core. Two stages take half of t each, and N + 1 turns: with 8
// prompts of 4 chunks (32 chunks) 2 * 32 / 33 = 1.94 times one core, less what is not halved: the embedding and the LM
// head (one row a prompt), and the imbalance of chunks that grow. With one wave under way (W = 1) a step of 256 tokens
// is cut into 4 pieces: 2 * 4 / 5 = 1.6. W = P = 2 is lockstep: wave i begins when i - 2 has ended, which costs nothing
// where stages take the same time, and max(t_i, t_i+1) where they do not. A team of two threads waits some ten times a
// layer for its slower half. A boundary is one store and one wait that spins: below 2 us, and 5 to 20 where a thread
// has to be woken.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "allocator/kv_plan.h"
#include "base/clock.h"
#include "base/random.h"
#include "base/stats.h"
#include "batch/engine.h"
#include "experiments/bench/harness.h"
#include "model/pipeline_time.h"

namespace xpyd::experiments {
namespace {

constexpr int kPrompts = 4, kPromptTokens = 512, kChunk = 128;

class Hash final : public EventSink {
 public:
  void on_event(TokenEvent event) override { hash ^= event.logits_hash * 0x9e3779b97f4a7c15u; }
  uint64_t hash = 0;
};

// One way to use the cores; runs the prompts through an engine of its own.
class Contestant {
 public:
  Contestant(std::string name, std::shared_ptr<const Weights> weights, const ModelConfig& config, int tp, int pp,
             int threads, int window)
      : name_(std::move(name)),
        shards_{.n_layers = config.n_layers, .n_kv_heads = config.n_kv_heads, .tp = tp, .pp = pp},
        team_(threads),
        model_(tp * pp == 1
                   ? make_llama(std::move(weights), team_, kChunk, kPrompts)
                   : make_sharded_llama(std::move(weights), {.shards = shards_, .window = window}, kChunk, kPrompts)) {
    kv_.shape = kv_shape(config, Dtype::f32);
    kv_.pool_bytes = size_t(kPrompts + 1) * kPromptTokens * kv_.shape.token_bytes() * 2;
    kv_.max_sequence_tokens = 2 * kPromptTokens;
    kv_.prefix_cache = false;
    memory_ = make_ranked_memory("paged", kv_, shards_, nullptr).value();
  }
  void run() {
    Engine engine(*model_, *memory_,
                  {.policy = find_batch_policy("chunked"), .max_batch = kPrompts, .step_tokens = kChunk}, clock_,
                  nullptr);
    auto sink = std::make_shared<Hash>();
    for (int p = 0; p < kPrompts; ++p) {
      auto request = std::make_shared<Request>();
      request->id = uint64_t(p);
      Random random{uint64_t(p)};
      for (int i = 0; i < kPromptTokens; ++i)
        request->prompt.push_back(int32_t(random.below(uint64_t(model_->config().vocab))));
      request->sampling.temperature = 0;
      request->max_tokens = 1;
      engine.submit(make_sequence(request, {}, sink, nullptr, nullptr));
    }
    while (!engine.idle()) engine.step();
    hash = sink->hash;
    const EngineStats& stats = engine.stats();
    work_us_.push_back(1e6 * stats.schedule_seconds / double(stats.steps));
  }
  const std::string& name() const { return name_; }
  double work_us() const { return percentile(sorted(work_us_), 50); }  // of the engine's thread, a wave
  uint64_t hash = 0;

 private:
  static std::vector<double> sorted(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v;
  }
  const std::string name_;
  const KvShards shards_;
  ThreadTeam team_;
  std::unique_ptr<Model> model_;
  KvOptions kv_;
  std::unique_ptr<KvMemory> memory_;
  RealClock clock_;
  std::vector<double> work_us_;
};

void bench_pipeline(Bench& bench) {
  const std::string dir = "experiments/models/llama-mini";
  const ModelConfig config = load_model_config(dir).value();
  const auto weights = load_weights(dir, config, {.dtype = Dtype::bf16, .dummy = true}, bench.team(1)).value();
  std::vector<std::unique_ptr<Contestant>> all;
  const auto add = [&](const char* name, int tp, int pp, int threads, int window) {
    all.push_back(std::make_unique<Contestant>(name, weights, config, tp, pp, threads, window));
  };
  add("one core", 1, 1, 1, 0);
  if (bench.max_threads() < 2) return;
  add("a team of two", 1, 1, 2, 0);
  add("tp 2", 2, 1, 1, 0);
  add("pp 2, W 1", 1, 2, 1, 1);
  add("pp 2, W 2 (lockstep)", 1, 2, 1, 2);
  add("pp 2, W 4", 1, 2, 1, 4);
  all[0]->run();
  const uint64_t expected = all[0]->hash;
  std::vector<BenchCase> cases;
  for (const auto& one : all)
    cases.push_back({.name = "4 prompts of 512, " + one->name(),
                     .n_threads = 2,
                     .run = [&c = *one] { c.run(); },
                     .check =
                         [&c = *one, expected] {
                           c.run();
                           return c.hash == expected ? std::string() : std::string("other logits than on one core");
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
  BenchRow row{.group = {}, .name = "engine, a wave: plan, begin, choose, emit", .n_threads = 1, .rounds = 1};
  row.seconds = 1e-6 * all.back()->work_us();
  row.measure = "of a budget of 15 us (budget / time)";
  row.share = row.share_p10 = row.share_p90 = 15e-6 / row.seconds;
  row.target = 1;
  bench.report(row);
}

REGISTER_BENCH("pipeline", bench_pipeline);

}  // namespace
}  // namespace xpyd::experiments
