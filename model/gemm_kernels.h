// What gemm.cc asks of an instruction set: the innermost loops. Blocking, packing, threads and the
// group tree are in gemm.cc once, for every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xpyd::model {

inline constexpr int kPanel = 16;       // output columns of a panel
inline constexpr int kMaxTileRows = 6;  // 12 accumulators of 8 floats: with two weights, one
                                        // broadcast and one mask these are the 16 registers of AVX2
inline constexpr int kMaxTilePanels = 6;
inline constexpr int kMaxPiece = 128;  // K with one scale: whole numbers of 16 bits times codes fit 32

// One register tile: sums[p][r][c] (+)= sum over k of x[k][r] * w_p[k][c], each element one chain
// over ascending k that starts from zero, or from `sums` when `resume`.
//
// Of codes (model/quantised.h) it is one piece, with its scales behind it. A dot tile multiplies whole numbers: x is
// rounded to 16 bits, `x` points at DotRows<rows>, and sums[p][r][c] (+)= (scale of x[r] * scale of c) * (sum over k of x[k][r] * (code - zero of c)).
struct GemmTile {
  const float* x;      // [k, rows]
  const std::byte* w;  // panel p at w + p * panel_bytes, as model/gemm.md draws it
  size_t panel_bytes;
  int k;
  float* sums;  // [panels, rows, 16], 32-byte aligned
  bool resume;
  // Lines that the next tiles will need: `prefetch` onwards, `prefetch_step` bytes for every 4 k.
  const std::byte* prefetch;
  int prefetch_step;
};

// Rows of activations as whole numbers. Pair j of a row holds two k in the order in which a tile takes codes apart:
// int8, of every 4 k: (0, 2), (1, 3); int4, of every 8: (0, 4), (1, 5), (2, 6), (3, 7).
template <int kRows>
struct DotRows {
  float scale[kRows];
  int32_t sum[kRows];         // of the whole numbers
  int16_t pairs[1][kRows][2];  // [k / 2]
};

using GemmTileFn = void (*)(const GemmTile& tile);
using GemmTiles = GemmTileFn[kMaxTileRows + 1][kMaxTilePanels + 1];  // [rows][panels]; null where there is none

struct GemmKernels {
  GemmTiles f32, bf16, f16, int8, int4, fp8;
  GemmTiles dot_int8, dot_int4;  // up to kMaxDotRows rows
  void (*add)(float* into, const float* from, int n);  // n % 16 == 0, 32-byte aligned
};

// [rows][panels] of an instruction set's tile<rows, panels, Weight>.
#define XPYD_TILES(Weight)                                                                \
  {                                                                                       \
    {}, {nullptr,                                                                         \
         tile<1, 1, Weight>,                                                              \
         tile<1, 2, Weight>,                                                              \
         tile<1, 3, Weight>,                                                              \
         tile<1, 4, Weight>,                                                              \
         tile<1, 5, Weight>,                                                              \
         tile<1, 6, Weight>},                                                             \
        {nullptr, tile<2, 1, Weight>, tile<2, 2, Weight>, tile<2, 3, Weight>},            \
        {nullptr, tile<3, 1, Weight>, tile<3, 2, Weight>}, {nullptr, tile<4, 1, Weight>}, \
        {nullptr, tile<5, 1, Weight>}, {nullptr, tile<6, 1, Weight>},                     \
  }
inline constexpr int kMaxDotRows = 4;  // 8 accumulators, 4 vectors of codes, one broadcast
#define XPYD_DOT_TILES(Codes)                                                                       \
  {                                                                                                 \
    {}, {nullptr,                                                                                   \
         dot_tile<1, 1, Codes>,                                                                     \
         dot_tile<1, 2, Codes>,                                                                     \
         dot_tile<1, 3, Codes>,                                                                     \
         dot_tile<1, 4, Codes>,                                                                     \
         dot_tile<1, 5, Codes>,                                                                     \
         dot_tile<1, 6, Codes>},                                                                    \
        {nullptr, dot_tile<2, 1, Codes>, dot_tile<2, 2, Codes>, dot_tile<2, 3, Codes>},             \
        {nullptr, dot_tile<3, 1, Codes>, dot_tile<3, 2, Codes>}, {nullptr, dot_tile<4, 1, Codes>},  \
  }

extern const GemmKernels kPortableKernels;
#if defined(__x86_64__)
extern const GemmKernels kAvx2Kernels;
#endif

}  // namespace xpyd::model
