// Shared parts of the Llama family's forward passes on CPU and CUDA: the check of a step, the rows that the last layer
// still needs, and the work of a step, from a StepInput or from its lengths alone (cost_model.h).
#pragma once

#include <functional>
#include <vector>

#include "model/config.h"
#include "model/gemm/quantised.h"
#include "model/model.h"

namespace xpyd::model {

// Aborts if the engine made a step that breaks the contract of Model::begin(); no client input can cause this. Token
// ids down to -n_previous stand for tokens that the previous step chooses.
void check_step(const StepInput& step, const ModelConfig& config, int max_step_tokens, int max_logits,
                int n_previous = 0, int n_ranks = 1);

// The rows that go on after the last layer's KV is written. Attention takes a sequence's last tokens, so each sequence
// keeps its tokens from the first wanted one to its end. A prompt chunk without wanted logits keeps none.
struct WantedRows {
  void reserve(size_t n);
  // Fills all fields from a step and keeps no reference to it but its views.
  void select(const StepInput& step);
  std::vector<int32_t> tokens;  // ascending indices into the step's tokens
  std::vector<int32_t> q_offsets, kv_lengths;
  std::vector<KvView> views;
  std::vector<int32_t> logit_rows;  // indices into `tokens`
};

// Row counts of a step: `all` rows go through every layer's KV, `kept` rows through the rest of the last layer.
struct StepRows {
  double all = 0, kept = 0, logits = 0;
  double kv_token_bytes = 0;  // all layers, K and V
};
// Bits per weight of most matrices, of the LM head, and of the embedding table.
struct WeightBits {
  double matrices, head, table;
  WeightBits(Dtype all)
      : matrices(stored_bits(all)), head(matrices), table(dtype_bits(all)) {}  // NOLINT: a Dtype converts implicitly
  explicit WeightBits(const Weights& weights);
};
// Work of a step whose activations are of dtype `activations`. attention(kept, layer) returns the attention work of one
// layer, for the kept rows or for all. Of a sparse layer's experts, the expected number that the rows use is read.
Work llama_work(const ModelConfig& config, const WeightBits& bits, Dtype activations, const StepRows& rows,
                const std::function<Work(bool kept, int layer)>& attention);
Work llama_work(const StepInput& step, const ModelConfig& config, const WeightBits& bits, Dtype activations);

}  // namespace xpyd::model
