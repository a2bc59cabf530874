// A model's weights on the card: matrices row-major as cuBLASLt wants them or codes, small vectors in f32.
// Made from the host's Weights, whose loader and checks stay the only ones.
//
// Thread safety: constant once uploaded; shared by any number of models on that card.
#pragma once

#include <memory>
#include <vector>

#include "base/cuda/cuda.h"
#include "model/config.h"
#include "model/weights/weights.h"

namespace xpyd::model {

// What a matrix of codes has besides (codes_cuda.h). K is stored in another order where groups are scattered over it.
struct CudaCodes {
  Dtype dtype = Dtype::f32;         // int8, int4, fp8; f32: the matrix is not of codes
  int places = 0;                   // of K, as it is stored
  int group = 0, groups = 0;        // places with one scale; scales of an output
  const int32_t* inputs = nullptr;  // [places], device: which input of x; -1: none. Null: each place its own
};

// W [n, k], device memory. Rows begin at multiples of 16 bytes, what the tensor cores' copies need;
// elements between k and the stride are zero. Of codes: tiles of 16 rows.
struct CudaMatrix {
  const void* data = nullptr;
  int n = 0, k = 0;
  int stride = 0;  // elements from one row to the next; of codes: bytes from one tile to the next
  CudaCodes codes = {};
};

using CudaLayerWeights = LayerParts<CudaMatrix, const float*>;

// Cosine and sine of one position and one pair of dimensions.
struct Turn {
  float cos, sin;
};

struct CudaWeights {
  ModelConfig config;
  Dtype dtype = Dtype::f32;         // of the embedding, and of what is not codes
  Dtype matrix_dtype = Dtype::f32;  // of most matrices
  CudaMatrix embedding;             // [vocab, hidden]
  CudaMatrix lm_head;               // [vocab, hidden]; tied, and not codes: the embedding itself
  std::vector<CudaLayerWeights> layers;
  const float* final_norm = nullptr;
  // [max_position, head_dim / 2]: angles in double on the host, as the CPU's forward pass takes them.
  const Turn* turns = nullptr;
  cuda::Memory memory;  // all of the above

  size_t bytes() const { return memory.size(); }
};

// Waits until everything is there. Before: host's matrices are codes or of its dtype. Error `unavailable`: more than
// the card has free; says both.
Result<std::shared_ptr<const CudaWeights>> upload_weights(const Weights& host, cuda::Stream& stream);

}  // namespace xpyd::model
