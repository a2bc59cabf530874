// One rank of a Llama-family model: the forward pass of its layers and heads, on one team of threads. A model without
// parallelism is one LlamaRank; llama.cc and pipeline.h put several together.
//
// Tensor parallelism follows Megatron-LM: q, k, v, gate and up are split by columns, o and down by K. Every rank holds
// the whole residual stream and updates it in the same way. Ranks exchange only the sums of o_proj and down_proj. K is
// cut into eight groups whose sums are added in one tree (model/gemm/gemm.h), and a rank computes one subtree of it. So
// the result has the bits of one rank.
//
// Thread safety: the rank's own thread makes every call; the ranks of a stage run at the same time.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "allocator/kv/kv_shards.h"
#include "attention/attention.h"
#include "base/memory.h"
#include "base/wait_word.h"
#include "model/gemm/gemm.h"
#include "model/gemm/row_team.h"
#include "model/llama/llama_step.h"
#include "model/model.h"
#include "model/moe/expert_meter.h"
#include "model/weights/weights.h"

namespace xpyd::model {

// The part of the model that a rank computes. It is a view: weights stay in the packed matrices.
struct RankSlice {
  Range layers;             // of the model
  Range q_heads, kv_heads;  // of the model
  Range groups;             // K-groups of o_proj and of a dense down_proj that this rank sums
  ExpertSlice experts;      // of sparse layers
  Range vocab;              // columns of the logits; may be empty
};
// Slice of `rank`, which counts tensor ranks of stage 0 first.
RankSlice rank_slice(const ModelConfig& config, const ShardOptions& options, int rank);

// The memory and the barrier that the tensor ranks of one stage share.
class StageExchange {
 public:
  StageExchange(int tp, const ModelConfig& config, int max_step_tokens, bool crowded);

  int tp() const { return tp_; }
  void barrier() { barrier_.wait(); }
  ExpertMeter meter;  // rank 0 counts for all
  // Sums of one rank's K-groups, [rows, hidden]: of attention in set 0, of the MLP in set 1. A step of n tokens has n
  // rows, and n * experts.used in a sparse layer's MLP, of which a rank with whole experts writes those of its experts.
  // The sets alternate, so a rank that writes to one has passed the barrier after which every rank has read it.
  float* sums(int set, int rank) { return sets_[size_t(set)].sums.as<float>() + sets_[size_t(set)].begin(rank); }
  // Adds the sums of all ranks in the tree's order: out[0, n) receives elements [at, at + n).
  void add_up(const Ops& ops, int set, size_t at, int n, float* out) const;

 private:
  struct Set {
    size_t begin(int rank) const { return size_t(rank) * rank_floats; }
    size_t rank_floats = 0;
    Buffer sums;
  };
  static void add_up(const Ops& ops, const Set& set, Range ranks, size_t at, int n, float* out);
  const int tp_;
  std::array<Set, 2> sets_;
  Barrier barrier_;
};

class LlamaRank {
 public:
  // `places`: number of residual streams to keep, each of max_step_tokens tokens.
  LlamaRank(std::shared_ptr<const Weights> weights, const ShardOptions& options, int rank, StageExchange& stage,
            ThreadTeam& team, int max_step_tokens, int places, const Kernels& kernels);

  // Computes this rank's layers for a step. `step` has this rank's views only. `x_in`, [n_tokens, hidden], is the
  // previous stage's output, or null in the first stage. `x` is one of the places and receives this stage's output. The
  // last stage writes `logits`, [n_logits, vocab]. The observer is called on this thread when every rank of the stage
  // has written a layer's KV. `observed`: some rank of the stage has an observer.
  void run(const StepInput& step, const float* x_in, float* x, bool observed, float* logits);

  // Computes this rank's share of Model::predict(); arguments are those of run().
  void predict(const StepInput& step, float* x, bool observed, float* logits);

  // Residual stream of a place, [max_step_tokens, hidden].
  float* x(int place) { return x_ + size_t(place) * place_floats_; }
  const RankSlice& slice() const { return slice_; }

 private:
  // The tokens of a step that go on, in the form that attention takes.
  struct Rows {
    int n = 0;
    std::span<const int32_t> q_offsets, kv_lengths;
    std::span<const KvView> views;
  };
  int qkv_width() const { return q_width_ + 2 * kv_width_; }
  float* row(float* base, int i, int width) const { return base + size_t(i) * size_t(width); }
  const float* row(const float* base, int i, int width) const { return base + size_t(i) * size_t(width); }

  void embed(int32_t token, float* x) const;
  void join(const StepInput& step, float* x);
  void layer_written(const StepInput& step, int layer, bool observed);
  void receive(const StepInput& step, const float* x_in, float* x, const LayerWeights& layer);
  void project(const LayerWeights& layer, int n);
  void apply_rope(const LayerWeights& layer, int n);
  void append(int layer, const Rows& rows);
  void keep_wanted(float* x);
  void attend(int layer, const Rows& rows);
  void mlp(const LayerWeights& layer, int n);
  void row_parallel(const PackedMatrix& w, const std::vector<float>& bias, const float* x, int x_stride, int set,
                    int n);
  void read_row(int expert, size_t at, int n, float* out);
  void add_and_norm(float* x, const LayerWeights& layer, int set, const std::vector<float>* norm, int n);

  const std::shared_ptr<const Weights> weights_;
  const ModelConfig& c_;
  const RankSlice slice_;
  const int tensor_rank_;
  const bool whole_experts_;
  StageExchange& stage_;
  RowTeam team_;
  const int q_width_, kv_width_, mlp_width_;  // floats of one token's q; of its k or v; of a dense MLP's gate or up
  const Ops& ops_ = default_ops();
  const AttentionVariant& attention_;
  std::unique_ptr<MoeBlock> moe_;  // null: every layer of the rank is dense
  std::vector<int> positions_;
  WantedRows wanted_;
  std::vector<const float*> before_;  // scratch of join()
  Buffer activations_;
  const size_t place_floats_;
  // Parts of activations_, [max_step_tokens, width] each. All but x_ are valid during one run() only.
  float* x_;         // [places] of width hidden: residual streams
  float* normed_;    // width hidden; also the output of o_proj and down_proj before it is added
  float* qkv_;       // width q_width + 2 kv_width
  float* q_;         // width q_width: q after RoPE
  float* attended_;  // width q_width
  float* gate_up_;   // width 2 mlp_width; SwiGLU's result overwrites gate
  float* joined_;    // width 2 hidden; only with a multi-token head
  float* cos_;       // width head_dim / 2
  float* sin_;       // width head_dim / 2
};

// The tensor ranks of one stage. Each has its own team for kernels, unless the caller gives `team` for a single rank.
class StageRanks {
 public:
  StageRanks(const std::shared_ptr<const Weights>& weights, const ShardOptions& options, int stage, ThreadTeam* team,
             int max_step_tokens, int places, const Kernels& kernels, bool crowded);
  LlamaRank& rank(int tensor_rank) { return *ranks_[size_t(tensor_rank)]; }
  void add_load(ExpertLoad& sum) const { exchange_.meter.add_to(sum); }

 private:
  StageExchange exchange_;
  std::vector<std::unique_ptr<ThreadTeam>> teams_;
  std::vector<std::unique_ptr<LlamaRank>> ranks_;
};

// Work of a step, counted as on one rank: extra copies of kv heads on other ranks do not count.
Work sharded_work(const ModelConfig& config, const WeightBits& bits, const StepInput& step);

}  // namespace xpyd::model
