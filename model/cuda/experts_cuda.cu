// Five kernels: two products, the choice, the grouping and the weighted sum. SwiGLU is that of dense layers.
//
// Both products find their rows in begins_. A block of threads belongs to one expert. It walks over this expert's rows
// tile by tile, so the launch depends on the number of tokens only, and an expert without a row is not read.
#include <algorithm>
#include <string>
#include <type_traits>

#include "base/cuda/cuda_kernel.h"
#include "model/cuda/experts_cuda.h"
#include "model/cuda/ops_cuda.h"

namespace xpyd::model {
namespace {

using cuda::Carver;
using cuda::Shape;
using cuda::Shared;

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

__device__ inline float load(const float* p, size_t i) { return p[i]; }
__device__ inline float load(const bf16* p, size_t i) { return to_f32(p[i]); }

// y[r] = W_e x[tokens[r]] for every row r of every expert e.
struct ExpertProduct {
  const void* x = nullptr;          // row stride x_stride
  void* y = nullptr;                // row stride y_stride
  CudaMatrix w;                     // the experts' matrices, stacked
  const int32_t* begins = nullptr;  // [count + 1] first row of each expert; null: one expert has all n_rows
  const int32_t* tokens = nullptr;  // [n_rows]; null: row r of y is made from row r of x
  int count = 1, n_rows = 0, x_stride = 0, y_stride = 0;

  __device__ int outputs() const { return w.n / count; }
  __device__ int begin(int expert) const { return begins ? begins[expert] : 0; }
  __device__ int end(int expert) const { return begins ? begins[expert + 1] : n_rows; }
  template <class T>
  __device__ const T* from(int row) const {
    return static_cast<const T*>(x) + size_t(tokens ? tokens[row] : row) * size_t(x_stride);
  }
  template <class T>
  __device__ const T* weights(int expert, int output) const {
    return static_cast<const T*>(w.data) + (size_t(expert) * size_t(outputs()) + size_t(output)) * size_t(w.stride);
  }
};

// --- The product in f32: of the router, and of experts in f32. A warp has one output and kDotRows rows. A lane adds
// every 32nd input in ascending order; then the lanes are added.
constexpr int kDotRows = 8, kDotWarps = 8;

template <class T>
__global__ void dot_kernel(ExpertProduct a) {
  const int lane = int(threadIdx.x) % kWarp, expert = int(blockIdx.z);
  const int output = int(blockIdx.y) * kDotWarps + int(threadIdx.x) / kWarp;
  if (output >= a.outputs()) return;
  const float* w = a.weights<float>(expert, output);
  const int begin = a.begin(expert), end = a.end(expert);
  for (int first = begin + int(blockIdx.x) * kDotRows; first < end; first += int(gridDim.x) * kDotRows) {
    const T* from[kDotRows];
    float sums[kDotRows] = {};
#pragma unroll
    for (int i = 0; i < kDotRows; ++i) from[i] = a.from<T>(min(first + i, end - 1));
    for (int k = lane; k < a.w.k; k += kWarp)
#pragma unroll
      for (int i = 0; i < kDotRows; ++i) sums[i] += load(from[i], size_t(k)) * w[k];
#pragma unroll
    for (int i = 0; i < kDotRows; ++i) {
      const float sum = cuda::warp_sum(sums[i]);
      if (lane == 0 && first + i < end)
        static_cast<float*>(a.y)[size_t(first + i) * size_t(a.y_stride) + size_t(output)] = sum;
    }
  }
}

// --- The product of experts in bf16. A block computes tiles of kTileRows rows and as many outputs; a warp has 64 x 32
// of a tile. The next kDepth inputs arrive while the tensor cores multiply. An output is one chain of mma over the
// inputs, 16 at a time.
constexpr int kTileRows = 128, kDepth = 64, kStages = 2, kMmaThreads = 256;
constexpr int kPitch = kDepth + 8;  // the eight rows of an ldmatrix are in different banks
constexpr int kStage = kTileRows * kPitch;
constexpr int kPiece = 8;                                           // bf16 of one cp.async
constexpr int kCopies = kTileRows * kDepth / kPiece / kMmaThreads;  // of one thread, for one operand
constexpr int kCopyRows = kMmaThreads * kPiece / kDepth;            // rows between two of them

// One operand's rows for this thread's copies.
struct TileRows {
  const bf16* from[kCopies];
  int n;  // rows of the tile that exist

