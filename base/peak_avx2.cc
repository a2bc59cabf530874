// The measured limits of an AVX2 machine. Reached only after a run-time check of the CPU.
#include <immintrin.h>

#include "base/peak_kernels.h"

namespace xpyd {
namespace {

float sum_of(__m256 v) {
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, v);
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

// Twelve independent chains: two FMA pipes with four to five cycles of latency need at least ten.
double fma(long iterations, float* sink) {
  constexpr int kChains = 12;
  __m256 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm256_set1_ps(float(i));
  const __m256 a = _mm256_set1_ps(0.5f),
               b = _mm256_set1_ps(1.0f);  // converges to 2: never denormal
  for (long n = 0; n < iterations; ++n)
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = _mm256_fmadd_ps(sums[i], a, b);
  for (int i = 1; i < kChains; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  *sink = sum_of(sums[0]);
  return double(iterations) * kChains * 8 * 2;
}

// One stream does not saturate DRAM from one core, eight do (four reach 0.93 of them on two cores).
void read(const std::byte* p, size_t bytes, float* sink) {
  __m256 sums[kPeakRows];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  for (const std::byte* end = p + bytes; p < end; p += kPeakRows * kPeakRowBytes)
    for (size_t i = 0; i < kPeakRowBytes; i += 64)
#pragma GCC unroll 8
      for (int r = 0; r < kPeakRows; ++r) {
        auto* row = reinterpret_cast<const float*>(p + size_t(r) * kPeakRowBytes + i);
        sums[r] = _mm256_xor_ps(sums[r], _mm256_xor_ps(_mm256_load_ps(row), _mm256_load_ps(row + 8)));
      }
  for (int r = 1; r < kPeakRows; ++r) sums[0] = _mm256_xor_ps(sums[0], sums[r]);
  *sink = sum_of(sums[0]);
}

void copy(std::byte* to, const std::byte* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 128) {
    auto* in = reinterpret_cast<const __m256i*>(from + i);
    auto* out = reinterpret_cast<__m256i*>(to + i);
    __m256i v0 = _mm256_load_si256(in), v1 = _mm256_load_si256(in + 1), v2 = _mm256_load_si256(in + 2),
            v3 = _mm256_load_si256(in + 3);
    _mm256_stream_si256(out, v0);
    _mm256_stream_si256(out + 1, v1);
    _mm256_stream_si256(out + 2, v2);
    _mm256_stream_si256(out + 3, v3);
  }
  _mm_sfence();
}

}  // namespace

extern const PeakKernels kAvx2Peak;
const PeakKernels kAvx2Peak = {"avx2", Isa::avx2, fma, read, copy};

}  // namespace xpyd
