// Tensor-core code that flash_mma and split_mma share: copies of KV rows into swizzled shared memory, then scores,
// online softmax and values on the fragments of mma.m16n8k16. In each 16 x 8 block of scores or of the accumulator,
// lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and + 1 (PTX ISA).
#pragma once

#include "attention/cuda/attention_cuda_kernel.h"

namespace xpyd::attention::cuda_kernels {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kWarpTokens = kTileTokens / kWarps;  // tokens of a tile that one warp loads: 16

// Element index of 16-byte piece `piece` of row `row` in an array of rows of kDim bf16. The eight rows of one ldmatrix
// access lie in eight different groups of four banks, and so do the pieces of one row.
template <int kDim>
XPYD_HD constexpr int swizzled(int row, int piece) {
  return row * kDim + (piece ^ (row & 7)) * 8;
}
// The index of (row, 2k + piece % 2) if i is that of (row, piece % 2). It costs at most one instruction; keeping all
// indices of a loop over k in registers would spill.
XPYD_HD constexpr int in_step(int i, int k) { return i ^ (16 * k); }

// The rows of the warp's tokens [first, first + 16): lane l gets the row of token first + l % 16, of K (l < 16) or of
// V, counted from the start of the pool. A token outside `readable` gets kNoRow, and its block-table entry is not read.
constexpr uint32_t kNoRow = 0xffffffffu;
__device__ inline uint32_t find_rows(const KvRows& kv, const int32_t* table, int kv_head, int first, Tokens readable,
                                     int lane) {
  int token = first + lane % kWarpTokens;
  if (token < readable.begin || token >= readable.end) return kNoRow;
  return kv.row(table, lane / kWarpTokens, token, kv_head);
}

// Two tiles of K and V in shared memory: one is read while the next one's copy is in flight. load() starts the copy of
// a warp's 16 tokens of a tile, whose rows find_rows() gave, and zeros where there is no row. `keys` and `values` then
// hold the tile from row at() on: for the lanes of this warp after a __syncwarp, for the other warps after a barrier.
template <int kDim>
struct Tiles {
  Shared<bf16> keys, values;
  static constexpr size_t bytes() { return 2 * shared_bytes<bf16>(2 * kTileTokens * kDim); }
  __device__ explicit Tiles(Carver& carver)
      : keys(carver.take<bf16>(2 * kTileTokens * kDim)), values(carver.take<bf16>(2 * kTileTokens * kDim)) {}
  __device__ int at(int tile) const { return tile % 2 * kTileTokens; }
  __device__ void load(int tile, const std::byte* pool, uint32_t rows, int warp, int lane) const {
    copy(keys, at(tile) + warp * kWarpTokens, pool, 0, rows, lane);
    copy(values, at(tile) + warp * kWarpTokens, pool, 1, rows, lane);
  }

