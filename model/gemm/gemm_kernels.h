// The innermost loops that an instruction set provides. Blocking, packing, threads and the group tree are in gemm.cc,
// once for all instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xpyd {
class ThreadTeam;
}

namespace xpyd::model {

struct GemmArgs;  // model/gemm/gemm.h
class GemmScratch;

inline constexpr int kPanel = 16;  // output columns of a panel
inline constexpr int kMaxTileRows = 12;
inline constexpr int kMaxTilePanels = 6;

// One register tile: sums[p][r][c] (+)= sum over k of x[k][r] * w_p[k][c]. Each element is one chain over ascending k
// that starts from zero, or from `sums` if `resume`.
//
// For quantised weights (quantised.h) a tile covers one piece, whose scales follow its quantised values. A dot tile
// multiplies integers: x is rounded to 16 bits, `x` points at DotRows<rows>, and
//   sums[p][r][c] (+)= (scale of x[r] * scale of c) * (sum over k of x[k][r] * (code - zero of c)).
struct GemmTile {
  const float* x;      // [k, rows]
  const std::byte* w;  // panel p at w + p * panel_bytes (README.md draws a panel)
  size_t panel_bytes;
  int k;
  float* sums;  // [panels, rows, 16], 32-byte aligned
  bool resume;
  // Weights for the next tiles: prefetch_step bytes from `prefetch` on for every 4 k.
  const std::byte* prefetch;
  int prefetch_step;
};

// Rows of activations as integers. Pair j of a row holds two k, in the order in which a tile unpacks the weights. int8,
// for every 4 k: (0, 2), (1, 3). int4, for every 8 k: (0, 4), (1, 5), (2, 6), (3, 7).
template <int kRows>
struct DotRows {
  float scale[kRows];
  int32_t sum[kRows];          // sum of the row's integers
  int16_t pairs[1][kRows][2];  // [k / 2]
};

// Tile shapes that fit the registers: 1 to `rows` rows, and up to panels[rows] panels.
struct TileShapes {
  int rows;
  int panels[kMaxTileRows + 1];
};

using GemmTileFn = void (*)(const GemmTile& tile);
struct GemmTiles {
  TileShapes shapes;
  GemmTileFn at[kMaxTileRows + 1][kMaxTilePanels + 1];  // [rows][panels]; null: no such tile
};

struct GemmKernels {
  GemmTiles f32, bf16, f16, int8, int4, fp8;
  void (*add)(float* into, const float* from, int n);  // n % 16 == 0, 32-byte aligned
};

// Tiles for rounded activations. Quantised weights meet integers (DotRows). If bf16.shapes.rows is not 0, bf16 weights
// meet x rounded to bf16, where `x` holds [k / 2, rows] pairs.
struct DotKernels {
  GemmTiles int8, int4, bf16;
};

// Runs one variant. Without `dots` it is exact.
void run_gemm(const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team, const GemmKernels& kernels,
              const DotKernels* dots);

// Fills `tiles` with At<rows, panels>::run for every shape.
template <template <int, int> class At, TileShapes kShapes, int kRows = 1, int kPanels = 1>
constexpr void fill_tiles(GemmTiles& tiles) {
  tiles.at[kRows][kPanels] = At<kRows, kPanels>::run;
  if constexpr (kPanels < kShapes.panels[kRows])
    fill_tiles<At, kShapes, kRows, kPanels + 1>(tiles);
  else if constexpr (kRows < kShapes.rows)
    fill_tiles<At, kShapes, kRows + 1, 1>(tiles);
}
template <template <int, int> class At, TileShapes kShapes>
constexpr GemmTiles tiles_of() {
  GemmTiles tiles{kShapes, {}};
  fill_tiles<At, kShapes>(tiles);
  return tiles;
}

extern const GemmKernels kPortableKernels;
extern const DotKernels kPortableDot;
#if defined(__x86_64__)
extern const GemmKernels kAvx2Kernels, kAvx512Kernels;
extern const DotKernels kAvx2Dot, kAvx512Dot, kAvx512VnniDot, kAvx512Bf16Dot;
#endif

}  // namespace xpyd::model
