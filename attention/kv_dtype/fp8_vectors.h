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

// Returns nearest_fp8() of 8 numbers, each in 32 bits.
inline __m256i narrow_fp8(const Fp8Form& form, __m256 x) {
  const auto all = [](uint32_t n) { return _mm256_set1_epi32(int(n)); };
  const uint32_t gone = uint32_t(23 - form.mantissa), least = uint32_t(127 + form.least) << 23;
  const __m256i bits = _mm256_castps_si256(x), magnitude = _mm256_and_si256(bits, all(0x7fffffff));
  const __m256i unit = all(least + (gone << 23));
  const __m256i small = _mm256_sub_epi32(
      _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(unit))), unit);
  const __m128i shift = _mm_cvtsi32_si128(int(gone));
  const __m256i odd = _mm256_and_si256(_mm256_srl_epi32(magnitude, shift), all(1));
  const __m256i rounds = _mm256_add_epi32(odd, all((1u << 23) - least + (1u << (gone - 1)) - 1));
  const __m256i normal = _mm256_srl_epi32(_mm256_add_epi32(magnitude, rounds), shift);
  __m256i code = _mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(all(least), magnitude));
  code = _mm256_min_epu32(code, all(form.largest));
  const __m256i infinity = all(0x7f800000);
  code = _mm256_blendv_epi8(code, all(form.infinity), _mm256_cmpeq_epi32(magnitude, infinity));
  code = _mm256_blendv_epi8(code, all(form.nan), _mm256_cmpgt_epi32(magnitude, infinity));
  return _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(bits, 24), all(0x80)));
}

}  // namespace
}  // namespace xpyd::attention
