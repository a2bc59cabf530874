#include <algorithm>
#include <cmath>
#include <string>

#include "attention/cuda/attention_cuda_kernel.h"
#include "base/cuda/cuda_kernel.h"
#include "model/cuda/ops_cuda.h"

namespace xpyd::model {
namespace {

using cuda::Carver;
using cuda::Shape;
using cuda::Shared;

constexpr int kWarp = 32;
constexpr int kHeadWarps = 4;  // heads per block of rope_kernel
constexpr int kMaxPairs = 4;   // pairs of a head per lane: head_dim up to 256
constexpr int kSwigluBlock = 256;

__device__ inline float load(const float* p, size_t i) { return p[i]; }
__device__ inline float load(const bf16* p, size_t i) { return to_f32(p[i]); }
__device__ inline void store(float* p, size_t i, float x) { p[i] = x; }
__device__ inline void store(bf16* p, size_t i, float x) { p[i] = to_bf16(x); }

// W neighbouring elements, moved at once.
template <class T, int W>
struct alignas(sizeof(T) * W) Piece {
  T x[W];
};
template <int W, class T>
__device__ inline Piece<T, W> piece(const T* p, int at) {
  return *reinterpret_cast<const Piece<T, W>*>(p + at);
}
template <int W, class T>
__device__ inline Piece<T, W>& piece(T* p, int at) {
  return *reinterpret_cast<Piece<T, W>*>(p + at);
}
constexpr int kWide = 4;  // used if every row and its parts begin at multiples of this many elements; else 1

// Number of threads for one row, from its width only: about four elements each.
int row_threads(int width) { return std::clamp((width / 4 + kWarp - 1) / kWarp * kWarp, kWarp, 1024); }
size_t row_shared() { return cuda::shared_bytes<float>(kWarp); }

// Returns the sum over the block to every thread: lanes in a butterfly, then warps in ascending order.
__device__ inline float block_sum(float x, Shared<float> warps) {
  x = cuda::warp_sum(x);
  if (threadIdx.x % kWarp == 0) warps[int(threadIdx.x / kWarp)] = x;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < int(blockDim.x / kWarp); ++w) sum += warps[w];
  return sum;
}

__device__ inline float norm_scale(float squares, int n, float eps) { return 1.0f / sqrtf(squares / float(n) + eps); }

// out = x * scale * weight; each thread reads only elements of x that it wrote.
template <int W, class T>
__device__ inline void write_normed(const float* x, const float* weight, float scale, int width, T* out) {
  for (int j = int(threadIdx.x) * W; j < width; j += int(blockDim.x) * W) {
    const auto from = piece<W>(x, j), by = piece<W>(weight, j);
    Piece<T, W> to;
#pragma unroll
    for (int i = 0; i < W; ++i) store(to.x, size_t(i), from.x[i] * scale * by.x[i]);
    piece<W>(out, j) = to;
  }
}

template <class T, int W>
__global__ void embed_kernel(CudaEmbedArgs a) {
  Carver carver;
  Shared<float> warps = carver.take<float>(kWarp);
  const size_t row = blockIdx.x;
  const int width = a.table.k;
  int id = a.token_ids[row];
  if (id < 0) id = a.previous[-1 - id];
  const T* from = static_cast<const T*>(a.table.data) + size_t(id) * size_t(a.table.stride);
  float* x = a.x + row * size_t(width);
  float squares = 0;
  for (int j = int(threadIdx.x) * W; j < width; j += int(blockDim.x) * W) {
    const auto stored = piece<W>(from, j);
    Piece<float, W> to;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      to.x[i] = load(stored.x, size_t(i));
      squares += to.x[i] * to.x[i];
    }
    piece<W>(x, j) = to;
  }
  const float scale = norm_scale(block_sum(squares, warps), width, a.eps);
  write_normed<W>(x, a.norm, scale, width, static_cast<T*>(a.normed) + row * size_t(a.stride));
}

template <class T, int W>
__global__ void add_norm_kernel(CudaAddNormArgs a) {
  Carver carver;
  Shared<float> warps = carver.take<float>(kWarp);
  const size_t row = blockIdx.x;
  float* x = a.x + (a.rows ? size_t(a.rows[row]) : row) * size_t(a.width);
  const T* delta = static_cast<const T*>(a.delta) + row * size_t(a.stride);
  float squares = 0;
  for (int j = int(threadIdx.x) * W; j < a.width; j += int(blockDim.x) * W) {
    Piece<float, W> value = piece<W>(const_cast<const float*>(x), j);
    if (a.delta) {
      const auto add = piece<W>(delta, j);
#pragma unroll
      for (int i = 0; i < W; ++i) value.x[i] += load(add.x, size_t(i)) + (a.bias ? a.bias[j + i] : 0);
      piece<W>(x, j) = value;
    }
#pragma unroll
    for (int i = 0; i < W; ++i) squares += value.x[i] * value.x[i];
  }
  if (!a.norm) return;
  const float scale = norm_scale(block_sum(squares, warps), a.width, a.eps);
  write_normed<W>(x, a.norm, scale, a.width, static_cast<T*>(a.normed) + row * size_t(a.stride));
}

