// One rank of a Llama-family model: the forward pass of its layers and its heads, over one team of
// threads. A model on one rank is this class once; model/llama/llama.cc puts several together.
//
// Tensor parallelism (Megatron-LM's split): q, k, v, gate and up by columns, o and down by K. Every
// rank holds the whole residual stream and does the same to it; what ranks exchange is the sums of
// o_proj and down_proj. These are cut into K-groups whose sums one tree adds (model/gemm/gemm.h),
// and a rank makes the sums of whole groups: so the result has the bits of one rank's.
//
// Thread safety: run() is called by one thread, the rank's; ranks of a stage run at once.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "allocator/kv/kv_shards.h"
#include "attention/attention.h"
#include "base/memory.h"
#include "base/wait_word.h"
#include "model/gemm/gemm.h"
#include "model/gemm/ops.h"
#include "model/llama/llama_step.h"
#include "model/model.h"
#include "model/weights/weights.h"

namespace xpyd::model {

// What a rank computes. Weights stay where they are: a slice is a view of the packed matrices.
struct RankSlice {
  Range layers;             // of the model
  Range q_heads, kv_heads;  // of the model
  Range groups;             // K-groups of o_proj and of down_proj whose sums it makes; may be empty
  Range mlp;                // columns of gate and of up: those that its groups of down_proj read
  Range vocab;              // columns of the logits; may be empty
};
RankSlice rank_slice(const Weights& weights, const KvShards& shards, int rank);

// What the tensor ranks of one stage share.
class StageExchange {
 public:
  // The sum of neighbouring K-groups that are a subtree of the tree, made by one rank.
  struct Part {
    Range groups;
    int tensor_rank;
  };
  StageExchange(const Weights& weights, const KvShards& shards, int stage, int max_step_tokens, bool crowded);

  int tp() const { return tp_; }
  void barrier() { barrier_.wait(); }
  const std::vector<Part>& parts() const { return parts_; }
  // [max_step_tokens, hidden] of one part. There are two sets, used in turn: who writes to one has
  // passed the barrier behind which everybody has read from it.
  float* sums(int set, size_t part) { return sums_.as<float>() + (size_t(set) * parts_.size() + part) * part_floats_; }
  // out[0, n) = the tree over all parts, of elements [at, at + n) of each.
  void add_up(const Ops& ops, int set, size_t at, int n, float* out) const;
  // True where a rank's groups of o_proj are not its own heads' columns: then ranks read columns of
  // what others have attended to.
  bool gathers() const { return gathers_; }
  std::vector<const float*> attended;  // [tp]: [tokens, the rank's columns]
  std::vector<Range> columns;          // [tp]: of n_heads * head_dim
  size_t bytes() const { return sums_.size(); }

 private:
  void add_up(const Ops& ops, const float* sums, Range groups, size_t at, int n, float* out) const;
  const int tp_, hidden_, n_groups_;
  const bool gathers_;
  std::vector<Part> parts_;
  std::array<int, 65> part_of_ = {};  // by first group: index of its part, or -1
  size_t part_floats_;
  Buffer sums_;
  Barrier barrier_;
};

class LlamaRank {
 public:
  // `places`: residual streams that it keeps, of so many steps.
  LlamaRank(std::shared_ptr<const Weights> weights, const KvShards& shards, int rank, StageExchange& stage,
            ThreadTeam& team, int max_step_tokens, int places, const Kernels& kernels);

  // The step, or some tokens of it: `step` has this rank's views alone. `x_in`, [n_tokens, hidden]: what the stage
  // before has made of them; null in the first stage. `x`, likewise, in one of the places: what this stage makes of
  // them. `logits`: [n_logits, vocab], of the last stage. The observer is called on this thread when all ranks of the
  // stage have written a layer's KV; `observed`: some rank of the stage has one.
  void run(const StepInput& step, const float* x_in, float* x, bool observed, float* logits);

  // Model::predict, likewise.
  void predict(const StepInput& step, float* x, bool observed, float* logits);

