// A model's weights on the card: row-major matrices for cuBLASLt, and small vectors in f32. They are made from the
// host's Weights, so loading and checking happen in one place.
//
// Thread safety: constant once uploaded; any number of models on the card may share them.
#pragma once

#include <memory>
#include <vector>

#include "base/cuda/cuda.h"
#include "model/config.h"
#include "model/weights/weights.h"

namespace xpyd::model {

// W [n, k] in device memory. Rows begin at multiples of 16 bytes, as tensor-core copies need; elements between k and
// the stride are zero.
struct CudaMatrix {
  const void* data = nullptr;
  int n = 0, k = 0;
  int stride = 0;  // elements between rows
};

struct CudaLayerWeights : LayerParts<CudaMatrix, const float*> {
  // Of a sparse layer, [experts.count, hidden] in f32; its gate_up and down are the experts' matrices, stacked.
  CudaMatrix router = {};
};

// Cosine and sine for one position and one pair of dimensions.
struct RopeAngle {
  float cos, sin;
};

struct CudaWeights {
  ModelConfig config;
  Dtype dtype = Dtype::f32;  // of all matrices but routers
  CudaMatrix embedding;      // [vocab, hidden]
  CudaMatrix lm_head;        // [vocab, hidden]; the embedding itself if tied
  std::vector<CudaLayerWeights> layers;
  const float* final_norm = nullptr;
  // [max_position, head_dim / 2]; the host computes angles in double, as the CPU's forward pass does.
  const RopeAngle* rope = nullptr;
  std::vector<cuda::Memory> memories;  // hold all of the above

  size_t bytes() const;
};

// Uploads the weights and waits for the end. Requires: host's matrices but routers are of host's dtype. Error
// `unavailable`: the card has too little free memory; the message names both sizes.
Result<std::shared_ptr<const CudaWeights>> upload_weights(const Weights& host, cuda::Stream& stream);

}  // namespace xpyd::model
