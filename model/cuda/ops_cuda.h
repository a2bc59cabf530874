// The row operations between matrix products, on CUDA. Activations are f32 or bf16; sums and the residual stream are
// f32.
//
// One addition order: a row's number of threads depends on its width only. Each thread adds its elements in ascending
// order, and one fixed tree adds the threads' sums. So a row's bits depend on that row only, as on the CPU
// (model/gemm/ops.h), but they are not the CPU's bits.
//
// All pointers are device memory; arrays begin at multiples of 16 bytes. Rows beyond CudaStep's q_offsets[n_seqs] pad a
// captured batch. They are computed, but they write no KV.
#pragma once

#include "attention/cuda/attention_cuda.h"
#include "base/cuda/cuda.h"
#include "model/cuda/weights_cuda.h"

namespace xpyd::model {

struct CudaEmbedArgs {
  const int32_t* token_ids = nullptr;  // [n]; -1 - r stands for previous[r]
  const int32_t* previous = nullptr;   // tokens of the previous step, which the host may not know yet
  CudaMatrix table;                    // [vocab, width]
  const float* norm = nullptr;         // [width]
  float* x = nullptr;                  // [n, width]
  void* normed = nullptr;              // [n, stride], `dtype`
  Dtype dtype = Dtype::f32;            // of table and normed
  float eps = 0;
  int n = 0, stride = 0;
};
// x = table rows; normed = RMSNorm(x) * norm
void cuda_embed(const CudaEmbedArgs& args, cuda::Stream& stream);

struct CudaAddNormArgs {
  float* x = nullptr;             // [n, width]
  const void* delta = nullptr;    // [n, stride], `dtype`; null: adds nothing
  const float* bias = nullptr;    // [width] or null; added with delta
  const float* norm = nullptr;    // [width]; null: only x is updated
  const int32_t* rows = nullptr;  // [n] or null: row of x that row i of normed is made from; requires no delta
  void* normed = nullptr;         // [n, stride], `dtype`; may be delta
  Dtype dtype = Dtype::f32;
  float eps = 0;
  int n = 0, width = 0, stride = 0;
};
// x += delta + bias; normed = RMSNorm(x) * norm
void cuda_add_norm(const CudaAddNormArgs& args, cuda::Stream& stream);

struct CudaRopeArgs {
  const void* qkv = nullptr;  // [n_tokens, stride], `dtype`: q heads, k heads, v heads
  int stride = 0;
  const float* bias = nullptr;                       // [q, k, v widths] or null
  const float *q_norm = nullptr, *k_norm = nullptr;  // [head_dim] or null (Qwen3)
  float eps = 0;
  const RopeAngle* rope = nullptr;  // [max_position, head_dim / 2]
  void* q = nullptr;                // [n_tokens, n_heads, head_dim], `dtype`
  Dtype dtype = Dtype::f32;
  int n_heads = 0;
  std::byte* pool = nullptr;
  KvLayout layout;
  CudaStep step;
  int layer = 0;
};
// Adds the bias, norms each head, applies RoPE and appends, with one read of qkv. q goes to `q`, k and v to the cache.
void cuda_rope_append(const CudaRopeArgs& args, cuda::Stream& stream);

struct CudaSwigluArgs {
  void* gate_up = nullptr;      // [n, stride], `dtype`: gate [width], then up [width]
  const float* bias = nullptr;  // [2 width] or null
  Dtype dtype = Dtype::f32;
  int n = 0, width = 0, stride = 0;
};
// gate = silu(gate) * up, in gate's place
void cuda_swiglu(const CudaSwigluArgs& args, cuda::Stream& stream);

// to[i] = from[rows[i]] for packed rows of `bytes` bytes, a multiple of 2. Requires: from and to do not overlap.
void cuda_gather_rows(const void* from, const int32_t* rows, int n, size_t bytes, void* to, cuda::Stream& stream);

}  // namespace xpyd::model