  // [max_step_tokens, hidden]
  float* x(int place) { return x_ + size_t(place) * place_floats_; }
  const RankSlice& slice() const { return slice_; }
  size_t scratch_bytes() const { return activations_.size() + gemm_scratch_.bytes() + positions_.size() * sizeof(int); }

 private:
  // Tokens of a step, or of a part of it, as attention wants them.
  struct Rows {
    int n = 0;
    std::span<const int32_t> q_offsets, kv_lengths;
    std::span<const KvView> views;
  };
  template <class Body>
  void for_elements(int n_rows, int width, Body body);
  template <class Body>
  void for_rows(int n_rows, int width, Body body);
  void gemm(const PackedMatrix& w, const std::vector<float>& bias, const float* x, int x_stride, float* y, int y_stride,
            int m, Range columns = {0, 0}, Range groups = {0, 0});
  int qkv_width() const { return q_width_ + 2 * kv_width_; }
  float* row(float* base, int i, int width) const { return base + size_t(i) * size_t(width); }
  const float* row(const float* base, int i, int width) const { return base + size_t(i) * size_t(width); }

  const LayerWeights& first_layer() const { return weights_->layers[size_t(slice_.layers.begin)]; }
  void embed(int32_t token, float* x) const;
  void join(const StepInput& step, float* x);
  void layer_written(const StepInput& step, int layer, bool observed);
  void receive(const StepInput& step, const float* x_in, float* x, const LayerWeights& layer);
  void project(const LayerWeights& layer, int n);
  void turn(const LayerWeights& layer, int n);
  void append(int layer, const Rows& rows);
  void keep_wanted(float* x);
  void attend(int layer, const Rows& rows);
  void output(const LayerWeights& layer, int n);
  void mlp(const LayerWeights& layer, int n);
  void row_parallel(const PackedMatrix& w, const std::vector<float>& bias, const float* x, int x_stride, int set,
                    int n);
  void add_and_norm(float* x, const std::vector<float>& bias, int set, const std::vector<float>* norm, int n);

  const std::shared_ptr<const Weights> weights_;
  const ModelConfig& c_;
  const RankSlice slice_;
  const int tensor_rank_;
  StageExchange& stage_;
  ThreadTeam& team_;
  const int q_width_, kv_width_, mlp_width_;  // floats of one token's q; k or v; gate or up
  const Ops& ops_ = default_ops();
  const GemmVariant& gemm_;
  const AttentionVariant& attention_;
  GemmScratch gemm_scratch_;
  std::vector<int> positions_;
  WantedRows wanted_;
  std::vector<const float*> before_;  // join()'s
  Buffer activations_;
  const size_t place_floats_;
  // Into activations_, [max_step_tokens, width] each, of the tokens of one run() but for x_:
  float* x_;         // [places] of hidden: residual streams
  float* normed_;    // hidden: also the output of o_proj and down_proj before it is added
  float* qkv_;       // q_width + 2 kv_width
  float* q_;         // q_width: after RoPE
  float* attended_;  // q_width
  float* gathered_;  // columns of this rank's groups of o_proj, where they are not attended_
  float* gate_up_;   // 2 mlp_width: SwiGLU's result takes the gate's place
  float* joined_;    // 2 hidden, of a model with a multi-token head
  float* cos_;       // head_dim / 2
  float* sin_;       // head_dim / 2
};

// The tensor ranks of one stage, each with a team of its own for its kernels (or `team`, which is somebody else's).
class StageRanks {
 public:
  StageRanks(const std::shared_ptr<const Weights>& weights, const ShardOptions& options, int stage, ThreadTeam* team,
             int max_step_tokens, int places, const Kernels& kernels, bool crowded);
  LlamaRank& rank(int tensor_rank) { return *ranks_[size_t(tensor_rank)]; }
  size_t scratch_bytes() const;

 private:
  StageExchange exchange_;
  std::vector<std::unique_ptr<ThreadTeam>> teams_;
  std::vector<std::unique_ptr<LlamaRank>> ranks_;
};

// What the step must touch, as on one rank: copies of kv heads that ranks have besides are not counted.
Work sharded_work(const ModelConfig& config, const WeightBits& bits, const StepInput& step);

}  // namespace xpyd::model
