// A model's weights in the form that the forward pass takes: matrices packed for GEMM, small vectors in f32.
//
// Thread safety: constant once loaded; any number of models may share them.
#pragma once

#include <vector>

#include "base/memory.h"
#include "model/config.h"
#include "model/gemm/gemm.h"
#include "model/model.h"

namespace xpyd::model {

// One layer's weights, in host memory or on a device.
template <class Matrix, class Vector>
struct LayerParts {
  // q, k and v stacked, [(n_heads + 2 n_kv_heads) * head_dim, hidden], so that one product reads the normed activations
  // once.
  Matrix qkv = {};
  Matrix o = {};                              // [hidden, n_heads * head_dim], kRowParallelGroups K-groups
  Matrix gate_up = {};                        // [2 * intermediate, hidden]: gate, then up
  Matrix down = {};                           // [hidden, intermediate], kRowParallelGroups K-groups
  Vector attention_norm = {}, mlp_norm = {};  // [hidden]
  Vector q_norm = {}, k_norm = {};            // [head_dim], or empty
  Vector qkv_bias = {}, o_bias = {}, gate_up_bias = {}, down_bias = {};  // [outputs], or empty

  using Parts = LayerParts;
  static constexpr Matrix Parts::*kMatrices[] = {&Parts::qkv, &Parts::o, &Parts::gate_up, &Parts::down};
  static constexpr Vector Parts::*kVectors[] = {&Parts::attention_norm, &Parts::mlp_norm, &Parts::q_norm,
                                                &Parts::k_norm,         &Parts::qkv_bias, &Parts::o_bias,
                                                &Parts::gate_up_bias,   &Parts::down_bias};
};
// One expert of a sparse layer, with the columns and K-groups of a dense MLP.
struct ExpertWeights {
  PackedMatrix gate_up;  // [2 * experts.intermediate, hidden]: gate, then up
  PackedMatrix down;     // [hidden, experts.intermediate], kRowParallelGroups K-groups
};
struct LayerWeights : LayerParts<PackedMatrix, std::vector<float>> {
  PackedMatrix router = {};  // [experts.count, hidden]
  // Of a sparse layer, which has no gate_up and down of its own; else empty.
  std::vector<ExpertWeights> experts = {};
};

// The multi-token head in use, without its layer.
struct PredictHead {
  PackedMatrix join;  // [hidden, 2 * hidden]: inputs are the embedding, then the hidden state
  std::vector<float> embedding_norm, hidden_norm, norm;  // [hidden]; norm's output goes to lm_head
};

struct Weights {
  ModelConfig config;
  Dtype dtype = Dtype::f32;          // of the embedding
  Buffer embedding;                  // [vocab, hidden], row-major
  std::vector<LayerWeights> layers;  // the last one belongs to the multi-token head, if there is one
  PredictHead head;                  // only with n_predict
  std::vector<float> final_norm;     // [hidden]
  PackedMatrix lm_head;              // [vocab, hidden]; a packed copy of tied embeddings
  std::vector<double> rope_freqs;    // [head_dim / 2], radians per token, scaling applied

  // Resident bytes. A tied embedding counts twice: as a table and as packed lm_head.
  size_t bytes() const;
};

// Groups of inputs that share a scale when the loader quantises.
QuantGroups made_groups(Dtype dtype, int weight_group, int columns);

// Radians per token of each pair of dimensions, with the scaling of `config` applied.
std::vector<double> rope_frequencies(const ModelConfig& config);

}  // namespace xpyd::model
