// What the engine knows of a model: one forward pass over flat arrays.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "allocator/kv/kv_layout.h"
#include "allocator/kv/kv_shards.h"
#include "base/status.h"
#include "base/thread_team.h"
#include "base/work.h"
#include "model/config.h"
#include "model/sampler.h"

namespace xpyd::attention {
struct AttentionVariant;  // attention/attention.h
}

namespace xpyd::model {

// The hook of layer-wise KV streaming. It is called on the engine's thread during Model::begin() (inside a pipeline: on
// its ranks' threads), layer by layer, after the KV of `layer` (counted in the whole model) has been written for every
// token of the step, by all ranks. On one stage the layer's attention, which reads all KV of it, starts when it
// returns.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  // Before that, by a model that reads a layer's KV before it has written its own: it is about to.
  virtual void layer_reads(int layer) { (void)layer; }
  virtual void layer_done(int layer) = 0;
};

// Of a model with a multi-token head (ModelConfig::n_predict), which takes, with each token, what the model made of the
// one before it.
struct HiddenStates {
  float* rows = nullptr;  // [n_tokens, hidden]: written, the residual stream behind the last layer, normed
  std::span<const float* const> before;  // [n_seqs]: of the token before a sequence's first one; null: zeros
};

// One step. Tokens of all sequences stand one after another; sequence s has the tokens [q_offsets[s], q_offsets[s+1])
// and, with them, kv_lengths[s] tokens of KV. Positions follow from these.
struct StepInput {
  std::span<const int32_t> token_ids;   // [n_tokens]
  std::span<const int32_t> q_offsets;   // [n_seqs + 1]
  std::span<const int32_t> kv_lengths;  // [n_seqs]
  // [n_seqs]; room for kv_lengths[s] tokens is there. Of a model on several ranks: [n_ranks,
  // n_seqs], each rank's own KV memory.
  std::span<const KvView> views;
  std::span<const int32_t> logit_rows;  // [n_logits]: ascending indices into token_ids whose logits are wanted
  LayerObserver* observer = nullptr;    // may be null
  bool watched = false;                 // Model::wait() returns at the end of each stage, too
  HiddenStates hidden = {};
};

// What a model chose from one row of logits.
struct Chosen {
  int32_t token = 0;
  int32_t nan_logits = 0;  // read as -infinity
  uint64_t row_hash = 0;   // base/row_hash.h, of the logits
};

// Every step goes one way: it is begun, it is computed, and it is ended. A step that is under way is a wave; waves end
// in the order in which they were begun.
//
// Thread safety: one thread, the engine's, calls everything but interrupt(). Weights may be shared by many models.
class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelConfig& config() const = 0;
  virtual int window() const {
    return 1;
  }  // waves that may be under way; 1: begin() has computed the step, or enqueued it
  virtual int stages() const { return 1; }  // that compute different waves at the same time
  // True: a device that computes beside the CPU can choose the tokens, so that a wave may compute what the one before
  // it has not chosen yet. False: the CPU does, when the wave has ended.
  virtual bool chooses() const { return false; }

  // Begins a step, which writes KV through the views, and the wanted logits to logits[n_logits, vocab]; they stay the
  // model's until the step has ended. Spans of the step are read during the call alone.
  // Before: fewer than window() waves are under way; every token id is in [0, vocab), every position is below
  // max_position. A model that chooses() is given no `logits` where it shall choose, once by `draws` for each wanted
  // row; among its token ids -1 - r stands for what row r of the step begun just before will choose. Where it is given
  // `logits`, no other wave is under way.
  // The observer is called by a model of one stage, when what it asks for has been computed or enqueued. A model of
  // several stages calls none: an observer only says that layers_written() counts layers.
  virtual void begin(const StepInput& step, std::span<const Draw> draws, float* logits) = 0;
  // Waits until the oldest wave has ended, and returns true; or until there is other news since the last call: layers
  // of a watched wave, or interrupt(), which any thread may call.
  virtual bool wait() = 0;
  virtual bool ended() const { return false; }  // the oldest wave has: wait() returns at once
  virtual void interrupt() {}
  // Layers whose KV a wave has written, from the first one; as far as it tells before its end. `wave`: 0 is the oldest.
  virtual int layers_written(int wave) const { return (void)wave, 0; }
  // After wait(): the oldest wave's KV and logits are in place. chosen: one for each wanted row, of a model that chose.
  virtual void end(Chosen* chosen) = 0;
  // Of the wave that ended last, [stages()], until the next one ends; empty: not known.
  virtual std::span<const double> stage_seconds() const { return {}; }

  // The multi-token head's logits, [n_seqs, vocab], of the token behind the next one: of one token of each sequence,
  // which no step has computed yet. Its own layer's KV is written, which the step that computes the token writes again;
  // hidden.rows become the states with which it takes the token that it predicts.
  virtual void predict(const StepInput& step, float* logits) {
    (void)step, (void)logits;
    XPYD_CHECK(false, "predict() of a model without a multi-token head");
  }

  // Weights, KV and activations that this step must touch, and its useful FLOPs.
  virtual Work work(const StepInput& step) const = 0;
  virtual size_t weight_bytes() const = 0;   // shared with other models over the same weights
  virtual size_t scratch_bytes() const = 0;  // activations and buffers of this instance, fixed at construction
};

