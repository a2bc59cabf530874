// The loops that base/peak/peak.cc times, one set for each instruction set.
#pragma once

#include <cstddef>

#include "base/cpu.h"

namespace xpyd {

inline constexpr size_t kPeakRowBytes = 128 << 10;  // of each row; several rows are read side by side
inline constexpr int kPeakRows = 8;

struct PeakKernels {
  Isa needs;
  double (*fma)(long iterations, float* sink);  // returns the operations done
  void (*read)(const std::byte* p, size_t bytes,
               float* sink);  // a multiple of rows x row bytes
  void (*copy)(std::byte* to, const std::byte* from,
               size_t bytes);  // multiples of 128, 64-byte aligned
};

extern const PeakKernels kPortablePeak;
#if defined(__x86_64__)
extern const PeakKernels kAvx2Peak, kAvx512Peak;
// As PeakKernels::fma, for bfloat16 and for bytes, which have instructions of their own (Isa::avx512_bf16,
// avx512_vnni).
double bf16_dot_peak(long iterations, float* sink);
double int8_dot_peak(long iterations, float* sink);
#endif

}  // namespace xpyd
