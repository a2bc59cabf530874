// Device code that the kernels of attention_cuda.h share: who sees what, where rows are, how states merge.
#pragma once

#include <limits>

#include "attention/cuda/attention_cuda.h"
#include "attention/kv_dtype/kv_row.h"
#include "base/cuda/cuda_kernel.h"

namespace xpyd::attention::cuda_kernels {

using namespace xpyd::cuda;

// Cut from position 0 of the sequence, never from the end or from a batch's shape: a query's bits
// depend on nothing but its own prefix.
constexpr int kTileTokens = 64;                 // of KV that one online-softmax step takes (tensor-core kernels)
constexpr int kSplitTokens = kCudaSplitTokens;  // a multiple of tiles

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNone = -std::numeric_limits<float>::infinity();  // the maximum of no scores

constexpr int divide_up(int n, int by) { return (n + by - 1) / by; }

struct Tokens {
  int begin, end;
};

// The tokens that a query at `position` sees.
__device__ inline Tokens visible(int position, int sliding_window) {
  return {sliding_window > 0 && position >= sliding_window ? position - sliding_window + 1 : 0, position + 1};
}

// `layout` outlives the view: it is the kernel's parameter.
__device__ inline KvView view_of(const CudaStep& step, std::byte* pool, const KvLayout& layout, int seq) {
  const int32_t* table = step.block_tables + step.table_begins[seq];
  if (step.contiguous) return KvView{pool, &layout, nullptr, table[0]};
  return KvView{pool, &layout, table, 0};
}

// The blocks of a sequence, as KvRows reads them.
__device__ inline const int32_t* table_of(const CudaStep& step, int seq) {
  return step.block_tables + step.table_begins[seq];
}
// Of layers in one piece each counts its own rows, as if it were the first: 32 bits are those of
// one layer's. at_rows(): for kernels that read by them, with the pool from where they are counted.
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

// How the kernels' templates call the element types of quantised rows.
template <int kBits>
struct Codes {};
template <class T>
constexpr int kCodeBits = 0;
template <int kBits>
constexpr int kCodeBits<Codes<kBits>> = kBits;

// Calls f<T>() for the elements of these arguments' KV, as the kernels' templates name them.
template <class F>
auto for_elements(const CudaAttentionArgs& args, F&& f) {
  switch (args.layout.shape.dtype) {
    case Dtype::f32: return f.template operator()<float>();
    case Dtype::int8: return f.template operator()<Codes<8>>();
    case Dtype::int4: return f.template operator()<Codes<4>>();
    default: return f.template operator()<bf16>();
  }
}

// The elements of one row of KV, of any dtype.
template <class T>
struct RowValues {
  const T* x;
  __device__ RowValues(const std::byte* row, int) : x(reinterpret_cast<const T*>(row)) {}
  __device__ float operator[](int d) const { return to_float(x[d]); }
};
template <int kBits>
struct RowValues<Codes<kBits>> {
  const std::byte* row;
  KvScale scale;
  __device__ RowValues(const std::byte* from, int head_dim) : row(from), scale(kv_scale(from + head_dim * kBits / 8)) {}
  __device__ float operator[](int d) const {
    return scale.value(kv_code(kBits == 8 ? Dtype::int8 : Dtype::int4, row, d));
  }
};

// Element i of an array of f32 or bf16.
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

// Partial results, in the workspace: [i of step.splits][head] of (accumulator[head_dim], maximum,
// sum), scores in units of log2. A sequence whose visible tokens lie in one split has none.
__host__ __device__ inline size_t partial_floats(int head_dim) { return size_t(divide_up(head_dim, 4) * 4 + 4); }
__device__ inline float* partial(const CudaAttentionArgs& args, int i, int head) {
  size_t row = size_t(i) * size_t(args.n_heads) + size_t(head);
  return args.workspace + row * partial_floats(args.layout.shape.head_dim);
}

// What a block of a split kernel computes: the part of one sequence's visible tokens that lies in one split.
struct SplitWork {
  int seq, split;
  int q_token;    // row of q and out
  Tokens tokens;  // empty: nothing to do
  bool alone;     // all visible tokens are here: write out, not a partial
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

// Folds the partial results of each sequence, splits in ascending order, and writes out.
void merge_splits(const CudaAttentionArgs& args, Stream& stream);

// The rows of cuda_attention_variants(), as their files define them.
void check(const CudaAttentionArgs& args);  // what every launcher requires

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
