// VDPBF16PS in registers only: each lane adds two products.
#include "base/avx512.h"
#include "base/peak/peak_kernels.h"

namespace xpyd {

double XPYD_AVX512(bf16_dot_peak)(long iterations, float* sink);
double XPYD_AVX512(bf16_dot_peak)(long iterations, float* sink) {
  constexpr int kChains = 12;
  __m512 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_ps(float(i));
  // Each step adds 1 - 1: no sum grows or becomes denormal.
  const auto a = (__m512bh)_mm512_set1_epi32(0x3f80bf80), b = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  for (long n = 0; n < iterations; ++n)
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
  for (int i = 1; i < kChains; ++i) sums[0] += sums[i];
  *sink = sums[0][0];
  return double(iterations) * kChains * 16 * 4;
}

}  // namespace xpyd
