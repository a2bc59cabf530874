// The model's interface to the engine: one forward pass over flat arrays.
#pragma once

#include <cstdint>
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
#include "model/expert_load.h"
#include "model/sampler.h"

namespace xpyd::attention {
struct AttentionVariant;  // attention/attention.h
}

namespace xpyd::model {

// Reports a step's KV layer by layer; layer-wise KV streaming is built on it. A model of one stage calls it on the
// engine's thread during Model::begin(). (A pipeline's stages use it inside, on their ranks' threads.) `layer` counts
// through the whole model.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  // Says that every rank has written the KV of `layer` for every token of the step. On a card the write is enqueued, so
  // it comes before what the observer enqueues on the same queue. The calling rank's attention starts when this
  // returns.
  virtual void layer_done(int layer) = 0;
};

// Hidden states of a model with a multi-token head (ModelConfig::n_predict). The head takes a token and the trunk's
// hidden state of the token before it.
struct HiddenStates {
  float* rows = nullptr;                 // out, [n_tokens, hidden]: the residual stream after the last layer, normed
  std::span<const float* const> before;  // [n_seqs]: state before a sequence's first token; null: zeros
};

// One step. The tokens of all sequences stand one after another. Sequence s has the tokens [q_offsets[s],
// q_offsets[s+1]), and kv_lengths[s] tokens of KV with them included. Positions follow from these.
struct StepInput {
  std::span<const int32_t> token_ids;   // [n_tokens]
  std::span<const int32_t> q_offsets;   // [n_seqs + 1]
  std::span<const int32_t> kv_lengths;  // [n_seqs]
  // [n_seqs], each with room for kv_lengths[s] tokens. A model on several ranks takes [n_ranks, n_seqs]: each rank has
  // a KV memory of its own.
  std::span<const KvView> views;
  std::span<const int32_t> logit_rows;  // [n_logits]: ascending indices into token_ids that need logits
  LayerObserver* observer = nullptr;    // may be null
  bool watched = false;                 // Model::wait() also returns at the end of each stage
  HiddenStates hidden = {};
};

// The model's choice from one row of logits.
struct Chosen {
  int32_t token = 0;
  int32_t nan_logits = 0;  // number of NaN logits, read as -infinity
  uint64_t row_hash = 0;   // hash of the logits (base/row_hash.h)
};

// A step is begun, computed and ended. A step between begin() and end() is a wave. Waves end in the order in which they
// were begun.
//
// Thread safety: the engine's thread makes every call except interrupt(). Many models may share weights.
class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelConfig& config() const = 0;
  // Most waves that may be under way. With a window of 1, begin() computes the step or enqueues it on the device.
  virtual int window() const { return 1; }
  virtual int stages() const { return 1; }  // stages that compute different waves at the same time
  // True if the device chooses the tokens itself, so that a wave may depend on tokens that the wave before it has not
  // chosen yet. False if the CPU samples after the wave has ended.
  virtual bool chooses() const { return false; }

  // Begins a step. It writes KV through the views and the wanted logits to logits[n_logits, vocab]. Both belong to the
  // model until the step has ended. The step's spans are read during the call only.
  // Requires, else aborts: fewer than window() waves are under way, every token id is in [0, vocab), every position is
  // below max_position.
  // A model that chooses() takes a null `logits` and one entry of `draws` for each wanted row. Its token id -1 - r then
  // stands for the token that row r of the previous wave will choose. With `logits` given, no other wave may be under
  // way.
  // A model of one stage calls the observer when the layer has been computed or enqueued. A model of several stages
  // never calls it: the observer's presence makes layers_written() count layers instead of stages.
  virtual void begin(const StepInput& step, std::span<const Draw> draws, float* logits) = 0;
  // Returns true once the oldest wave has ended. Returns false for other news since the last call: layers of a wave
  // that is observed or watched, or interrupt().
  virtual bool wait() = 0;
  virtual bool ended() const { return false; }  // true: wait() returns true at once; false: it may block
  // Makes wait() return. Any thread may call it.
  virtual void interrupt() {}
  // Layers, from the first, whose KV a wave is known to have written before it ends. Wave 0 is the oldest.
  virtual int layers_written(int wave) const { return (void)wave, 0; }
  // Ends the oldest wave; its KV and logits are then in place. Requires: wait() has returned true. `chosen` receives
  // one entry for each wanted row if the model chose.
  virtual void end(Chosen* chosen) = 0;
  // [stages()], seconds that each stage computed the wave that ended last; valid until the next end(). Empty: not
  // known.
  virtual std::span<const double> stage_seconds() const { return {}; }

  // Empty for stages that are other processes, too.
  virtual ExpertLoad expert_load() const { return {}; }

  // Runs the multi-token head. `step` has one token of each sequence, which no step has computed yet. Writes the logits
  // [n_seqs, vocab] of the token after it, and the KV of the head's own layer; the step that computes the token later
  // writes that KV again. hidden.rows receives the state that goes with the predicted token.
  virtual void predict(const StepInput& step, float* logits) {
    (void)step, (void)logits;
    XPYD_CHECK(false, "predict() of a model without a multi-token head");
  }

  // Bytes of weights, KV and activations that the step must touch, and its useful FLOPs. Of experts, the expected
  // number counts (Experts::touched).
  virtual Work work(const StepInput& step) const = 0;
};

