// bf16_dot: VDPBF16PS adds two products of bf16 to each sum, k + 1 before k, and treats denormals as zero. Each output
// is one chain over ascending pairs of k, so its bits depend on the same inputs as an exact variant's.
#define XPYD_VNNI
#include "model/gemm/gemm_lanes.h"

namespace xpyd::model {
namespace {

// Twelve or more chains: the instruction has a latency of five to six cycles and issues every one or two.
template <int kRows, int kPanels>
struct Bf16Dot {
  static void run(const GemmTile& t) {
    Floats sums[kPanels][kRows];
    XPYD_UNROLL(6)
    for (int p = 0; p < kPanels; ++p) XPYD_UNROLL(12)
    for (int r = 0; r < kRows; ++r) sums[p][r] = t.resume ? load(t.sums + (p * kRows + r) * kPanel) : splat(0);
    auto* x = reinterpret_cast<const std::byte*>(t.x);  // pairs of bf16
    const std::byte *w = t.w, *prefetch = t.prefetch;
    const size_t panel_bytes = t.panel_bytes;
    for (int k = 0; k < t.k; k += 2, x += 4 * kRows, w += 64) {
      if (t.prefetch_step && k % 4 == 0) {
        XPYD_UNROLL(6)
        for (int p = 0; p < kPanels; ++p) {
          auto* line = reinterpret_cast<const char*>(prefetch + size_t(p) * panel_bytes);
          _mm_prefetch(line, _MM_HINT_T0);
          if (t.prefetch_step > 64) _mm_prefetch(line + 64, _MM_HINT_T0);
        }
        prefetch += t.prefetch_step;
      }
      XPYD_UNROLL(6)
      for (int p = 0; p < kPanels; ++p) {
        const auto pairs = read<__m512bh>(w + size_t(p) * panel_bytes);
        XPYD_UNROLL(12)
        for (int r = 0; r < kRows; ++r)
          sums[p][r] = _mm512_dpbf16_ps(sums[p][r], __m512bh(_mm512_set1_epi32(read<int>(x + 4 * r))), pairs);
      }
    }
    XPYD_UNROLL(6)
    for (int p = 0; p < kPanels; ++p) XPYD_UNROLL(12)
    for (int r = 0; r < kRows; ++r) store(t.sums + (p * kRows + r) * kPanel, sums[p][r]);
  }
};

}  // namespace

extern const DotKernels XPYD_AVX512(kAvx512Bf16Dot);
const DotKernels XPYD_AVX512(kAvx512Bf16Dot) = {kTheseDots8.int8, kTheseDots8.int4, {16, tiles_of<Bf16Dot, kShapes>()}};

}  // namespace xpyd::model
