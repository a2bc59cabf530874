// y = x W^T with quantised weights (quantised.h) on CUDA, for any number of rows. The kernel reads the codes from
// memory, and each warp turns them into numbers in its registers just before it multiplies. quantised_tiles_cuda.cu
// says how the codes lie in memory.
//
// Let w be the f32 that a code stands for, and x bf16 (tensor cores) or f32. Then, besides y's own rounding,
//
//   |y - sum x w| <= (2 K + 8) 2^-24 sum |x w|.
//
// No weight is rounded: a code less its zero is a bf16, and a scale multiplies the sum of a piece. One addition order
// holds for every M. A piece is 128 of K, or 32 of K if a scale has no whole 128. Each piece is one chain of fused sums
// of 16 products from zero (f32: four chains of fused multiply-adds). One fused multiply-add adds scale times piece to
// the sum of a quarter of K, and the four quarters are added in their order.
//
// Thread safety: plain functions.
#pragma once

#include <vector>

#include "model/cuda/gemm_cuda.h"
#include "model/gemm/gemm.h"

namespace xpyd::model {

constexpr int kQuantisedOutputs = 16;  // outputs of a tile; a tile is stored together, and a warp multiplies it at once

// Layout of a quantised matrix on the card: n_tiles tiles of `bytes` bytes, one after another.
struct CodeTiles {
  // Positions of K: the storage step, and the least with one scale. Bytes that a warp reads at once.
  static constexpr int kStep = 128, kQuarter = 32, kUnitBytes = 512;
  CudaQuantisedRows codes;      // all but `inputs`
  std::vector<int32_t> inputs;  // [places]: the input at each position; -1: padding
  bool in_order = true;         // each position holds its own input, so the kernel needs no table
  int n_tiles = 0, bytes = 0;
};
// Lays out the tiles of a quantised matrix.
CodeTiles lay_out_tiles(const PackedMatrix& w);
// Writes tile number `tile` to out[tiles.bytes]. It may run on any thread.
void write_tile(const PackedMatrix& w, const CodeTiles& tiles, int tile, std::byte* out);

// Enqueues the product. Requires: a.w is quantised, and a.x_dtype and a.y_dtype are those of CudaGemm. It allocates
// nothing, may be captured, and may start early.
void cuda_quantised_gemm(const CudaGemmArgs& a, const cuda::On& on);

}  // namespace xpyd::model
