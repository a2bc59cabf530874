// A model's weights on the card: row-major matrices for cuBLASLt or quantised tiles, and small vectors in f32. They are
// made from the host's Weights, so loading and checking happen in one place.
//
// Thread safety: constant once uploaded; any number of models on the card may share them.
#pragma once

#include <memory>
#include <vector>

#include "base/cuda/cuda.h"
#include "model/config.h"
#include "model/weights/weights.h"

namespace xpyd::model {

// Parameters of a quantised matrix (quantised_gemm_cuda.h). K is stored in another order if groups are scattered over
// it.
struct CudaQuantisedRows {
  Dtype dtype = Dtype::f32;         // int8, int4, fp8; f32: not quantised
  int places = 0;                   // positions of K as stored
  int group = 0, groups = 0;        // positions with one scale; scales per output
  const int32_t* inputs = nullptr;  // [places], device: input of x at each position; -1: padding. Null: unchanged order
};

// W [n, k] in device memory. Rows begin at multiples of 16 bytes, as tensor-core copies need; elements between k and
// the stride are zero. A quantised matrix has tiles of 16 rows instead.
struct CudaMatrix {
  const void* data = nullptr;
  int n = 0, k = 0;
  int stride = 0;  // elements between rows; quantised: bytes between tiles
  CudaQuantisedRows codes = {};
};

using CudaLayerWeights = LayerParts<CudaMatrix, const float*>;

// Cosine and sine for one position and one pair of dimensions.
struct RopeAngle {
  float cos, sin;
};

struct CudaWeights {
  ModelConfig config;
  Dtype dtype = Dtype::f32;         // of the embedding and of dense weights
  Dtype matrix_dtype = Dtype::f32;  // of most matrices
  CudaMatrix embedding;             // [vocab, hidden]
  CudaMatrix lm_head;               // [vocab, hidden]; the embedding itself if tied and dense
  std::vector<CudaLayerWeights> layers;
  const float* final_norm = nullptr;
  // [max_position, head_dim / 2]; the host computes angles in double, as the CPU's forward pass does.
  const RopeAngle* rope = nullptr;
  cuda::Memory memory;  // holds all of the above

  size_t bytes() const { return memory.size(); }
};

// Uploads the weights and waits for the end. Requires: host's matrices are quantised or of host's dtype. Error
// `unavailable`: the card has too little free memory; the message names both sizes.
Result<std::shared_ptr<const CudaWeights>> upload_weights(const Weights& host, cuda::Stream& stream);

}  // namespace xpyd::model
