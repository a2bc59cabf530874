// What gemm.cc asks of an instruction set: the innermost loops. Blocking, packing, threads and the
// group tree are in gemm.cc once, for every instruction set.
#pragma once

#include <cstddef>

namespace xpyd::model {

inline constexpr int kPanel = 16;       // output columns of a panel
inline constexpr int kMaxTileRows = 6;  // 12 accumulators of 8 floats: with two weights, one
                                        // broadcast and one mask these are the 16 registers of AVX2
inline constexpr int kMaxTilePanels = 6;

// One register tile: sums[p][r][c] (+)= sum over k of x[k][r] * w_p[k][c], each element one chain
// over ascending k that starts from zero, or from `sums` when `resume`.
struct GemmTile {
  const float* x;      // [k, rows]
  const std::byte* w;  // panel p at w + p * panel_bytes: [k, 16], f32 or bf16
  size_t panel_bytes;
  int k;
  float* sums;  // [panels, rows, 16], 32-byte aligned
  bool resume;
  // Lines that the next tiles will need: `prefetch` onwards, `prefetch_step` bytes for every 4 k.
  const std::byte* prefetch;
  int prefetch_step;
};

using GemmTileFn = void (*)(const GemmTile& tile);

struct GemmKernels {
  GemmTileFn f32[kMaxTileRows + 1][kMaxTilePanels + 1];  // [rows][panels]; null where there is none
  GemmTileFn bf16[kMaxTileRows + 1][kMaxTilePanels + 1];
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

extern const GemmKernels kPortableKernels;
#if defined(__x86_64__)
extern const GemmKernels kAvx2Kernels;
#endif

}  // namespace xpyd::model
