// Chunked pipeline parallelism (Mooncake, FAST '25, section 3.3; TeraPipe, ICML '21, without the backward pass). The
// layers of a Llama-family model are split into stages that compute different waves at the same time. A wave is one
// step of the engine. Chunk c + 1 of a prompt enters stage 0 while chunk c is in a later stage. This is legal because a
// stage needs only the KV of its own layers from chunk c, and that KV is already written.
//
//   wave    0  1  2  3    stage s begins wave c when stage s - 1 has ended wave c and stage s has ended wave c - 1;
//   stage 0 c0 c1 c2 c3   the engine begins wave c when fewer than W = window() waves are under way.
//   stage 1    c0 c1 c2
//
// Threads: each rank has a thread and a team; the engine's thread computes nothing. A stage keeps the residual streams
// of up to 2 P waves, and the next stage reads them in place. A stage waits only if all these places are taken.
//
// Thread safety: as Model; interrupt() may come from any thread.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "base/wait_word.h"
#include "model/llama/llama_rank.h"
#include "model/model.h"

namespace xpyd::model {

class Pipeline final : public Model {
 public:
  // Requires: check_model_shards() accepts the shape, and it has at least two stages.
  Pipeline(std::shared_ptr<const Weights> weights, const ShardOptions& options, int max_step_tokens, int max_logits,
           const Kernels& kernels);
  ~Pipeline() override;  // computes begun waves to their end

  const ModelConfig& config() const override { return weights_->config; }
  int window() const override { return window_; }
  int stages() const override { return shards_.pp; }
  void begin(const StepInput& step, std::span<const Draw> draws, float* logits) override;
  bool wait() override;
  bool ended() const override { return first_ != begun_ && over_.load(std::memory_order_acquire) != first_; }
  void interrupt() override { news_.add(1); }
  int layers_written(int wave) const override;
  void end(Chosen* chosen) override;
  std::span<const double> stage_seconds() const override { return stage_seconds_; }
  ExpertLoad expert_load() const override {
    ExpertLoad sum;
    for (const auto& stage : stages_) stage->add_load(sum);
    return sum;
  }
  Work work(const StepInput& step) const override {
    return sharded_work(weights_->config, WeightBits(*weights_), step);
  }

 private:
  // A wave's copy of the step, block tables included, because the engine may change its own meanwhile.
  struct Wave {
    StepInput step;  // spans into the fields below, without views and observer
    std::vector<int32_t> token_ids, q_offsets, kv_lengths, logit_rows;
    std::vector<KvView> views;  // [n_ranks, n_seqs]
    std::vector<std::vector<int32_t>> tables;
    float* logits = nullptr;              // [n_logits, vocab]
    bool by_layer = false, told = false;  // report each layer; report each stage
    std::atomic<int> layers{0};           // number of layers whose KV is written
    std::atomic<int> ranks_done{0};
    std::vector<double> seconds;  // [pp]
  };
  // Called on the thread of a stage's first rank when all its ranks have written a layer.
  struct Written final : LayerObserver {
    Pipeline* pipeline = nullptr;
    Wave* wave = nullptr;
    void layer_done(int layer) override { pipeline->written(*wave, layer + 1); }
  };

  Wave& wave_of(uint32_t number) { return waves_[number % waves_.size()]; }
  const Wave& wave_of(uint32_t number) const { return waves_[number % waves_.size()]; }
  void keep(Wave& wave, const StepInput& step);
  void run_rank(int rank);
  void run_wave(int rank, uint32_t number);
  void written(Wave& wave, int layers);

  const std::shared_ptr<const Weights> weights_;
  const int max_step_tokens_, max_logits_;
  const KvShards shards_;
  const int window_, places_;  // places_: residual streams that each stage but the last keeps
  const bool crowded_;
  std::vector<std::unique_ptr<StageRanks>> stages_;
  std::vector<Written> observers_;     // [pp]
  std::vector<Wave> waves_;            // ring; its size is a power of two, since wave numbers wrap at 2^32
  WaitWord posted_;                    // number of waves begun, for the first stage's ranks
  std::unique_ptr<WaitWord[]> done_;   // [n_ranks]: number of waves that a rank has finished
  std::atomic<uint32_t> over_{0};      // number of waves that every stage has finished
  WaitWord news_;                      // wakes the engine's thread
  uint32_t begun_ = 0, first_ = 0;     // waves begun; the oldest wave not ended: engine's thread only
  uint32_t seen_ = 0;                  // value of news_ at the last wait()
  std::vector<double> stage_seconds_;  // [pp]
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace xpyd::model
