// Waiting prompts through an engine of their own on one core, a team of threads, tensor ranks or pipeline stages, with
// the time of each stage for each wave.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocator/schemes.h"
#include "base/clock.h"
#include "base/random.h"
#include "batch/engine/engine.h"
#include "experiments/pipeline_time.h"

namespace xpyd::experiments {

struct PipelinedRun {
  double seconds = 0;                // from the first step to the last token
  uint64_t hash = 0;                 // over all logits
  double work_us = 0;                // processor time of the engine's thread, per wave
  double stage_s = 0;                // seconds in waves, summed over stages
  std::vector<PipelineChunk> waves;  // empty with one stage
};

struct PipelinedShape {
  int tp = 1, pp = 1, threads = 1;  // threads: of each rank
  int window = 0;
  int chunk_tokens = 64, prompts = 8, prompt_tokens = 256;
  std::string chunk_policy = "fixed";
};

class Pipelined {
 public:
  Pipelined(std::shared_ptr<const Weights> weights, const ModelConfig& config, const PipelinedShape& shape)
      : Pipelined(std::unique_ptr<Model>(), config, shape) {
    if (shape.tp * shape.pp == 1)
      model_ = make_llama(std::move(weights), team_, shape.chunk_tokens, shape.prompts);
    else
      model_ = make_sharded_llama(std::move(weights), {.shards = shards_, .window = shape.window}, shape.chunk_tokens,
                                  shape.prompts);
  }
  Pipelined(std::unique_ptr<Model> model, const ModelConfig& config, const PipelinedShape& shape)
      : shape_(shape),
        shards_{.n_layers = config.n_layers, .n_kv_heads = config.n_kv_heads, .tp = shape.tp, .pp = shape.pp},
        team_(shape.threads),
        model_(std::move(model)) {
    KvOptions kv{.shape = kv_shape(config, Dtype::f32), .prefix_cache = false};
    kv.max_sequence_tokens = shape.prompt_tokens + 1;
    kv.pool_bytes = size_t(shape.prompts + 1) * size_t(shape.prompt_tokens + 64) * kv.shape.token_bytes();
    memory_ = make_ranked_memory("paged", kv, shards_).value();
  }

  PipelinedRun run() {
    PipelinedRun run;
    Watched watched(*model_, run);
    EngineOptions options{
        .policy = find_batch_policy("chunked"), .max_batch = shape_.prompts, .step_tokens = shape_.chunk_tokens};
    options.chunks = find_chunk_policy(shape_.chunk_policy);
    Engine engine(watched, *memory_, std::move(options), clock_, nullptr);
    auto sink = std::make_shared<Hash>();
    for (int p = 0; p < shape_.prompts; ++p) {
      auto request = std::make_shared<Request>();
      request->id = uint64_t(p);
      Random random{uint64_t(p)};
      for (int i = 0; i < shape_.prompt_tokens; ++i)
        request->prompt.push_back(int32_t(random.below(uint64_t(model_->config().vocab))));
      request->sampling.temperature = 0;
      request->max_tokens = 1;
      engine.submit(make_sequence(request, {}, sink, nullptr, nullptr));
    }
    const double began = clock_.now(), own_s = own_seconds();
    while (!engine.idle()) engine.step();
    run.seconds = clock_.now() - began;
    run.hash = sink->hash;
    run.work_us = 1e6 * (own_seconds() - own_s) / double(engine.stats().steps);
    for (const auto& wave : run.waves)
      for (double s : wave.stage_s) run.stage_s += s;
    return run;
  }
  int window() const { return model_->window(); }

 private:
  static double own_seconds() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
  }
  class Hash final : public EventSink {
   public:
    void on_event(TokenEvent event) override { hash ^= event.logits_hash * 0x9e3779b97f4a7c15u; }
    uint64_t hash = 0;
  };
  class Watched final : public Model {
   public:
    Watched(Model& model, PipelinedRun& run) : model_(model), run_(run) {}
    const ModelConfig& config() const override { return model_.config(); }
    int window() const override { return model_.window(); }
    int stages() const override { return model_.stages(); }
    void begin(const StepInput& step, std::span<const Draw> draws, float* logits) override {
      model_.begin(step, draws, logits);
    }
    bool wait() override { return model_.wait(); }
    bool ended() const override { return model_.ended(); }
    int layers_written(int wave) const override { return model_.layers_written(wave); }
    void end(Chosen* chosen) override {
      model_.end(chosen);
      const auto stages = model_.stage_seconds();
      if (!stages.empty()) run_.waves.push_back({.stage_s = {stages.begin(), stages.end()}});
    }
    std::span<const double> stage_seconds() const override { return model_.stage_seconds(); }
    Work work(const StepInput& step) const override { return model_.work(step); }

   private:
    Model& model_;
    PipelinedRun& run_;
  };

  const PipelinedShape shape_;
  const KvShards shards_;
  ThreadTeam team_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<KvMemory> memory_;
  RealClock clock_;
};

}  // namespace xpyd::experiments
