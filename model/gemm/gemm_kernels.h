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

inline constexpr int kPanel = 16;      // output columns of a panel
// The most inputs that share a stored scale: that many products of a code and 16-bit x add up within 32 bits.
inline constexpr int kMaxPiece = 128;
inline constexpr int kMaxTileRows = 12;
inline constexpr int kMaxTilePanels = 6;

// One register tile: sums[p][r][c] (+)= sum over k of x[k][r] * w_p[k][c]. Each element is one chain over ascending k
// that starts from zero, or from `sums` if `resume`.
//
// For quantised weights (quantised.h) a tile covers whole pieces, whose scales follow their quantised values. A dot
// tile multiplies integers: x is rounded run by run, `x` points at the first run's DotRows<rows>, and for each run
//   sums[p][r][c] (+)= (scale of x[r] * scale of c) * (sum over k of x[k][r] * (code - zero of c)).
struct GemmTile {
  const float* x;      // [k, rows]
  const std::byte* w;  // panel p at w + p * panel_bytes (README.md draws a panel)
  size_t panel_bytes;
  int k;        // quantised: of one piece
  int pieces;   // that lie one behind the other and have the same k; more than 1: dot tiles only
  float* sums;  // [panels, rows, 16], 32-byte aligned
  bool resume;
  // Weights for the next tiles: prefetch_step bytes from `prefetch` on for every 4 k.
  const std::byte* prefetch;
  int prefetch_step;
};

// Rows of activations as integers. Those of a run share a scale. A run is a piece if the integers have 16 bits, and at
// most kByteRun inputs of a piece if they have 8.
//
// A cell holds four integers of 8 bits, in their order, or two of 16 bits, in the order in which a tile unpacks codes:
// int8, for every 4 k: (0, 2), (1, 3). int4, for every 8 k: (0, 2), (4, 6), (1, 3), (5, 7).
template <int kRows>
struct DotRows {
  float scale[kRows];
  int32_t less[kRows];      // minus the sum of the row's integers
  int32_t cells[1][kRows];  // [run / integers of a cell]
};
inline constexpr int kByteRun = 32;
constexpr int run_length(int activation_bits, int piece) { return activation_bits == 8 ? kByteRun : piece; }
// Floats that a row of a piece takes.
constexpr int dot_floats(int activation_bits, int piece) {
  const int run = run_length(activation_bits, piece);
  return (piece + run - 1) / run * 2 + piece * activation_bits / 32;
}
// Place of the integer at k, counted in integers, in one row of cells.
constexpr int dot_place(int activation_bits, int weight_bits, int k) {
  const int step = 32 / weight_bits, i = k % step;
  return activation_bits == 8 ? k : k - i + (i % 2 * (step / 4) + i / 4) * 2 + i % 4 / 2;
}

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

// Tiles for rounded activations: integers of 16 or 8 bits (DotRows), or bf16, where `x` holds [k / 2, rows] pairs.
struct DotTiles {
  int bits;  // of x; 0: no such tiles
  GemmTiles tiles;
};
struct DotKernels {
  DotTiles int8, int4, bf16;
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
extern const DotKernels kPortableDot, kPortableDot8;
#if defined(__x86_64__)
extern const GemmKernels kAvx2Kernels, kAvx512Kernels;
extern const DotKernels kAvx2Dot, kAvx2Dot8, kAvx512Dot, kAvx512Dot8, kAvx512VnniDot, kAvx512VnniDot8, kAvx512Bf16Dot;
#endif

}  // namespace xpyd::model
