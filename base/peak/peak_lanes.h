// The peak loops over vectors of any width (base/lanes.h).
#include <cstdint>

#include "base/lanes.h"
#include "base/peak/peak_kernels.h"

namespace xpyd {
namespace {

// Twelve independent chains: two FMA pipes with four to five cycles of latency need at least ten.
double fma_peak(long iterations, float* sink) {
  constexpr int kChains = 12;
  Floats sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = splat(float(i));
  const Floats a = splat(0.5f), b = splat(1.0f);  // converges to 2, so never denormal
  for (long n = 0; n < iterations; ++n)
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = fma(sums[i], a, b);
  for (int i = 1; i < kChains; ++i) sums[0] += sums[i];
  *sink = sums[0][0];
  return double(iterations) * kChains * kLanes * 2;
}

// One stream from one core does not saturate DRAM; eight do (on two cores four reach 0.93 of eight).
void read_peak(const std::byte* p, size_t bytes, float* sink) {
  Line sums[kPeakRows] = {};
  for (const std::byte* end = p + bytes; p < end; p += kPeakRows * kPeakRowBytes)
    for (size_t i = 0; i < kPeakRowBytes; i += 64)
#pragma GCC unroll 8
      for (int r = 0; r < kPeakRows; ++r) {
        const std::byte* row = p + size_t(r) * kPeakRowBytes + i;
#pragma GCC unroll 2
        for (size_t at = 0; at < 64; at += sizeof(Line)) sums[r] ^= load_line(row + at);
      }
  for (int r = 1; r < kPeakRows; ++r) sums[0] ^= sums[r];
  uint64_t all = 0;
  for (size_t i = 0; i < sizeof(Line) / 8; ++i) all ^= uint64_t(sums[0][i]);
  *sink = float(all);
}

void copy_peak(std::byte* to, const std::byte* from, size_t bytes) {
  constexpr int kLines = int(128 / sizeof(Line));
  for (size_t i = 0; i < bytes; i += 128) {
    Line lines[kLines];
#pragma GCC unroll 4
    for (int j = 0; j < kLines; ++j) lines[j] = load_line(from + i + size_t(j) * sizeof(Line));
#pragma GCC unroll 4
    for (int j = 0; j < kLines; ++j) stream(reinterpret_cast<Line*>(to + i) + j, lines[j]);
  }
  _mm_sfence();
}

}  // namespace
}  // namespace xpyd
