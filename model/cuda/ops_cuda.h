// The row operations between the matrix products, on CUDA. Activations are f32 or bf16, sums and
// the residual stream f32.
//
// One addition order: the threads of a row follow from its width alone, every thread adds its
// elements in ascending order, and their sums are added in one fixed tree. So a row's bits depend
// on that row alone, as on the CPU (model/gemm/ops.h); they are not the CPU's bits.
//
// All pointers are device memory, arrays begin at multiples of 16 bytes. Rows beyond CudaStep's q_offsets[n_seqs] are
// the padding of a captured batch: they are computed where that harms nobody and written to no KV.
#pragma once

#include "attention/cuda/attention_cuda.h"
#include "base/cuda/cuda.h"
#include "model/cuda/weights_cuda.h"

namespace xpyd::model {

struct CudaEmbedArgs {
  const int32_t* token_ids = nullptr;  // [n]; -1 - r: previous[r]
  const int32_t* previous = nullptr;   // tokens of the step before, which the host may not know yet
  CudaMatrix table;                    // [vocab, width]
  const float* norm = nullptr;         // [width]
  float* x = nullptr;                  // [n, width]
  void* normed = nullptr;              // [n, stride], `dtype`
  Dtype dtype = Dtype::f32;            // of table and normed
  float eps = 0;
  int n = 0, stride = 0;
};
// x = table rows; normed = RMSNorm(x) * norm
void cuda_embed(const CudaEmbedArgs& args, const cuda::On& on);

struct CudaAddNormArgs {
  float* x = nullptr;             // [n, width]
  const void* delta = nullptr;    // [n, stride], `dtype`; null: nothing is added
  const float* bias = nullptr;    // [width] or null; belongs to delta
  const float* norm = nullptr;    // [width]; null: x alone
  const int32_t* rows = nullptr;  // [n] or null: the row of x that becomes row i of normed; no delta then
  void* normed = nullptr;         // [n, stride], `dtype`; may be delta
  Dtype dtype = Dtype::f32;
  float eps = 0;
  int n = 0, width = 0, stride = 0;
};
// x += delta + bias; normed = RMSNorm(x) * norm
void cuda_add_norm(const CudaAddNormArgs& args, const cuda::On& on);

struct CudaTurnArgs {
  const void* qkv = nullptr;  // [n_tokens, stride], `dtype`: q heads, k heads, v heads
  int stride = 0;
  const float* bias = nullptr;                       // [q, k, v widths] or null
  const float *q_norm = nullptr, *k_norm = nullptr;  // [head_dim] or null (Qwen3)
  float eps = 0;
  const Turn* turns = nullptr;  // [max_position, head_dim / 2]
  void* q = nullptr;            // [n_tokens, n_heads, head_dim], `dtype`
  Dtype dtype = Dtype::f32;
  int n_heads = 0;
  std::byte* pool = nullptr;
  KvLayout layout;
  CudaStep step;
  int layer = 0;
};
// Bias, norm per head, RoPE and append in one reading of qkv: q to its own array, k and v to the cache.
void cuda_turn_append(const CudaTurnArgs& args, const cuda::On& on);

struct CudaSwigluArgs {
  void* gate_up = nullptr;      // [n, stride], `dtype`: gate [width], then up [width]
  const float* bias = nullptr;  // [2 width] or null
  Dtype dtype = Dtype::f32;
  int n = 0, width = 0, stride = 0;
};
// gate = silu(gate) * up, in its place
void cuda_swiglu(const CudaSwigluArgs& args, const cuda::On& on);

// to[i] = from[rows[i]], rows of `bytes` bytes (a multiple of 2), packed. from and to do not overlap.
void cuda_gather_rows(const void* from, const int32_t* rows, int n, size_t bytes, void* to, const cuda::On& on);

}  // namespace xpyd::model
