// Chunked pipeline parallelism (Mooncake, FAST '25, section 3.3; TeraPipe, ICML '21, without the backward pass): the
// layers of a Llama-family model in stages, which work at the same time on different waves. A wave is a step of the
// engine: chunk c + 1 of a prompt enters stage 0 while chunk c is further on, because all that it needs of c is the KV
// of the stage's own layers, which is there.
//
//   wave  0 1 2 3          stage s of wave c begins when stage s - 1 has ended it, and s has ended wave c - 1;
//   stage 0 c0 c1 c2 c3    the engine begins wave c when fewer than W = window() are begun and not ended.
//   stage 1    c0 c1 c2
//
// Threads: one for each rank, with a team of its own; and the engine's, which computes nothing. A stage leaves the
// residual streams of 2 P waves for the next one, which reads them where they are; only then would it wait.
//
// Thread safety: as Model says; interrupt() from any thread.
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
  // Before: check_model_shards() takes the shape, and it has two stages at least.
  Pipeline(std::shared_ptr<const Weights> weights, const ShardOptions& options, int max_step_tokens, int max_logits,
           const Kernels& kernels);
  ~Pipeline() override;  // waves that are begun are computed to their end

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
  Work work(const StepInput& step) const override {
    return sharded_work(weights_->config, WeightBits(*weights_), step);
  }
  size_t weight_bytes() const override { return weights_->bytes(); }
  size_t scratch_bytes() const override;

 private:
  // The engine may change what it gave while the wave is under way: a wave keeps a copy, block tables included.
  struct Wave {
    StepInput step;  // spans into what follows, without views and observer
    std::vector<int32_t> token_ids, q_offsets, kv_lengths, logit_rows;
    std::vector<KvView> views;  // [n_ranks, n_seqs]
    std::vector<std::vector<int32_t>> tables;
    float* logits = nullptr;              // [n_logits, vocab]
    bool by_layer = false, told = false;  // whether the engine wants to hear of layers, or of stages
    std::atomic<int> layers{0};           // whose KV is written
    std::atomic<int> ranks_done{0};
    std::vector<double> seconds;  // [pp]
  };
  // Of a stage whose ranks have all written a layer; on its first rank's thread.
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
  const int window_, places_;  // places_: for residual streams, of a stage that is not the last
  const bool crowded_;
  std::vector<std::unique_ptr<StageRanks>> stages_;
  std::vector<Written> observers_;     // [pp]
  std::vector<Wave> waves_;            // a ring of a power of two: numbers of waves begin anew after 2^32
  WaitWord posted_;                    // waves
  std::unique_ptr<WaitWord[]> done_;   // [n_ranks]: waves that a rank has done
  std::atomic<uint32_t> over_{0};      // waves
  WaitWord news_;                      // for the engine's thread
  uint32_t begun_ = 0, first_ = 0;     // waves: the engine's thread alone
  uint32_t seen_ = 0;                  // news
  std::vector<double> stage_seconds_;  // [pp]
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace xpyd::model
