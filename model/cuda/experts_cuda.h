// One mixture-of-experts block on CUDA: the MLP of a sparse layer (model/moe), wholly on the device. The host never
// learns which experts were chosen, so a step with experts is enqueued, captured and planned ahead as any other.
//
// One order of additions, as on the CPU. An output of an expert's product is one chain over the inputs, whose order
// depends on the matrix only. So its bits depend neither on the number of the expert's rows nor on the row's place. A
// token's rows are weighted and added in ascending order of expert ids.
//
// Thread safety: one thread, its stream's.
#pragma once

#include "base/cuda/cuda.h"
#include "model/config.h"
#include "model/cuda/weights_cuda.h"

namespace xpyd::model {

class CudaExperts {
 public:
  // dtype: of activations and of the experts' matrices.
  CudaExperts(const ModelConfig& config, Dtype dtype, int max_step_tokens)
      : c_(config), dtype_(dtype), max_tokens_(max_step_tokens) {}

  // Takes device memory from `base` on and returns its size in bytes. With a null base it only adds up.
  size_t place(std::byte* base);

  // x += the block's output for the n tokens of `normed`, [n, stride]. x is [n, hidden]. Requires: place().
  void run(const CudaLayerWeights& layer, const void* normed, int stride, float* x, int n, cuda::Stream& stream) const;

 private:
  const ModelConfig& c_;
  const Dtype dtype_;
  const int max_tokens_;
  // A row is a token in one of its experts. Rows stand in ascending order of experts, then of tokens.
  float* scores_ = nullptr;       // [tokens, count]
  int32_t* chosen_ = nullptr;     // [tokens, used]: a token's experts in ascending order
  float* weights_ = nullptr;      // [tokens, used]
  int32_t* rows_ = nullptr;       // [tokens, used]: the row of each
  int32_t* begins_ = nullptr;     // [count + 1]: the first row of each expert
  int32_t* tokens_ = nullptr;     // [rows]
  std::byte* gate_up_ = nullptr;  // [rows, 2 * intermediate], padded to a stride; SwiGLU's result overwrites gate
  std::byte* out_ = nullptr;      // [rows, hidden], padded to a stride
};

}  // namespace xpyd::model
