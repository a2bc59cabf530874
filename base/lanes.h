// One source for two widths: the vector operations that kernels of *_avx2.cc and *_avx512.cc need, as wide as the file
// is compiled for. The compiler supplies + - * /. In load and store, n means the first n lanes; the others are zero or
// not stored.
#pragma once

#if defined(__AVX512F__) || defined(XPYD_EMULATE)
#include "base/avx512.h"
#else
#include <immintrin.h>
#endif
#include <string.h>

namespace xpyd {
namespace {

// The sum of all lanes: the upper half is added to the lower half, and so on.
inline float total(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline double total(__m256d v) {
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

#if defined(__AVX512F__) || defined(XPYD_EMULATE)

using Floats = __m512;
using Doubles = __m512d;  // half as many lanes
using Line = __m512i;
constexpr int kLanes = 16;

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline void store(float* p, int n, Floats v) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), v); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }                   // b where either is NaN
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats nearest(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Doubles load_doubles(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
inline float total(Floats v) { return total(_mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1)); }
inline double total(Doubles v) { return total(_mm512_castpd512_pd256(v) + _mm512_extractf64x4_pd(v, 1)); }
inline Line load_line(const void* p) { return _mm512_loadu_si512(p); }
inline void stream(Line* to, Line v) { _mm512_stream_si512(to, v); }

#else

using Floats = __m256;
using Doubles = __m256d;  // half as many
using Line = __m256i;
constexpr int kLanes = 8;

inline Floats splat(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats load(const float* p, int n) {
  alignas(32) float padded[kLanes] = {};
  memcpy(padded, p, size_t(n) * sizeof(float));
  return _mm256_load_ps(padded);
}
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline void store(float* p, int n, Floats v) {
  alignas(32) float padded[kLanes];
  _mm256_store_ps(padded, v);
  memcpy(p, padded, size_t(n) * sizeof(float));
}
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }    // a b + c
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a b
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }                   // b where either is NaN
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats nearest(Floats v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Doubles load_doubles(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
inline Line load_line(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void stream(Line* to, Line v) { _mm256_stream_si256(to, v); }

#endif

}  // namespace
}  // namespace xpyd