// A model whose begin() computes the step on the caller's thread.
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

// Runs one step to its end, observer calls included. Requires: no wave is under way.
void compute_step(Model& model, const StepInput& step, float* logits);

// Shape of the whole model's KV.
inline KvShape kv_shape(const ModelConfig& c, Dtype kv_dtype) {
  return {c.n_layers, c.n_kv_heads, c.head_dim, kv_dtype};
}

struct Weights;  // model/weights/weights.h

struct LoadOptions {
  Dtype dtype = Dtype::f32;                // f32 or bf16: the embedding table, and matrices with no other dtype
  std::optional<Dtype> weight_dtype = {};  // of matrices; quantised rows of another dtype are widened first
  int weight_group = 0;  // inputs that share one scale when this loader quantises; 0: 128 for int4, else a whole row
  bool dummy = false;    // --load-format dummy: seeded random weights, from config.json alone
  uint64_t seed = 0;
  Range layers;  // layers of one stage; the first brings the embedding, the last brings the LM head; empty: all
};

// The dtype of most matrices: weight_dtype if it is set, else the folder's quantised dtype, else dtype.
Dtype matrix_dtype(const ModelConfig& config, const LoadOptions& options);

// Loads a folder. It reads and checks all headers before it allocates, and packs each matrix once, on the team.
Result<std::shared_ptr<const Weights>> load_weights(const std::string& dir, const ModelConfig& config,
                                                    const LoadOptions& options, ThreadTeam& team);

struct GemmVariant;  // model/gemm/gemm.h

// The rows of the variant tables that a model runs; null: this machine's default.
struct Kernels {
  const GemmVariant* gemm = nullptr;
  const AttentionVariant* attention = nullptr;
};

// Makes a Llama-family model over shared weights. `max_step_tokens` bounds n_tokens of a step; with max_logits it fixes
// the scratch. `team` runs the kernels and serves this model only.
std::unique_ptr<Model> make_llama(std::shared_ptr<const Weights> weights, ThreadTeam& team, int max_step_tokens,
                                  int max_logits, const Kernels& kernels = {});

// The same model on tp x pp ranks, with the bits of one rank. Each rank has a thread and a KV memory
// (StepInput::views). With one stage, rank 0 is the engine's thread; several stages make a Pipeline (pipeline.h).
inline constexpr int kMaxRanks = 64;
struct ShardOptions {
  KvShards shards;
  int threads_per_rank = 1;
  int window = 0;              // waves under way on several stages; 0: two per stage
  bool whole_experts = false;  // a tensor rank computes some experts whole; else a slice of each
};
// Requires: check_model_shards() accepts the shape.
std::unique_ptr<Model> make_sharded_llama(std::shared_ptr<const Weights> weights, const ShardOptions& options,
                                          int max_step_tokens, int max_logits, const Kernels& kernels = {});
// Applies check_shards() and requires whole heads on every rank. The error names the option.
Status check_model_shards(const ModelConfig& config, const KvShards& shards, const std::string& tp_name = "tp",
                          const std::string& pp_name = "pp");

}  // namespace xpyd::model
