// Tiles for AVX2 and FMA. Reached only through gemm.cc, after a run-time check of the CPU.
#include <immintrin.h>

#include "model/gemm_kernels.h"

namespace xpyd::model {
namespace {

struct Pair {
  __m256 low, high;  // columns 0-7 and 8-15
};

// load(w, i, behind): k = i of kStep, which is known where it is compiled; `behind`: what stands behind a piece's codes.
struct F32 {
  static constexpr int kStep = 4, kBits = 32;
  static inline __attribute__((always_inline)) Pair load(const std::byte* w, int i, const std::byte*) {
    auto* p = reinterpret_cast<const float*>(w) + i * kPanel;
    return {_mm256_load_ps(p), _mm256_load_ps(p + 8)};
  }
};

// A lane of 32 bits holds k and, above it, k + 1 of a column: a shift or a mask makes an f32 operand.
struct Bf16 {
  static constexpr int kStep = 4, kBits = 16;
  static inline __attribute__((always_inline)) Pair load(const std::byte* w, int i, const std::byte*) {
    auto* p = reinterpret_cast<const __m256i*>(w) + i / 2 * 2;
    const __m256i low = _mm256_load_si256(p), high = _mm256_load_si256(p + 1);
    if (i % 2 == 0)
      return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
    const __m256i mask = _mm256_set1_epi32(int(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(low, mask)), _mm256_castsi256_ps(_mm256_and_si256(high, mask))};
  }
};

struct F16 {
  static constexpr int kStep = 4, kBits = 16;
  static inline __attribute__((always_inline)) Pair load(const std::byte* w, int i, const std::byte*) {
    auto* p = reinterpret_cast<const __m128i*>(w) + 2 * i;
    return {_mm256_cvtph_ps(_mm_load_si128(p)), _mm256_cvtph_ps(_mm_load_si128(p + 1))};
  }
};

// What stands behind the codes of a piece, of columns 8 h to 8 h + 7.
inline __attribute__((always_inline)) __m256 scales(const std::byte* behind, int h) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(behind) + h));
}
inline __attribute__((always_inline)) __m256i zeros(const std::byte* behind, int h) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(behind + 2 * kPanel + 8 * h)));
}

// pair(w, i): words of 16 bits, pair i of k as in DotRows. code(w, i): k = i, in lanes of 32.
template <class Codes>
struct Scaled {
  static inline __attribute__((always_inline)) __m256 value(const std::byte* w, int i, const std::byte* behind, int h) {
    const __m256i code = Codes::code(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w) + h), i);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(code, zeros(behind, h))), scales(behind, h));
  }
  static inline __attribute__((always_inline)) Pair load(const std::byte* w, int i, const std::byte* behind) {
    return {value(w, i, behind, 0), value(w, i, behind, 1)};
  }
};
struct Int8 : Scaled<Int8> {
  static constexpr int kStep = 4, kPairs = 2, kBits = 8;
  static inline __attribute__((always_inline)) __m256i pair(__m256i w, int i) {
    return i == 0 ? _mm256_and_si256(w, _mm256_set1_epi16(255)) : _mm256_srli_epi16(w, 8);
  }
  static inline __attribute__((always_inline)) __m256i code(__m256i w, int i) {
    return _mm256_and_si256(_mm256_srli_epi32(w, 8 * i), _mm256_set1_epi32(255));
  }
};
struct Int4 : Scaled<Int4> {
  static constexpr int kStep = 8, kPairs = 4, kBits = 4;
  static inline __attribute__((always_inline)) __m256i pair(__m256i w, int i) {
    if (i == 3) return _mm256_srli_epi16(w, 12);
    return _mm256_and_si256(_mm256_srli_epi16(w, 4 * i), _mm256_set1_epi16(15));
  }
  static inline __attribute__((always_inline)) __m256i code(__m256i w, int i) {
    return _mm256_and_si256(_mm256_srli_epi32(w, 4 * i), _mm256_set1_epi32(15));
  }
};

// e4m3 in the upper byte of a lane, shifted by the four bits of exponent that an f32 has more, is the number times
// 2^-120; its sign, which the shift repeats, is cut back.
struct Fp8 {
  static constexpr int kStep = 4, kBits = 8;
  static inline __attribute__((always_inline)) __m256 value(const std::byte* w, const std::byte* behind, int h) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w + 8 * h)));
    const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(_mm256_slli_epi32(code, 24), 4),
                                          _mm256_set1_epi32(int(0x87f00000u)));
    const __m256 number = _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
    return _mm256_mul_ps(number, _mm256_loadu_ps(reinterpret_cast<const float*>(behind) + 8 * h));
  }
  static inline __attribute__((always_inline)) Pair load(const std::byte* w, int i, const std::byte* behind) {
    return {value(w + i * kPanel, behind, 0), value(w + i * kPanel, behind, 1)};
  }
};

// sum += x * w in place. From the intrinsic g++ 12 makes the forms that overwrite a factor, moves
// the chains through other registers and, with 12 of them, through the stack.
inline __attribute__((always_inline)) void fma_into(__m256& sum, __m256 x, __m256 w) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
}

