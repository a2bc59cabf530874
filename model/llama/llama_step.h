// What the forward passes of the Llama family share, whatever runs them: the check of a step, the rows that the last
// layer still needs, and the work that a step is, whether there is one (StepInput) or only its lengths (cost_model.h).
#pragma once

#include <functional>
#include <vector>

#include "model/config.h"
#include "model/gemm/quantised.h"
#include "model/model.h"

namespace xpyd::model {

// The step is made by the engine: a wrong one is a bug, whatever clients sent. Aborts. Token ids
// down to -n_previous stand for tokens that the step before chose.
void check_step(const StepInput& step, const ModelConfig& config, int max_step_tokens, int max_logits,
                int n_previous = 0, int n_ranks = 1);

// After the last layer's KV is written, only tokens whose logits are wanted go on: of each sequence
// those from the first wanted one to its end, as attention takes a sequence's last tokens. A prompt
// chunk that wants no logits ends there.
struct WantedRows {
  void reserve(size_t n);
  void select(const StepInput& step);
  std::vector<int32_t> tokens;  // ascending indices into the step's tokens
  std::vector<int32_t> q_offsets, kv_lengths;
  std::vector<KvView> views;
  std::vector<int32_t> logit_rows;  // indices into `tokens`
};

// Rows of a step: all go through every layer's KV, `kept` through what follows the last layer's.
struct StepRows {
  double all = 0, kept = 0, logits = 0;
  double kv_token_bytes = 0;  // all layers, K and V
};
// Bits of a weight of most matrices, of the head, and of the embedding's table.
struct WeightBits {
  double matrices, head, table;
  WeightBits(Dtype all)
      : matrices(stored_bits(all)), head(matrices), table(dtype_bits(all)) {}  // NOLINT: a dtype is one
  explicit WeightBits(const Weights& weights);
};
// Activations are of `activations`. attention(kept, layer): one layer's, of the kept rows or all.
Work llama_work(const ModelConfig& config, const WeightBits& bits, Dtype activations, const StepRows& rows,
                const std::function<Work(bool kept, int layer)>& attention);
Work llama_work(const StepInput& step, const ModelConfig& config, const WeightBits& bits, Dtype activations);

}  // namespace xpyd::model
