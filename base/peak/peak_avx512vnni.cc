// VPDPBUSD in registers only: each lane adds four products of an unsigned and a signed byte.
#include "base/avx512.h"
#include "base/peak/peak_kernels.h"

namespace xpyd {

double XPYD_AVX512(int8_dot_peak)(long iterations, float* sink);
double XPYD_AVX512(int8_dot_peak)(long iterations, float* sink) {
  constexpr int kChains = 12;
  __m512i sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_epi32(i);
  const __m512i a = _mm512_set1_epi32(0x01010101), b = _mm512_set1_epi32(0x01ff01ff);  // 1 and -1 in turn
  for (long n = 0; n < iterations; ++n)
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
  for (int i = 1; i < kChains; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  *sink = float(_mm_cvtsi128_si32(_mm512_castsi512_si128(sums[0])));
  return double(iterations) * kChains * 16 * 8;
}

}  // namespace xpyd
