// A model's weights as the forward pass wants them: matrices packed for gemm, small vectors in f32.
//
// Thread safety: constant once loaded; shared by any number of models.
#pragma once

#include <vector>

#include "base/memory.h"
#include "model/config.h"
#include "model/gemm/gemm.h"
#include "model/model.h"

namespace xpyd::model {

// One layer's, wherever they are: here, or on a card.
template <class Matrix, class Vector>
struct LayerParts {
  // q, k and v one under another, [(n_heads + 2 n_kv_heads) * head_dim, hidden]: one product reads
  // the normed activations once.
  Matrix qkv = {};
  Matrix o = {};                              // [hidden, n_heads * head_dim], row-parallel groups
  Matrix gate_up = {};                        // [2 * intermediate, hidden]: gate, then up
  Matrix down = {};                           // [hidden, intermediate], row-parallel groups
  Vector attention_norm = {}, mlp_norm = {};  // [hidden]
  Vector q_norm = {}, k_norm = {};            // [head_dim], or none
  Vector qkv_bias = {}, o_bias = {}, gate_up_bias = {}, down_bias = {};  // [outputs], or none

  using Parts = LayerParts;
  static constexpr Matrix Parts::*kMatrices[] = {&Parts::qkv, &Parts::o, &Parts::gate_up, &Parts::down};
  static constexpr Vector Parts::*kVectors[] = {&Parts::attention_norm, &Parts::mlp_norm, &Parts::q_norm,
                                                &Parts::k_norm,         &Parts::qkv_bias, &Parts::o_bias,
                                                &Parts::gate_up_bias,   &Parts::down_bias};
};
using LayerWeights = LayerParts<PackedMatrix, std::vector<float>>;

// The multi-token head in use, but for its layer.
struct PredictHead {
  PackedMatrix join;  // [hidden, 2 * hidden]: of the embedding's half, then the state's
  std::vector<float> embedding_norm, hidden_norm, norm;  // [hidden]; the last one's output goes to lm_head
};

struct Weights {
  ModelConfig config;
  Dtype dtype = Dtype::f32;          // of the embedding
  Dtype matrix_dtype = Dtype::f32;   // of most matrices
  Buffer embedding;                  // [vocab, hidden], row-major
  std::vector<LayerWeights> layers;  // the head's is the last one
  PredictHead head;                  // of a config with n_predict
  std::vector<float> final_norm;     // [hidden]
  PackedMatrix lm_head;              // [vocab, hidden]; with tied embeddings a packed copy of them
  std::vector<double> rope_freqs;    // [head_dim / 2], radians per token, scaling applied

  // What is resident: a tied embedding counts twice, as table and as packed lm_head.
  size_t bytes() const;
};

// Which inputs share a scale where codes are made at load.
QuantGroups made_groups(Dtype dtype, int weight_group, int columns);

// Radians per token of each pair of dimensions, with the scaling of `config` applied.
std::vector<double> rope_frequencies(const ModelConfig& config);

}  // namespace xpyd::model