// A model whose begin() computes the step, on the caller's thread.
class SynchronousModel : public Model {
 public:
  void begin(const StepInput& step, std::span<const Draw>, float* logits) final {
    XPYD_CHECK(!computed_, "a step is begun before the last one has ended");
    forward(step, logits);
    computed_ = true;
  }
  bool wait() final { return true; }
  bool ended() const final { return computed_; }
  void end(Chosen*) final { computed_ = false; }

 protected:
  virtual void forward(const StepInput& step, float* logits) = 0;

 private:
  bool computed_ = false;
};

// One step from its begin to its end, its observer's calls included. Before: no wave is under way.
void compute_step(Model& model, const StepInput& step, float* logits);

inline KvShape kv_shape(const ModelConfig& c, Dtype kv_dtype) {
  return {c.n_layers, c.n_kv_heads, c.head_dim, kv_dtype};
}

struct Weights;  // model/weights/weights.h

struct LoadOptions {
  Dtype dtype = Dtype::f32;  // f32 or bf16: of the embedding's table, and of matrices that nothing else is said of
  std::optional<Dtype> weight_dtype =
      {};                // of matrices; where a folder has codes of another dtype they are widened first
  int weight_group = 0;  // inputs with one scale where codes are made here; 0: 128 (int4), else all
  bool dummy = false;    // --load-format dummy: seeded random weights from config.json alone
  uint64_t seed = 0;
  std::function<void(double)> progress = {};  // told the share that is loaded, now and then, on the caller's thread
  Range layers;  // of one stage alone, with the embedding if the first is among them and with the head if
                 // the last one is; empty: all
};

// What most matrices are kept as: weight_dtype, or what the folder has, or dtype.
Dtype matrix_dtype(const ModelConfig& config, const LoadOptions& options);

// Reads and checks everything before it allocates; packs matrices once (the team helps).
Result<std::shared_ptr<const Weights>> load_weights(const std::string& dir, const ModelConfig& config,
                                                    const LoadOptions& options, ThreadTeam& team);

struct GemmVariant;  // model/gemm/gemm.h

// Which rows of the variant tables a model runs; null: this machine's default.
struct Kernels {
  const GemmVariant* gemm = nullptr;
  const AttentionVariant* attention = nullptr;
};

// A Llama-family model over shared weights. `max_step_tokens` bounds n_tokens of one step and,
// with max_logits, fixes the scratch. `team` runs the kernels and is used by this model alone.
std::unique_ptr<Model> make_llama(std::shared_ptr<const Weights> weights, ThreadTeam& team, int max_step_tokens,
                                  int max_logits, const Kernels& kernels = {});

// The same model on tp x pp ranks, a thread each with a KV memory of its own (StepInput::views), and with the same
// bits. On one stage the first rank is the engine's thread; several are a Pipeline (pipeline.h).
inline constexpr int kMaxRanks = 64;
struct ShardOptions {
  KvShards shards;
  int threads_per_rank = 1;
  std::vector<int> cpus = {};  // [n_ranks * threads_per_rank] to pin to, or empty
  int window = 0;              // waves under way on several stages; 0: two for each stage
};
// Before: check_model_shards() takes the shape.
std::unique_ptr<Model> make_sharded_llama(std::shared_ptr<const Weights> weights, const ShardOptions& options,
                                          int max_step_tokens, int max_logits, const Kernels& kernels = {});
// check_shards, and what the forward pass asks for besides: whole heads for every rank.
Status check_model_shards(const ModelConfig& config, const KvShards& shards, const std::string& tp_name = "tp",
                          const std::string& pp_name = "pp");

}  // namespace xpyd::model
