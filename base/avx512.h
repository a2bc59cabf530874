// AVX-512's intrinsics, for *_avx512*.cc alone. With XPYD_EMULATE, which the tests define, they are SIMDe's on AVX2, so
// that every processor executes these kernels. The intrinsics that Debian's SIMDe lacks are below. Such a file names
// what it exports XPYD_AVX512(name), so that its second object has names of its own.
//
// From headers a kernel's file may use types, constants and always-inlined functions. An inline function that is
// compiled here but not inlined could be the copy that the linker keeps for all files (`make test` looks for one).
#pragma once

#include <immintrin.h>

#if !defined(XPYD_EMULATE)

#define XPYD_AVX512(name) name

#else

#define XPYD_AVX512(name) name##_emulated
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <stdint.h>
#include <string.h>

namespace xpyd::emulated {
namespace {

template <class Wide, class Half>
inline Wide join(Half low, Half high) {
  Wide wide;
  memcpy(&wide, &low, sizeof low);
  memcpy(reinterpret_cast<char*>(&wide) + sizeof low, &high, sizeof high);
  return wide;
}

template <class Half, class Wide>
inline Half half(Wide wide, int which) {
  Half part;
  memcpy(&part, reinterpret_cast<const char*>(&wide) + size_t(which) * sizeof part, sizeof part);
  return part;
}

// f applied to both halves, of 256 bits each, or of 128 bits if f makes 256 of them.
template <class Wide, class Half, class From, class F>
inline Wide halves(From a, F f) {
  return join<Wide>(f(half<Half>(a, 0)), f(half<Half>(a, 1)));
}

inline __m512i cvtps_epi32(__m512 a) {
  return halves<__m512i, __m256>(a, [](__m256 h) { return _mm256_cvtps_epi32(h); });
}
inline __m512 cvtepi32_ps(__m512i a) {
  return halves<__m512, __m256i>(a, [](__m256i h) { return _mm256_cvtepi32_ps(h); });
}
inline __m512d cvtps_pd(__m256 a) {
  return halves<__m512d, __m128>(a, [](__m128 h) { return _mm256_cvtps_pd(h); });
}
inline __m512 cvtph_ps(__m256i a) {
  return halves<__m512, __m128i>(a, [](__m128i h) { return _mm256_cvtph_ps(h); });
}
inline __m512i cvtepu8_epi32(__m128i a) {
  return join<__m512i>(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)));
}
inline __m512i cvtepu16_epi32(__m256i a) {
  return halves<__m512i, __m128i>(a, [](__m128i h) { return _mm256_cvtepu16_epi32(h); });
}
inline __m256 extractf32x8_ps(__m512 a, int which) { return half<__m256>(a, which); }

// Elements whose mask bit is not set are neither read nor written.
template <class Vector, class Element>
inline Vector load(uint64_t mask, const void* from) {
  Element elements[sizeof(Vector) / sizeof(Element)] = {};
  for (size_t i = 0; i < sizeof elements / sizeof(Element); ++i)
    if (mask >> i & 1) memcpy(&elements[i], static_cast<const Element*>(from) + i, sizeof(Element));
  Vector v;
  memcpy(&v, elements, sizeof v);
  return v;
}
template <class Element, class Vector>
inline void store(void* to, uint64_t mask, Vector v) {
  for (size_t i = 0; i < sizeof v / sizeof(Element); ++i)
    if (mask >> i & 1)
      memcpy(static_cast<Element*>(to) + i, reinterpret_cast<const char*>(&v) + i * sizeof(Element), sizeof(Element));
}
inline __m512 maskz_loadu_ps(__mmask16 k, const void* p) { return load<__m512, float>(k, p); }
inline void mask_storeu_ps(void* p, __mmask16 k, __m512 v) { store<float>(p, k, v); }

// VDPBF16PS as the manual defines it: the odd pair is added first, each sum is rounded, and denormals are zero.
inline __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  uint32_t x[16], y[16];
  float s[16];
  memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y), memcpy(s, &sums, sizeof s);
  auto flushed = [](float v) { return v < 0x1p-126f && v > -0x1p-126f ? __builtin_copysignf(0.0f, v) : v; };
  auto value = [&](uint32_t bits) {
    float v;
    memcpy(&v, &bits, sizeof v);
    return flushed(v);
  };
  for (int i = 0; i < 16; ++i) {
    s[i] = flushed(flushed(s[i]) + flushed(value(x[i] & 0xffff0000) * value(y[i] & 0xffff0000)));
    s[i] = flushed(s[i] + flushed(value(x[i] << 16) * value(y[i] << 16)));
  }
  memcpy(&sums, s, sizeof s);
  return sums;
}

inline __m512i madd_epi16(__m512i a, __m512i b) {
  return join<__m512i>(_mm256_madd_epi16(half<__m256i>(a, 0), half<__m256i>(b, 0)),
                       _mm256_madd_epi16(half<__m256i>(a, 1), half<__m256i>(b, 1)));
}

inline void stream_si512(void* to, __m512i v) {
  _mm256_stream_si256(static_cast<__m256i*>(to), half<__m256i>(v, 0));
  _mm256_stream_si256(static_cast<__m256i*>(to) + 1, half<__m256i>(v, 1));
}

}  // namespace
}  // namespace xpyd::emulated

#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 ::xpyd::emulated::cvtps_epi32
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps ::xpyd::emulated::cvtepi32_ps
#undef _mm512_cvtps_pd
#define _mm512_cvtps_pd ::xpyd::emulated::cvtps_pd
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps ::xpyd::emulated::cvtph_ps
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32 ::xpyd::emulated::cvtepu8_epi32
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 ::xpyd::emulated::cvtepu16_epi32
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps ::xpyd::emulated::extractf32x8_ps
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps ::xpyd::emulated::dpbf16_ps
#undef _mm512_madd_epi16
#define _mm512_madd_epi16 ::xpyd::emulated::madd_epi16
#undef _mm512_stream_si512
#define _mm512_stream_si512 ::xpyd::emulated::stream_si512
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps ::xpyd::emulated::maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps ::xpyd::emulated::mask_storeu_ps

#endif