// One warp per head of a token; a lane holds pairs (j, j + half) of dimensions.
template <class T>
__global__ void rope_kernel(const __grid_constant__ CudaRopeArgs a) {
  const int lane = int(threadIdx.x) % kWarp, token = int(blockIdx.x);
  const int head = int(blockIdx.y) * kHeadWarps + int(threadIdx.x) / kWarp;
  const int d = a.layout.shape.head_dim, half = d / 2, n_kv = a.layout.shape.n_kv_heads;
  if (head >= a.n_heads + 2 * n_kv || token >= a.step.q_offsets[a.step.n_seqs]) return;
  const bool is_q = head < a.n_heads, is_v = head >= a.n_heads + n_kv;
  const T* x = static_cast<const T*>(a.qkv) + size_t(token) * size_t(a.stride) + size_t(head * d);
  const float* bias = a.bias ? a.bias + head * d : nullptr;
  const float* norm = is_q ? a.q_norm : is_v ? nullptr : a.k_norm;

  float low[kMaxPairs], high[kMaxPairs], squares = 0;
#pragma unroll
  for (int i = 0; i < kMaxPairs; ++i) {
    const int j = lane + i * kWarp;
    low[i] = high[i] = 0;
    if (j < half) {
      low[i] = load(x, size_t(j)) + (bias ? bias[j] : 0);
      high[i] = load(x, size_t(j + half)) + (bias ? bias[j + half] : 0);
    }
    squares += low[i] * low[i] + high[i] * high[i];
  }
  if (norm) {  // uniform over the lanes
    const float scale = norm_scale(cuda::warp_sum(squares), d, a.eps);
#pragma unroll
    for (int i = 0; i < kMaxPairs; ++i) {
      const int j = lane + i * kWarp;
      if (j >= half) continue;
      low[i] *= scale * norm[j];
      high[i] *= scale * norm[j + half];
    }
  }

  const int position = a.step.positions[token];
  T* q = static_cast<T*>(a.q) + (size_t(token) * size_t(a.n_heads) + size_t(head)) * size_t(d);
  std::byte* row = nullptr;
  if (!is_q) {
    const KvView view = attention::cuda_kernels::view_of(a.step, a.pool, a.layout, a.step.token_seqs[token]);
    row = view.row(a.layer, is_v, position, head - a.n_heads - (is_v ? n_kv : 0));
  }
#pragma unroll
  for (int i = 0; i < kMaxPairs; ++i) {
    const int j = lane + i * kWarp;
    if (j >= half) continue;
    float first = low[i], second = high[i];
    if (!is_v) {
      const RopeAngle angle = a.rope[size_t(position) * size_t(half) + size_t(j)];
      first = low[i] * angle.cos - high[i] * angle.sin;
      second = high[i] * angle.cos + low[i] * angle.sin;
    }
    if (is_q) {
      store(q, size_t(j), first);
      store(q, size_t(j + half), second);
    } else if (a.layout.shape.dtype == Dtype::f32) {
      store(reinterpret_cast<float*>(row), size_t(j), first);
      store(reinterpret_cast<float*>(row), size_t(j + half), second);
    } else {
      store(reinterpret_cast<bf16*>(row), size_t(j), first);
      store(reinterpret_cast<bf16*>(row), size_t(j + half), second);
    }
  }
}

template <class T, int W>
__global__ void swiglu_kernel(CudaSwigluArgs a) {
  const int j = int(blockIdx.y * blockDim.x + threadIdx.x) * W;
  if (j >= a.width) return;
  T* row = static_cast<T*>(a.gate_up) + size_t(blockIdx.x) * size_t(a.stride);
  Piece<T, W> gates = piece<W>(const_cast<const T*>(row), j);
  const auto ups = piece<W>(const_cast<const T*>(row), a.width + j);
#pragma unroll
  for (int i = 0; i < W; ++i) {
    float gate = load(gates.x, size_t(i)), up = load(ups.x, size_t(i));
    if (a.bias) {
      gate += a.bias[j + i];
      up += a.bias[a.width + j + i];
    }
    store(gates.x, size_t(i), gate / (1.0f + expf(-gate)) * up);
  }
  piece<W>(row, j) = gates;
}

