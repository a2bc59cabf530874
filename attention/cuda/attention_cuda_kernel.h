// Device code that all kernels of attention_cuda.h share: visible tokens, addresses of rows, partial results.
#pragma once

#include <limits>

#include "attention/cuda/attention_cuda.h"
#include "base/cuda/cuda_kernel.h"

namespace xpyd::attention::cuda_kernels {

using namespace xpyd::cuda;

// Tiles and splits are cut from position 0 of the sequence, never from its end or by a batch's shape: the bits of a
// query depend on its own prefix alone.
constexpr int kTileTokens = 64;                 // tokens of KV per tile of the mma kernels
constexpr int kSplitTokens = kCudaSplitTokens;  // a multiple of tiles

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNone = -std::numeric_limits<float>::infinity();  // the maximum over no scores

constexpr int divide_up(int n, int by) { return (n + by - 1) / by; }

struct Tokens {
  int begin, end;
};

// The tokens that a query at `position` sees.
__device__ inline Tokens visible(int position, int sliding_window) {
  return {sliding_window > 0 && position >= sliding_window ? position - sliding_window + 1 : 0, position + 1};
}

// `layout` must outlive the view: it is the kernel's parameter.
__device__ inline KvView view_of(const CudaStep& step, std::byte* pool, const KvLayout& layout, int seq) {
  const int32_t* table = step.block_tables + step.table_begins[seq];
  if (step.contiguous) return KvView{pool, &layout, nullptr, table[0]};
  return KvView{pool, &layout, table, 0};
}

// The block table of a sequence, as KvRows reads it.
__device__ inline const int32_t* table_of(const CudaStep& step, int seq) {
  return step.block_tables + step.table_begins[seq];
}
// In layer_major order each layer counts its own rows from its first, so that 32 bits have to count one layer's rows
// only. at_rows() moves the pool pointer to where the rows are counted from, for kernels that read through KvRows.
inline bool in_pieces(const KvLayout& layout) { return layout.order == KvOrder::layer_major; }
inline KvRows rows_of(const CudaAttentionArgs& args) {
  return args.layout.rows(in_pieces(args.layout) ? 0 : args.layer, args.step.contiguous);
}
inline size_t bytes_of_rows(const KvLayout& layout) {
  return layout.pool_bytes() / size_t(in_pieces(layout) ? layout.shape.n_layers : 1);
}
inline CudaAttentionArgs at_rows(CudaAttentionArgs args) {
  if (in_pieces(args.layout)) args.pool += args.layout.offset(0, args.layer, 0, 0, 0);
  return args;
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return to_f32(x); }

// Calls f<T>() with the element type of these arguments' KV: float or bf16.
template <class F>
auto for_elements(const CudaAttentionArgs& args, F&& f) {
  return args.layout.shape.dtype == Dtype::f32 ? f.template operator()<float>() : f.template operator()<bf16>();
}

// Reads or writes element i of an array of f32 or bf16.
__device__ inline float get(const void* from, Dtype dtype, size_t i) {
  return dtype == Dtype::f32 ? static_cast<const float*>(from)[i] : to_f32(static_cast<const bf16*>(from)[i]);
}
__device__ inline void put(void* to, Dtype dtype, size_t i, float x) {
  if (dtype == Dtype::f32) {
    static_cast<float*>(to)[i] = x;
  } else {
    static_cast<bf16*>(to)[i] = to_bf16(x);
  }
}

// Partial results in the workspace: [i of step.splits][head] of (accumulator[head_dim], maximum, sum), with scores in
// units of log2. A sequence whose visible tokens lie in one split has no partial results.
__host__ __device__ inline size_t partial_floats(int head_dim) { return size_t(divide_up(head_dim, 4) * 4 + 4); }
__device__ inline float* partial(const CudaAttentionArgs& args, int i, int head) {
  size_t row = size_t(i) * size_t(args.n_heads) + size_t(head);
  return args.workspace + row * partial_floats(args.layout.shape.head_dim);
}

// The work of a thread block of a split kernel: the visible tokens of one sequence that lie in one split.
struct SplitWork {
  int seq, split;
  int q_token;    // the row of q and out
  Tokens tokens;  // if empty, there is nothing to do
  bool alone;     // all visible tokens are in this split: the block writes `out`, not a partial result
};
__device__ inline SplitWork split_work(const CudaAttentionArgs& args, int i) {
  auto [seq, split] = args.step.splits[i];
  if (seq < 0) return {seq, split, 0, {0, 0}, false};
  int q_token = args.step.q_offsets[seq];
  Tokens seen = visible(args.step.kv_lengths[seq] - 1, args.sliding_window);
  int begin = split * kSplitTokens, end = begin + kSplitTokens;
  return {seq,
          split,
          q_token,
          {begin > seen.begin ? begin : seen.begin, end < seen.end ? end : seen.end},
          seen.begin / kSplitTokens == (seen.end - 1) / kSplitTokens};
}

// Merges the partial results of each sequence, splits in ascending order, and writes out.
void merge_splits(const CudaAttentionArgs& args, Stream& stream);

// The requirements of every launcher, then the rows of cuda_attention_variants(), each defined in its own file.
void check(const CudaAttentionArgs& args);

void naive(const CudaAttentionArgs& args, Stream& stream);
const char* naive_refuses(const CudaAttentionArgs& args, const Card& card);

void split_kv(const CudaAttentionArgs& args, Stream& stream);
const char* split_kv_refuses(const CudaAttentionArgs& args, const Card& card);

void split_mma(const CudaAttentionArgs& args, Stream& stream);
void flash_mma(const CudaAttentionArgs& args, Stream& stream);
const char* mma_refuses(const CudaAttentionArgs& args, const Card& card);

void flash_wgmma(const CudaAttentionArgs& args, Stream& stream);
const char* wgmma_refuses(const CudaAttentionArgs& args, const Card& card);

}  // namespace xpyd::attention::cuda_kernels