  // Starts the copy of inputs [k, k + kDepth) of every row; inputs from `width` on, and missing rows, arrive as zeros.
  __device__ void load(const Shared<bf16>& to, int stage, int k, int width) const {
    const int piece = int(threadIdx.x) % (kDepth / kPiece) * kPiece, row = int(threadIdx.x) / (kDepth / kPiece);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool exists = row + i * kCopyRows < n && k + piece < width;
      cuda::cp_async_16(to, stage * kStage + (row + i * kCopyRows) * kPitch + piece, from[i] + (exists ? k + piece : 0),
                        exists);
    }
  }
};

__global__ void __launch_bounds__(kMmaThreads, 2) mma_kernel(ExpertProduct a) {
  Carver carver;
  const Shared<bf16> x_tile = carver.take<bf16>(kStages * kStage), w_tile = carver.take<bf16>(kStages * kStage);
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, expert = int(blockIdx.z);
  const int warp_row = warp / 4 * 64, warp_output = warp % 4 * 32, copy_row = int(threadIdx.x) / (kDepth / kPiece);
  const int first_output = int(blockIdx.y) * kTileRows, end_output = a.outputs();
  const int begin = a.begin(expert), end = a.end(expert), width = a.w.stride;
  TileRows w{{}, min(kTileRows, end_output - first_output)};
#pragma unroll
  for (int i = 0; i < kCopies; ++i)
    w.from[i] = a.weights<bf16>(expert, min(first_output + copy_row + i * kCopyRows, end_output - 1));

  for (int first = begin + int(blockIdx.x) * kTileRows; first < end; first += int(gridDim.x) * kTileRows) {
    TileRows x{{}, min(kTileRows, end - first)};
#pragma unroll
    for (int i = 0; i < kCopies; ++i) x.from[i] = a.from<bf16>(min(first + copy_row + i * kCopyRows, end - 1));
    float sums[4][4][4] = {};  // 16 rows, 8 outputs, the lane's elements
    __syncthreads();           // no warp reads the tile before
    x.load(x_tile, 0, 0, width), w.load(w_tile, 0, 0, width);
    cuda::cp_async_commit();
    for (int k = 0, stage = 0; k < width; k += kDepth, stage ^= 1) {
      cuda::cp_async_wait<0>();
      __syncthreads();  // these inputs have arrived, and no warp reads those before
      if (k + kDepth < width)
        x.load(x_tile, stage ^ 1, k + kDepth, width), w.load(w_tile, stage ^ 1, k + kDepth, width);
      cuda::cp_async_commit();
#pragma unroll
      for (int step = 0; step < kDepth; step += 16) {
        uint32_t b[2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j)
          cuda::ldmatrix_x4(
              b[j], w_tile,
              stage * kStage + (warp_output + 16 * j + lane / 16 * 8 + lane % 8) * kPitch + step + lane / 8 % 2 * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (warp_row + 16 * i >= x.n) continue;
          uint32_t rows[4];
          cuda::ldmatrix_x4(rows, x_tile,
                            stage * kStage + (warp_row + 16 * i + lane % 16) * kPitch + step + lane / 16 * 8);
#pragma unroll
          for (int j = 0; j < 4; ++j)
            cuda::mma_m16n8k16(sums[i][j], rows, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + 16 * i + 8 * half + lane / 4;
        if (row >= x.n) continue;
        bf16* y = static_cast<bf16*>(a.y) + size_t(first + row) * size_t(a.y_stride);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int output = first_output + warp_output + 8 * j + 2 * (lane % 4);
          if (output < end_output)  // of an odd number of outputs the last one's neighbour is padding
            *reinterpret_cast<uint32_t*>(y + output) = cuda::pack_bf16(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
        }
      }
  }
}

// --- The choice. One warp per token.
constexpr int kChooseWarps = 4;

// Orders a token's experts: higher scores first, of equal scores the lower id, NaN last. No two keys are equal.
using ChoiceKey = unsigned long long;
__device__ inline ChoiceKey choice_key(float score, int expert) {
  const uint32_t key = score == score ? cuda::order_key(score) : 0;
  return ChoiceKey(key) << 32 | (0xffffffffu - uint32_t(expert));
}
// The number of lower lanes that voted.
__device__ inline int votes_before(unsigned votes, int lane) { return __popc(votes & ((1u << lane) - 1)); }

__global__ void choose_kernel(const float* scores, int n, int count, int used, bool renormalise, int32_t* chosen,
                              float* weights) {
  const int lane = int(threadIdx.x) % kWarp, token = int(blockIdx.x) * kChooseWarps + int(threadIdx.x) / kWarp;
  if (token >= n) return;
  const float* row = scores + size_t(token) * size_t(count);
  ChoiceKey least = ~ChoiceKey{0};  // of the experts chosen so far
  float peak = 0;
  for (int j = 0; j < used; ++j) {
    ChoiceKey best = 0;
    for (int e = lane; e < count; e += kWarp) {
      const ChoiceKey key = choice_key(row[e], e);
      if (best < key && key < least) best = key;
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const ChoiceKey other = __shfl_xor_sync(kAll, best, step);
      if (best < other) best = other;
    }
    least = best;
    if (j == 0) peak = row[0xffffffffu - uint32_t(best)];
  }
  float sum = 0;  // a score that is NaN makes all weights NaN
  for (int e = lane; e < count; e += kWarp)
    if (!renormalise || choice_key(row[e], e) >= least || row[e] != row[e]) sum += expf(row[e] - peak);
  sum = cuda::warp_sum(sum);
  int at = token * used;
  for (int first = 0; first < count; first += kWarp) {
    const int e = first + lane;
    const bool mine = e < count && choice_key(row[e], e) >= least;
    const unsigned votes = __ballot_sync(kAll, mine);
    if (mine) {
      chosen[at + votes_before(votes, lane)] = e;
      weights[at + votes_before(votes, lane)] = expf(row[e] - peak) / sum;
    }
    at += __popc(votes);
  }
}

// --- The grouping. One block per expert. A warp reads one part of `chosen` twice: it counts the places of lower
// experts and of its own, then it gives its own their rows.
constexpr int kGroupWarps = 16;

__global__ void group_kernel(const int32_t* chosen, int n_rows, int used, int32_t* begins, int32_t* tokens,
                             int32_t* rows) {
  Carver carver;
  Shared<int> lower = carver.take<int>(kGroupWarps), own = carver.take<int>(kGroupWarps);
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, expert = int(blockIdx.x);
  const int size = (n_rows + kGroupWarps - 1) / kGroupWarps;
  const int begin = min(warp * size, n_rows), end = min(begin + size, n_rows);
  int n_lower = 0, n_own = 0;
  for (int i = begin + lane; i < end; i += kWarp) n_lower += chosen[i] < expert, n_own += chosen[i] == expert;
  n_lower = cuda::warp_sum(n_lower), n_own = cuda::warp_sum(n_own);
  if (lane == 0) lower[warp] = n_lower, own[warp] = n_own;
  __syncthreads();
  int at = 0;
  for (int w = 0; w < kGroupWarps; ++w) {
    at += lower[w];
    if (w < warp) at += own[w];
  }
  if (threadIdx.x == 0) {
    begins[expert] = at;
    if (blockIdx.x + 1 == gridDim.x) begins[expert + 1] = n_rows;
  }
  for (int first = begin; first < end; first += kWarp) {
    const int i = first + lane;
    const bool mine = i < end && chosen[i] == expert;
    const unsigned votes = __ballot_sync(kAll, mine);
    if (mine) {
      const int row = at + votes_before(votes, lane);
      tokens[row] = i / used;
      rows[i] = row;
    }
    at += __popc(votes);
  }
}

// --- The weighted sum. One block per token.
constexpr int kCombineThreads = 256;

template <class T>
__global__ void combine_kernel(const T* out, int stride, const int32_t* rows, const float* weights, int used, int width,
                               float* x) {
  const size_t first = size_t(blockIdx.x) * size_t(used);
  for (int i = int(threadIdx.x); i < width; i += kCombineThreads) {
    float sum = 0;
    for (int j = 0; j < used; ++j)
      sum += weights[first + size_t(j)] * load(out, size_t(rows[first + size_t(j)]) * size_t(stride) + size_t(i));
    x[size_t(blockIdx.x) * size_t(width) + size_t(i)] += sum;
  }
}

int strided(int width) { return (width + 7) / 8 * 8; }  // rows begin at 16 bytes
unsigned pieces(int n, int size) { return unsigned((n + size - 1) / size); }

// Blocks of a launch: along x as many as an expert has tiles if all have equally many rows; one that has more loops.
dim3 blocks(const ExpertProduct& a, int tile_rows, int tile_outputs) {
  return dim3(pieces(a.n_rows, a.count * tile_rows), pieces(a.w.n / a.count, tile_outputs), unsigned(a.count));
}

// T: the type of x. y is of the weights' dtype.
template <class T>
void multiply(const ExpertProduct& a, Dtype weights, cuda::Stream& stream) {
  if (weights == Dtype::f32) {
    const Shape shape{blocks(a, kDotRows, kDotWarps), dim3(kDotWarps * kWarp)};
    cuda::launch(dot_kernel<T>, "expert_dot", shape, stream, a);
  } else {
    const Shape shape{blocks(a, kTileRows, kTileRows), dim3(kMmaThreads),
                      2 * cuda::shared_bytes<bf16>(kStages * kStage)};
    cuda::launch(mma_kernel, "expert_mma", shape, stream, a);
  }
}

}  // namespace

size_t CudaExperts::place(std::byte* base) {
  const Experts& e = c_.experts;
  if (e.count == 0) return 0;
  const size_t tokens = size_t(max_tokens_), rows = tokens * size_t(e.used), element = dtype_bytes(dtype_);
  size_t taken = 0;
  auto part = [&](auto*& to, size_t bytes) {
    if (base) to = reinterpret_cast<std::decay_t<decltype(to)>>(base + taken);
    taken += (bytes + 255) / 256 * 256;
  };
  part(scores_, tokens * size_t(e.count) * sizeof(float));
  part(chosen_, rows * sizeof(int32_t));
  part(weights_, rows * sizeof(float));
  part(rows_, rows * sizeof(int32_t));
  part(begins_, size_t(e.count + 1) * sizeof(int32_t));
  part(tokens_, rows * sizeof(int32_t));
  part(gate_up_, rows * size_t(strided(2 * e.intermediate)) * element);
  part(out_, rows * size_t(strided(c_.hidden)) * element);
  return taken;
}

void CudaExperts::run(const CudaLayerWeights& layer, const void* normed, int stride, float* x, int n,
                      cuda::Stream& stream) const {
  const Experts& e = c_.experts;
  const int n_rows = n * e.used, gated_stride = strided(2 * e.intermediate), out_stride = strided(c_.hidden);
  const auto product = dtype_ == Dtype::f32 ? multiply<float> : multiply<bf16>;
  product({.x = normed, .y = scores_, .w = layer.router, .n_rows = n, .x_stride = stride, .y_stride = e.count},
          Dtype::f32, stream);
  cuda::launch(choose_kernel, "expert_choose", Shape{dim3(pieces(n, kChooseWarps)), dim3(kChooseWarps * kWarp)}, stream,
               scores_, n, e.count, e.used, e.renormalise, chosen_, weights_);
  cuda::launch(group_kernel, "expert_group",
               Shape{dim3(unsigned(e.count)), dim3(kGroupWarps * kWarp), 2 * cuda::shared_bytes<int>(kGroupWarps)},
               stream, chosen_, n_rows, e.used, begins_, tokens_, rows_);
  ExpertProduct rows{.begins = begins_, .count = e.count, .n_rows = n_rows};
  rows.x = normed, rows.x_stride = stride, rows.tokens = tokens_;
  rows.w = layer.gate_up, rows.y = gate_up_, rows.y_stride = gated_stride;
  product(rows, dtype_, stream);
  cuda_swiglu({.gate_up = gate_up_, .dtype = dtype_, .n = n_rows, .width = e.intermediate, .stride = gated_stride},
              stream);
  rows.x = gate_up_, rows.x_stride = gated_stride, rows.tokens = nullptr;
  rows.w = layer.down, rows.y = out_, rows.y_stride = out_stride;
  product(rows, dtype_, stream);
  auto sum = [&](auto* kernel, auto* out) {
    cuda::launch(kernel, "expert_combine", Shape{dim3(unsigned(n)), dim3(kCombineThreads)}, stream, out, out_stride,
                 rows_, weights_, e.used, c_.hidden, x);
  };
  if (dtype_ == Dtype::f32)
    sum(combine_kernel<float>, reinterpret_cast<const float*>(out_));
  else
    sum(combine_kernel<bf16>, reinterpret_cast<const bf16*>(out_));
}

}  // namespace xpyd::model
