// One source for two widths: what kernels of *_avx2.cc and *_avx512.cc need of vectors, as wide as the file is compiled
// for.
// + - * / of them are the compiler's; two names in a pair of parentheses mean the first n lanes, the others being zero.
#pragma once

#if defined(__AVX512F__) || defined(XPYD_EMULATE)
#include "base/avx512.h"
#else
#include <immintrin.h>
#endif
#include <string.h>

namespace xpyd {
namespace {

#if defined(__AVX512F__) || defined(XPYD_EMULATE)

using Floats = __m512;
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
inline Line load_line(const void* p) { return _mm512_loadu_si512(p); }
inline void stream(Line* to, Line v) { _mm512_stream_si512(to, v); }

#else

using Floats = __m256;
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
inline Line load_line(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void stream(Line* to, Line v) { _mm256_stream_si256(to, v); }

#endif

}  // namespace
}  // namespace xpyd
