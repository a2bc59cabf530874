// Tiles for AVX2 and FMA. Reached only through gemm.cc, after a run-time check of the CPU.
#include <immintrin.h>

#include "model/gemm_kernels.h"

namespace xpyd::model {
namespace {

struct Pair {
  __m256 low, high;  // columns 0-7 and 8-15
};

struct F32 {
  static constexpr size_t kRowBytes = kPanel * 4;
  static inline __attribute__((always_inline)) Pair load(const std::byte* w) {
    auto* p = reinterpret_cast<const float*>(w);
    return {_mm256_load_ps(p), _mm256_load_ps(p + 8)};
  }
};

// One 32-byte load holds 16 bf16; lane i of 32 bits holds column i below column i + 8. A shift and
// a mask make two f32 operands.
struct Bf16 {
  static constexpr size_t kRowBytes = kPanel * 2;
  static inline __attribute__((always_inline)) Pair load(const std::byte* w) {
    __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(w));
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000u)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_and_ps(_mm256_castsi256_ps(both), mask)};
  }
};

// sum += x * w in place. From the intrinsic g++ 12 makes the forms that overwrite a factor, moves
// the chains through other registers and, with 12 of them, through the stack.
inline __attribute__((always_inline)) void fma_into(__m256& sum, __m256 x, __m256 w) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
}

template <int kRows, int kPanels, class Weight>
inline __attribute__((always_inline)) void step(const float* x, const std::byte* w, size_t panel_bytes,
                                                __m256 (&sums)[kPanels][kRows][2]) {
  const __m256 first = _mm256_broadcast_ss(x);
#pragma GCC unroll 6
  for (int p = 0; p < kPanels; ++p) {
    // Keeps the loads of several panels or k apart: there are no registers for them.
    asm volatile("" ::: "memory");
    Pair pair = Weight::load(w + size_t(p) * panel_bytes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      __m256 b = kRows == 1 ? first : _mm256_broadcast_ss(x + r);
      fma_into(sums[p][r][0], b, pair.low);
      fma_into(sums[p][r][1], b, pair.high);
    }
  }
}

template <int kRows, int kPanels, class Weight>
void tile(const GemmTile& t) {
  __m256 sums[kPanels][kRows][2];
#pragma GCC unroll 6
  for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h)
        sums[p][r][h] = t.resume ? _mm256_load_ps(t.sums + ((p * kRows + r) * 2 + h) * 8) : _mm256_setzero_ps();
  const float* x = t.x;
  const std::byte* w = t.w;
  const std::byte* prefetch = t.prefetch;
  const size_t panel_bytes = t.panel_bytes;
  const size_t prefetch_step = size_t(t.prefetch_step);
  int k = 0;
  for (; k + 4 <= t.k; k += 4) {
    if (prefetch_step) {
#pragma GCC unroll 6
      for (int p = 0; p < kPanels; ++p) {
        auto* line = reinterpret_cast<const char*>(prefetch + size_t(p) * panel_bytes);
        _mm_prefetch(line, _MM_HINT_T0);
        if (prefetch_step > 64) _mm_prefetch(line + 64, _MM_HINT_T0);
      }
      prefetch += prefetch_step;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      step<kRows, kPanels, Weight>(x + i * kRows, w + size_t(i) * Weight::kRowBytes, panel_bytes, sums);
    x += 4 * kRows;
    w += 4 * Weight::kRowBytes;
  }
  for (; k < t.k; ++k) {
    step<kRows, kPanels, Weight>(x, w, panel_bytes, sums);
    x += kRows;
    w += Weight::kRowBytes;
  }
#pragma GCC unroll 6
  for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) _mm256_store_ps(t.sums + ((p * kRows + r) * 2 + h) * 8, sums[p][r][h]);
}

void add(float* into, const float* from, int n) {
  for (int i = 0; i < n; i += 8)
    _mm256_store_ps(into + i, _mm256_add_ps(_mm256_load_ps(into + i), _mm256_load_ps(from + i)));
}

}  // namespace

extern const GemmKernels kAvx2Kernels;
const GemmKernels kAvx2Kernels = {XPYD_TILES(F32), XPYD_TILES(Bf16), add};

}  // namespace xpyd::model
