// Tensor-core pieces that flash_mma and split_mma share: rows of KV into swizzled shared memory,
// scores, online softmax and values on the fragments of mma.m16n8k16 (PTX ISA: lane l holds rows l
// / 4 and l / 4 + 8, columns 2 (l % 4) and + 1, of each 16 x 8 block of scores or of the
// accumulator).
#pragma once

#include "attention/attention_cuda_kernel.h"

namespace xpyd::cuda::attention {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kWarpTokens = kTileTokens / kWarps;  // of a tile, that one warp loads: 16

// Element index of 16-byte piece `piece` of row `row` in an array of rows of kDim bf16. The eight
// rows of one ldmatrix access lie in eight different groups of four banks, and so do the pieces of
// one row.
template <int kDim>
XPYD_HD constexpr int swizzled(int row, int piece) {
  return row * kDim + (piece ^ (row & 7)) * 8;
}
// Index of (row, 2k + piece % 2) when i is that of (row, piece % 2): no more than one instruction,
// where all indices of a loop over k, kept in registers, would make it spill.
XPYD_HD constexpr int in_step(int i, int k) { return i ^ (16 * k); }

// Where the warp's tokens [first, first + 16) are: lane l % 16 has that token's row of K (l < 16)
// or V, counted in rows from the start of the pool. A token outside `readable` has none, and its
// table is not read either.
constexpr uint32_t kNoRow = 0xffffffffu;
__device__ inline uint32_t find_rows(const KvRows& kv, const int32_t* table, int kv_head, int first,
                                     Tokens readable, int lane) {
  int token = first + lane % kWarpTokens;
  if (token < readable.begin || token >= readable.end) return kNoRow;
  return kv.row(table, lane / kWarpTokens, token, kv_head);
}

// Starts the copy of those rows of K (kv = 0) or V to rows [at, at + 16) of `to`; zeros where there
// is no row.
template <int kDim>
__device__ inline void load_rows(const Shared<bf16>& to, int at, const std::byte* pool, int kv,
                                 uint32_t rows, int lane) {
  constexpr int kPieces = kDim / 8, kAtOnce = 32 / kPieces;
  for (int i = 0; i < kWarpTokens / kAtOnce; ++i) {
    int r = i * kAtOnce + lane / kPieces, piece = lane % kPieces;
    uint32_t row = __shfl_sync(0xffffffffu, rows, kv * kWarpTokens + r);
    bool valid = row != kNoRow;
    const std::byte* from = pool + size_t(valid ? row : 0) * (2 * kDim) + piece * 16;
    cp_async_16(to, swizzled<kDim>(at + r, piece), from, valid);
  }
}

// s[i][n] += q_i k_n: a 16 x 8 block of dot products of the 16 query rows of `a` (one 16-wide step
// `k` of head_dim) with tokens [8n, 8n + 8) after row `at` of `keys`.
template <int kDim, int kRowTiles, int kTokens>
__device__ inline void add_scores(float (&s)[kRowTiles][kTokens / 8][4],
                                  const uint32_t (&a)[kRowTiles][4], int k,
                                  const Shared<bf16>& keys, int at, int lane) {
  for (int n = 0; n < kTokens / 16; ++n) {
    uint32_t b[4];  // tokens 0..7: dims 0..7, 8..15; tokens 8..15: the same
    ldmatrix_x4(b, keys,
                swizzled<kDim>(at + 16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
    for (int i = 0; i < kRowTiles; ++i) {
      mma_m16n8k16(s[i][2 * n], a[i], b[0], b[1]);
      mma_m16n8k16(s[i][2 * n + 1], a[i], b[2], b[3]);
    }
  }
}

// Online softmax of the rows that a lane holds parts of.
template <int kDim, int kRowTiles>
struct Rows {
  float max[kRowTiles][2];  // of dot products, not scaled
  float sum[kRowTiles][2];  // over this lane's columns
  float acc[kRowTiles][kDim / 8][4];

  __device__ void clear() {
    for (int i = 0; i < kRowTiles; ++i) {
      for (int half = 0; half < 2; ++half) max[i][half] = kNone, sum[i][half] = 0;
      for (auto& block : acc[i])
        for (float& x : block) x = 0;
    }
  }

  // Scores become weights, 2^(scale (s - maximum)); what was summed before is brought to the new
  // maximum. A row that sees none of these tokens (all scores -inf) keeps its bits: its factor is
  // exactly 1, or 0 over zeros. Rounding is spelled out, so that every instance of this code gives
  // the same bits.
  template <int kTokens>
  __device__ void weigh(float (&s)[kRowTiles][kTokens / 8][4], float scale) {
    for (int i = 0; i < kRowTiles; ++i) {
      float keep[2];
      for (int half = 0; half < 2; ++half) {
        float top = max[i][half];
        for (int n = 0; n < kTokens / 8; ++n)
          top = fmaxf(top, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
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
      // A maximum is seldom new after the first tiles; then nothing changes.
      if (__any_sync(0xffffffffu, keep[0] != 1 || keep[1] != 1))
        for (auto& block : acc[i])
          for (int c = 0; c < 4; ++c) block[c] *= keep[c / 2];
    }
  }

  // acc += weights V, weights rounded to bf16; tokens are rows after `at` of `values`.
  template <int kTokens>
  __device__ void add_values(const float (&s)[kRowTiles][kTokens / 8][4],
                             const Shared<bf16>& values, int at, int lane) {
    int from = swizzled<kDim>(at + lane % 16, lane / 16);
    for (int k = 0; k < kTokens / 16; ++k) {
      uint32_t p[kRowTiles][4];
      for (int i = 0; i < kRowTiles; ++i)
        for (int j = 0; j < 4; ++j) {
          const float(&block)[4] = s[i][2 * k + j / 2];
          p[i][j] = pack_bf16(block[j % 2 * 2], block[j % 2 * 2 + 1]);
        }
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];  // dims 0..7: tokens 0..7, 8..15; dims 8..15: the same
        ldmatrix_x4_trans(b, values, in_step(from, n) + 16 * k * kDim);
        for (int i = 0; i < kRowTiles; ++i) {
          mma_m16n8k16(acc[i][2 * n], p[i], b[0], b[1]);
          mma_m16n8k16(acc[i][2 * n + 1], p[i], b[2], b[3]);
        }
      }
    }
  }

  // The sum over all columns, in all four lanes of a row.
  __device__ float total(int i, int half) const {
    float x = sum[i][half];
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }
};

}  // namespace xpyd::cuda::attention