template <int kRows, int kPanels, class Weight>
inline __attribute__((always_inline)) void step(const float* x, const std::byte* w, int i, size_t panel_bytes,
                                                const std::byte* behind, __m256 (&sums)[kPanels][kRows][2]) {
  const __m256 first = _mm256_broadcast_ss(x);
#pragma GCC unroll 6
  for (int p = 0; p < kPanels; ++p) {
    // Keeps the loads of several panels or k apart: there are no registers for them.
    asm volatile("" ::: "memory");
    Pair pair = Weight::load(w + size_t(p) * panel_bytes, i, behind + size_t(p) * panel_bytes);
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
  const std::byte *w = t.w, *behind = t.w + t.k * kPanel * Weight::kBits / 8;
  const std::byte* prefetch = t.prefetch;
  const size_t panel_bytes = t.panel_bytes;
  const size_t prefetch_step = size_t(t.prefetch_step);
  int k = 0;
  constexpr int kStep = Weight::kStep;
  for (; k + kStep <= t.k; k += kStep) {
    if (prefetch_step) {
#pragma GCC unroll 6
      for (int p = 0; p < kPanels; ++p) {
        auto* line = reinterpret_cast<const char*>(prefetch + size_t(p) * panel_bytes);
        _mm_prefetch(line, _MM_HINT_T0);
        if (prefetch_step > 64) _mm_prefetch(line + 64, _MM_HINT_T0);
      }
      prefetch += prefetch_step;
    }
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i) step<kRows, kPanels, Weight>(x + i * kRows, w, i, panel_bytes, behind, sums);
    x += kStep * kRows;
    w += kStep * kPanel * Weight::kBits / 8;
  }
  for (int i = 0; k + i < t.k; ++i) step<kRows, kPanels, Weight>(x + i * kRows, w, i, panel_bytes, behind, sums);
#pragma GCC unroll 6
  for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) _mm256_store_ps(t.sums + ((p * kRows + r) * 2 + h) * 8, sums[p][r][h]);
}

// In place and in this order: g++ 12 would add the products of a step up first, for which there are no registers.
inline __attribute__((always_inline)) void add_into(__m256i& sum, __m256i value) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(value));
}

template <int kRows, int kPanels, class Codes>
void dot_tile(const GemmTile& t) {
  const auto* x = reinterpret_cast<const DotRows<kRows>*>(t.x);
  __m256i dots[kPanels][kRows][2];
#pragma GCC unroll 6
  for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) dots[p][r][0] = dots[p][r][1] = _mm256_setzero_si256();
  const std::byte* w = t.w;
  const size_t panel_bytes = t.panel_bytes;
  const auto* pairs = x->pairs;
  for (int k = 0; k < t.k; k += Codes::kStep, w += 64, pairs += Codes::kPairs)
#pragma GCC unroll 6
    for (int p = 0; p < kPanels; ++p) {
      auto* codes = reinterpret_cast<const __m256i*>(w + size_t(p) * panel_bytes);
      const __m256i low = _mm256_loadu_si256(codes), high = _mm256_loadu_si256(codes + 1);
      // Five streams, which stop at every piece for its scales: asked for early.
      if (kRows == 1) _mm_prefetch(reinterpret_cast<const char*>(codes) + 1024, _MM_HINT_T0);
#pragma GCC unroll 4
      for (int i = 0; i < Codes::kPairs; ++i) {
        const __m256i a = Codes::pair(low, i), b = Codes::pair(high, i);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          int both;
          __builtin_memcpy(&both, pairs[i][r], 4);
          const __m256i v = _mm256_set1_epi32(both);
          add_into(dots[p][r][0], _mm256_madd_epi16(a, v));
          add_into(dots[p][r][1], _mm256_madd_epi16(b, v));
        }
      }
    }
#pragma GCC unroll 6
  for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const std::byte* behind = w + size_t(p) * panel_bytes;
      const __m256 scale = scales(behind, h);
      const __m256i zero = zeros(behind, h);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        float* to = t.sums + ((p * kRows + r) * 2 + h) * 8;
        const __m256i dot = _mm256_sub_epi32(dots[p][r][h], _mm256_mullo_epi32(zero, _mm256_set1_epi32(x->sum[r])));
        const __m256 sum = t.resume ? _mm256_load_ps(to) : _mm256_setzero_ps();
        const __m256 by = _mm256_mul_ps(_mm256_set1_ps(x->scale[r]), scale);
        _mm256_store_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), by, sum));
      }
    }
}

void add(float* into, const float* from, int n) {
  for (int i = 0; i < n; i += 8)
    _mm256_store_ps(into + i, _mm256_add_ps(_mm256_load_ps(into + i), _mm256_load_ps(from + i)));
}

}  // namespace

extern const GemmKernels kAvx2Kernels;
const GemmKernels kAvx2Kernels = {XPYD_TILES(F32),      XPYD_TILES(Bf16),     XPYD_TILES(F16),
                                  XPYD_TILES(Int8),     XPYD_TILES(Int4),     XPYD_TILES(Fp8),
                                  XPYD_DOT_TILES(Int8), XPYD_DOT_TILES(Int4), add};

}  // namespace xpyd::model
