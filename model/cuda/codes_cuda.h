// y = x W^T of a matrix of codes (quantised.h) on CUDA, for any number of rows: the codes are what is read from memory,
// and a warp makes numbers of them in its registers, just before it multiplies (code_tiles_cuda.cu: how they lie
// there).
//
// With w for the f32 that a code stands for, and x of bf16 (tensor cores) or f32 as they are:
//
//   |y - sum x w| <= (2 K + 8) 2^-24 sum |x w|, and y's own rounding.
//
// No weight is rounded: a code less its zero is a bf16, and sums of pieces meet their scale. One addition order,
// whatever M is: pieces of 128 of K, or of 32 where a scale has no whole 128, each a chain of fused sums of 16 products
// from zero (f32: four chains of fused multiply-adds); scale times piece is added to the others of a quarter of K in
// one fused multiply-add, and the four quarters in their order.
//
// Thread safety: of plain functions.
#pragma once

#include <vector>

#include "model/cuda/gemm_cuda.h"
#include "model/gemm/gemm.h"

namespace xpyd::model {

constexpr int kCodesOutputs = 16;  // of a tile: what is stored together, and what a warp multiplies at once

// A matrix of codes as it will lie there: tiles one behind another, `bytes` each.
struct CodeTiles {
  // Places of K: what is stored in whole steps, and the least that has one scale; bytes of what a warp reads at once.
  static constexpr int kStep = 128, kQuarter = 32, kUnitBytes = 512;
  CudaCodes codes;              // its `inputs` not set
  std::vector<int32_t> inputs;  // what they are
  bool in_order = true;         // each place is its own input: nobody needs to look
  int n_tiles = 0, bytes = 0;
};
CodeTiles lay_out_tiles(const PackedMatrix& w);
// Tile number `tile` -> out[tiles.bytes]. From any thread.
void write_tile(const PackedMatrix& w, const CodeTiles& tiles, int tile, std::byte* out);

// Before: a.w is of codes, a.x_dtype and a.y_dtype as a CudaGemm takes them. Allocates nothing, may be captured and may
// start early.
void cuda_codes(const CudaGemmArgs& a, const cuda::On& on);

}  // namespace xpyd::model
