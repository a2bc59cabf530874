// KvRowVectors for AVX2, mostly 32 elements at a time, with the bits of kv_row.cc's loops.
#include <immintrin.h>

#include "attention/kv_dtype/fp8_vectors.h"
#include "attention/kv_dtype/kv_row_vectors.h"

namespace xpyd::attention {
namespace {

constexpr int kAtOnce = 32;
constexpr float kLargest = 65504.0f;  // kKvLargest

// Packs 32 numbers in [0, 255], 8 in each vector, into bytes.
__m256i bytes_of(const __m256i (&x)[4]) {
  const __m256i words = _mm256_packus_epi16(_mm256_packus_epi32(x[0], x[1]), _mm256_packus_epi32(x[2], x[3]));
  return _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// min and max return their second operand if the operands are equal or one is NaN, as `a < b ? a : b` does.
int range_avx2(const float* x, int n, float* min, float* max, float* poison) {
  const int whole = n / 8 * 8;
  if (whole == 0) return 0;
  __m256 least = _mm256_set1_ps(__builtin_inff()), most = _mm256_set1_ps(-__builtin_inff()), sum = _mm256_setzero_ps();
  for (int d = 0; d < whole; d += 8) {
    const __m256 y = _mm256_loadu_ps(x + d);
    least = _mm256_min_ps(y, least);
    most = _mm256_max_ps(y, most);
    sum = _mm256_add_ps(sum, _mm256_mul_ps(_mm256_setzero_ps(), y));
  }
  float lanes[3][8];
  _mm256_storeu_ps(lanes[0], least), _mm256_storeu_ps(lanes[1], most), _mm256_storeu_ps(lanes[2], sum);
  for (int i = 0; i < 8; ++i) {
    *min = lanes[0][i] < *min ? lanes[0][i] : *min;
    *max = lanes[1][i] > *max ? lanes[1][i] : *max;
    *poison += lanes[2][i];
  }
  return whole;
}

int codes_avx2(bool int8, const float* x, int n, float offset, float inverse, float largest, std::byte* row) {
  const int whole = n / kAtOnce * kAtOnce;
  for (int d = 0; d < whole; d += kAtOnce) {
    __m256i codes[4];
    for (int i = 0; i < 4; ++i) {
      __m256 y = _mm256_max_ps(_mm256_set1_ps(-kLargest), _mm256_loadu_ps(x + d + 8 * i));
      y = _mm256_min_ps(_mm256_set1_ps(kLargest), y);
      y = _mm256_mul_ps(_mm256_sub_ps(y, _mm256_set1_ps(offset)), _mm256_set1_ps(inverse));
      y = _mm256_add_ps(_mm256_min_ps(y, _mm256_set1_ps(largest)), _mm256_set1_ps(0x1p23f));
      codes[i] = _mm256_and_si256(_mm256_castps_si256(y), _mm256_set1_epi32(0xff));
    }
    const __m256i bytes = bytes_of(codes);
    if (int8) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + d), bytes);
      continue;
    }
    const __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(bytes, 8);
    const __m256i pairs = _mm256_or_si256(even, _mm256_slli_epi16(odd, 4));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(row + d / 2),
                     _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
  }
  return whole;
}

int values_avx2(bool int8, const std::byte* row, int n, float scale, float zero, float* x) {
  const int whole = n / kAtOnce * kAtOnce;
  for (int d = 0; d < whole; d += kAtOnce) {
    __m128i codes[2];
    if (int8) {
      codes[0] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + d));
      codes[1] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + d + 16));
    } else {
      const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + d / 2));
      const __m128i low = _mm_and_si128(pairs, _mm_set1_epi8(15));
      const __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), _mm_set1_epi8(15));
      codes[0] = _mm_unpacklo_epi8(low, high), codes[1] = _mm_unpackhi_epi8(low, high);
    }
    for (int i = 0; i < 4; ++i) {
      const __m128i eight = i % 2 ? _mm_srli_si128(codes[i / 2], 8) : codes[i / 2];
      const __m256 code = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
      _mm256_storeu_ps(x + d + 8 * i, _mm256_add_ps(_mm256_mul_ps(code, _mm256_set1_ps(scale)), _mm256_set1_ps(zero)));
    }
  }
  return whole;
}

int to_bf16_avx2(const float* x, int n, std::byte* row) {
  const int whole = n / 16 * 16;
  for (int d = 0; d < whole; d += 16) {
    __m256i halves[2];
    for (int i = 0; i < 2; ++i) {
      const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + d + 8 * i));
      const __m256i upper = _mm256_srli_epi32(bits, 16), one = _mm256_set1_epi32(1);
      const __m256i rounds = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(upper, one));
      const __m256i nan = _mm256_cmpgt_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)),
                                             _mm256_set1_epi32(0x7f800000));
      halves[i] = _mm256_blendv_epi8(_mm256_srli_epi32(_mm256_add_epi32(bits, rounds), 16),
                                     _mm256_or_si256(upper, _mm256_set1_epi32(0x40)), nan);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 2 * d),
                        _mm256_permute4x64_epi64(_mm256_packus_epi32(halves[0], halves[1]), 0xd8));
  }
  return whole;
}

int of_bf16_avx2(const std::byte* row, int n, float* x) {
  const int whole = n / 8 * 8;
  for (int d = 0; d < whole; d += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * d));
    _mm256_storeu_ps(x + d, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)));
  }
  return whole;
}

int to_fp8_avx2(const Fp8Form& form, const float* x, int n, std::byte* row) {
  const int whole = n / kAtOnce * kAtOnce;
  for (int d = 0; d < whole; d += kAtOnce) {
    __m256i codes[4];
    for (int i = 0; i < 4; ++i) codes[i] = narrow_fp8(form, _mm256_loadu_ps(x + d + 8 * i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + d), bytes_of(codes));
  }
  return whole;
}

int of_fp8_avx2(Dtype dtype, const std::byte* row, int n, float* x) {
  const int whole = n / 8 * 8;
  for (int d = 0; d < whole; d += 8)
    _mm256_storeu_ps(
        x + d, dtype == Dtype::fp8_e4m3 ? widen_fp8<Dtype::fp8_e4m3>(row + d) : widen_fp8<Dtype::fp8_e5m2>(row + d));
  return whole;
}

}  // namespace

const KvRowVectors kKvRowAvx2 = {range_avx2,   codes_avx2,  values_avx2, to_bf16_avx2,
                                 of_bf16_avx2, to_fp8_avx2, of_fp8_avx2};

}  // namespace xpyd::attention