 private:
  __device__ static void copy(const Shared<bf16>& to, int at, const std::byte* pool, int kv, uint32_t rows, int lane) {
    constexpr int kPieces = kDim / 8, kAtOnce = 32 / kPieces;
    for (int i = 0; i < kWarpTokens / kAtOnce; ++i) {
      int r = i * kAtOnce + lane / kPieces, piece = lane % kPieces;
      uint32_t row = __shfl_sync(0xffffffffu, rows, kv * kWarpTokens + r);
      bool valid = row != kNoRow;
      const std::byte* from = pool + size_t(valid ? row : 0) * (2 * kDim) + piece * 16;
      cp_async_16(to, swizzled<kDim>(at + r, piece), from, valid);
    }
  }
};

// s[i][n] += q_i k_n: a 16 x 8 block of dot products of the 16 query rows of `a`, for one 16-wide step `k` of head_dim,
// with tokens [8n, 8n + 8) after row `at` of `keys`.
template <int kDim, int kRowTiles, int kTokens>
__device__ inline void add_scores(float (&s)[kRowTiles][kTokens / 8][4], const uint32_t (&a)[kRowTiles][4], int k,
                                  const Shared<bf16>& keys, int at, int lane) {
  for (int n = 0; n < kTokens / 16; ++n) {
    uint32_t b[4];  // of tokens 0..7 dims 0..7 and 8..15, then the same of tokens 8..15
    ldmatrix_x4(b, keys, swizzled<kDim>(at + 16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
    for (int i = 0; i < kRowTiles; ++i) {
      mma_m16n8k16(s[i][2 * n], a[i], b[0], b[1]);
      mma_m16n8k16(s[i][2 * n + 1], a[i], b[2], b[3]);
    }
  }
}

// Calls f<head_dim>() for these arguments' KV. Requires that mma_refuses() returns null.
template <class F>
void for_dim(const CudaAttentionArgs& args, F&& f) {
  XPYD_CHECK(args.layout.shape.dtype == Dtype::bf16);
  const int dim = args.layout.shape.head_dim;
  XPYD_CHECK(dim == 64 || dim == 128);
  dim == 64 ? f.template operator()<64>() : f.template operator()<128>();
}

// Online softmax of the rows of which a lane holds parts.
template <int kDim, int kRowTiles>
struct Rows {
  float max[kRowTiles][2];  // over dot products, not scaled
  float sum[kRowTiles][2];  // over this lane's columns
  float acc[kRowTiles][kDim / 8][4];

  __device__ void clear() {
    for (int i = 0; i < kRowTiles; ++i) {
      for (int half = 0; half < 2; ++half) max[i][half] = kNone, sum[i][half] = 0;
      for (auto& block : acc[i])
        for (float& x : block) x = 0;
    }
  }

  // Turns scores into weights, 2^(scale (s - maximum)), and rescales earlier sums to the new maximum. A row that sees
  // none of these tokens (all scores -inf) keeps its bits: its factor is exactly 1, or 0 over zeros. Roundings are
  // explicit, so that every instance of this code gives the same bits.
  template <int kTokens>
  __device__ void weigh(float (&s)[kRowTiles][kTokens / 8][4], float scale) {
    for (int i = 0; i < kRowTiles; ++i) {
      float keep[2];
      for (int half = 0; half < 2; ++half) {
        float top = max[i][half];
        for (int n = 0; n < kTokens / 8; ++n) top = fmaxf(top, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        float base = top == kNone ? 0 : __fmul_rn(top, scale), added = 0;
        keep[half] = exp2_approx(__fmul_rn(max[i][half], scale) - base);
        max[i][half] = top;
        for (int n = 0; n < kTokens / 8; ++n)
          for (int c = 2 * half; c < 2 * half + 2; ++c) {
            s[i][n][c] = exp2_approx(__fmaf_rn(s[i][n][c], scale, -base));
            added += s[i][n][c];
          }
        sum[i][half] = __fmaf_rn(sum[i][half], keep[half], added);
      }
      // After the first tiles the maximum seldom changes; then nothing is rescaled.
      if (__any_sync(0xffffffffu, keep[0] != 1 || keep[1] != 1))
        for (auto& block : acc[i])
          for (int c = 0; c < 4; ++c) block[c] *= keep[c / 2];
    }
  }

  // acc += weights V, with weights rounded to bf16; tokens are the rows after `at` of `values`.
  template <int kTokens>
  __device__ void add_values(const float (&s)[kRowTiles][kTokens / 8][4], const Shared<bf16>& values, int at,
                             int lane) {
    int from = swizzled<kDim>(at + lane % 16, lane / 16);
    for (int k = 0; k < kTokens / 16; ++k) {
      uint32_t p[kRowTiles][4];
      for (int i = 0; i < kRowTiles; ++i)
        for (int j = 0; j < 4; ++j) {
          const float(&block)[4] = s[i][2 * k + j / 2];
          p[i][j] = pack_bf16(block[j % 2 * 2], block[j % 2 * 2 + 1]);
        }
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];  // of dims 0..7 tokens 0..7 and 8..15, then the same of dims 8..15
        ldmatrix_x4_trans(b, values, in_step(from, n) + 16 * k * kDim);
        for (int i = 0; i < kRowTiles; ++i) {
          mma_m16n8k16(acc[i][2 * n], p[i], b[0], b[1]);
          mma_m16n8k16(acc[i][2 * n + 1], p[i], b[2], b[3]);
        }
      }
    }
  }

  // The sum of weights over all columns, in all four lanes of a row.
  __device__ float total(int i, int half) const {
    float x = sum[i][half];
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }
};

}  // namespace xpyd::attention::cuda_kernels