template <class Word>
__global__ void gather_kernel(const void* from, const int32_t* rows, size_t words, void* to) {
  const Word* source = static_cast<const Word*>(from) + size_t(rows[blockIdx.x]) * words;
  Word* destination = static_cast<Word*>(to) + size_t(blockIdx.x) * words;
  for (size_t j = threadIdx.x; j < words; j += blockDim.x) destination[j] = source[j];
}

void check_dtype(Dtype dtype) { XPYD_CHECK(dtype == Dtype::f32 || dtype == Dtype::bf16, dtype_name(dtype)); }

}  // namespace

void cuda_embed(const CudaEmbedArgs& a, cuda::Stream& stream) {
  check_dtype(a.dtype);
  const Shape shape{dim3(unsigned(a.n)), dim3(unsigned(row_threads(a.table.k))), row_shared()};
  const bool wide = a.table.k % kWide == 0 && a.table.stride % kWide == 0 && a.stride % kWide == 0;
  auto* kernel = a.dtype == Dtype::f32 ? (wide ? embed_kernel<float, kWide> : embed_kernel<float, 1>)
                                       : (wide ? embed_kernel<bf16, kWide> : embed_kernel<bf16, 1>);
  cuda::launch(kernel, "embed", shape, stream, a);
}

void cuda_add_norm(const CudaAddNormArgs& a, cuda::Stream& stream) {
  check_dtype(a.dtype);
  XPYD_CHECK(!(a.rows && a.delta));
  if (a.n == 0) return;
  const Shape shape{dim3(unsigned(a.n)), dim3(unsigned(row_threads(a.width))), row_shared()};
  const bool wide = a.width % kWide == 0 && a.stride % kWide == 0;
  auto* kernel = a.dtype == Dtype::f32 ? (wide ? add_norm_kernel<float, kWide> : add_norm_kernel<float, 1>)
                                       : (wide ? add_norm_kernel<bf16, kWide> : add_norm_kernel<bf16, 1>);
  cuda::launch(kernel, "add_norm", shape, stream, a);
}

void cuda_rope_append(const CudaRopeArgs& a, cuda::Stream& stream) {
  const KvShape& kv = a.layout.shape;
  check_dtype(a.dtype);
  check_dtype(kv.dtype);
  XPYD_CHECK(kv.head_dim % 2 == 0 && kv.head_dim <= 2 * kMaxPairs * kWarp, std::to_string(kv.head_dim));
  const int heads = a.n_heads + 2 * kv.n_kv_heads;
  const Shape shape{dim3(unsigned(a.step.n_tokens), unsigned((heads + kHeadWarps - 1) / kHeadWarps)),
                    dim3(kHeadWarps * kWarp)};
  cuda::launch(a.dtype == Dtype::f32 ? rope_kernel<float> : rope_kernel<bf16>, "rope_append", shape, stream, a);
}

void cuda_swiglu(const CudaSwigluArgs& a, cuda::Stream& stream) {
  check_dtype(a.dtype);
  if (a.n == 0) return;
  const bool wide = a.width % kWide == 0 && a.stride % kWide == 0;
  const int threads = (a.width + (wide ? kWide : 1) - 1) / (wide ? kWide : 1);
  const Shape shape{dim3(unsigned(a.n), unsigned((threads + kSwigluBlock - 1) / kSwigluBlock)), dim3(kSwigluBlock)};
  auto* kernel = a.dtype == Dtype::f32 ? (wide ? swiglu_kernel<float, kWide> : swiglu_kernel<float, 1>)
                                       : (wide ? swiglu_kernel<bf16, kWide> : swiglu_kernel<bf16, 1>);
  cuda::launch(kernel, "swiglu", shape, stream, a);
}

void cuda_gather_rows(const void* from, const int32_t* rows, int n, size_t bytes, void* to, cuda::Stream& stream) {
  XPYD_CHECK(bytes % 2 == 0, std::to_string(bytes));
  if (n == 0) return;
  const bool wide = bytes % 16 == 0;
  const size_t words = bytes / (wide ? 16 : 2);
  const Shape shape{dim3(unsigned(n)), dim3(unsigned(row_threads(int(4 * std::min<size_t>(words, 256)))))};
  cuda::launch(wide ? gather_kernel<uint4> : gather_kernel<uint16_t>, "gather_rows", shape, stream, from, rows, words,
               to);
}

}  // namespace xpyd::model
