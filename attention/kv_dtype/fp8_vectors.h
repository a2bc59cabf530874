// fp8 in vectors of 256 bits, for files that are compiled for AVX2 or newer. The values are those of base/dtype.h.
// Widening is exact, so every reader of KV sees the same numbers.
#pragma once

#include <immintrin.h>

#include <cstddef>

#include "base/dtype.h"

namespace xpyd::attention {
namespace {

// Widens 8 codes. A code of e5m2 is the upper byte of an f16. A code of e4m3, shifted right by one bit below its sign
// (f16 has one exponent bit more), is the f16 of 2^-8 times its value; NaN is patched.
template <Dtype kDtype>
inline __m256 widen_fp8(const std::byte* at) {
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
  __m128i words = _mm_unpacklo_epi8(_mm_setzero_si128(), codes);
  if constexpr (kDtype == Dtype::fp8_e5m2) return _mm256_cvtph_ps(words);
  words = _mm_srai_epi16(words, 1);
  const __m128i nan = _mm_set1_epi16(0x3f80), is_nan = _mm_cmpeq_epi16(_mm_and_si128(words, nan), nan);
  words = _mm_or_si128(_mm_and_si128(words, _mm_set1_epi16(short(0xbf80))), is_nan);
  return _mm256_mul_ps(_mm256_cvtph_ps(words), _mm256_set1_ps(0x1p8f));
}

}  // namespace
}  // namespace xpyd::attention
