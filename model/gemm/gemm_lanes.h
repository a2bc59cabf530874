// The tiles of gemm_kernels.h for AVX2 and AVX-512 from one source. The including file's instruction set decides the
// vector width; a panel's 16 columns are kParts vectors. Only gemm.cc calls these, after a run-time check of the CPU.
#pragma once

#include "base/lanes.h"
#include "model/gemm/gemm_kernels.h"

#define XPYD_INLINE inline __attribute__((always_inline))
#if defined(XPYD_EMULATE) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define XPYD_UNROLL(n)  // tests run these builds, and they compile faster without
#else
#define XPYD_PRAGMA(text) _Pragma(#text)
#define XPYD_UNROLL(n) XPYD_PRAGMA(GCC unroll n)
#endif

namespace xpyd::model {
namespace {

constexpr int kParts = kPanel / kLanes;
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(4 * kLanes)));

template <class Vector>
XPYD_INLINE Vector read(const void* from) {
  Vector v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
XPYD_INLINE Floats as_floats(Words bits) { return reinterpret_cast<Floats>(bits); }

#if defined(__AVX512F__) || defined(XPYD_EMULATE)

XPYD_INLINE Floats halves_to_floats(const void* from) { return _mm512_cvtph_ps(read<__m256i>(from)); }
XPYD_INLINE Words bytes_to_words(const void* from) { return Words(_mm512_cvtepu8_epi32(read<__m128i>(from))); }
XPYD_INLINE void fma_into(Floats& sum, Floats x, Floats w) { sum = _mm512_fmadd_ps(x, w, sum); }
XPYD_INLINE void dot_into(Ints& sum, Halves codes, int pair) {
#if defined(XPYD_VNNI)
  sum = Ints(_mm512_dpwssd_epi32(__m512i(sum), __m512i(codes), _mm512_set1_epi32(pair)));
#else
  sum += Ints(_mm512_madd_epi16(__m512i(codes), _mm512_set1_epi32(pair)));
#endif
}
#if defined(XPYD_VNNI)
using ByteSums = Ints;
XPYD_INLINE void bytes_into(ByteSums& sum, Words codes, int four) {
  sum = Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(codes), _mm512_set1_epi32(four)));
}
#else
using ByteSums = Halves;
XPYD_INLINE void bytes_into(ByteSums& sum, Words codes, int four) {
  sum += Halves(_mm512_maddubs_epi16(__m512i(codes), _mm512_set1_epi32(four)));
}
#endif
// Rows x panels for 32 registers: 12 or more chains, and one or two vectors of weights.
constexpr TileShapes kShapes = {12, {0, 6, 6, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1}};
constexpr TileShapes kCodeShapes = kShapes, kDotShapes = kShapes;

#else

XPYD_INLINE Floats halves_to_floats(const void* from) { return _mm256_cvtph_ps(read<__m128i>(from)); }
// g++ 12 converts a vector of 8 bytes one element at a time.
XPYD_INLINE Words bytes_to_words(const void* from) {
  return Words(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
}
// The asm keeps the sum in place. For the intrinsic, g++ 12 picks forms that overwrite a factor; it then moves 12
// chains through other registers and spills some.
XPYD_INLINE void fma_into(Floats& sum, Floats x, Floats w) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
}
// The asm keeps this order. g++ 12 would add the products of a step first, for which there are no registers.
XPYD_INLINE void dot_into(Ints& sum, Halves codes, int pair) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(__m256i(codes), _mm256_set1_epi32(pair))));
}
using ByteSums = Halves;
XPYD_INLINE void bytes_into(ByteSums& sum, Words codes, int four) {
  asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(_mm256_maddubs_epi16(__m256i(codes), _mm256_set1_epi32(four))));
}
// 16 registers: 12 accumulators of 8 floats, two weights, one broadcast and one mask.
constexpr TileShapes kShapes = {6, {0, 6, 3, 2, 1, 1, 1}};
// Quantised weights need registers for unpacking.
constexpr TileShapes kCodeShapes = {6, {0, 4, 2, 1, 1, 1, 1}};
constexpr TileShapes kDotShapes = {4, {0, 5, 2, 1, 1}};

#endif

// ---- Weight formats. load(w, i, behind, h) returns part h of the 16 columns at k = i of kStep; i is a compile-time
// constant after unrolling. `behind` points at the scales and zeros that follow a piece.

struct F32 {
  static constexpr int kStep = 4, kBits = 32;
  static XPYD_INLINE Floats load(const std::byte* w, int i, const std::byte*, int h) {
    return read<Floats>(w + (i * kPanel + h * kLanes) * 4);
  }
};

// A 32-bit lane holds k and, above it, k + 1 of one column. A shift or a mask makes it an f32.
struct Bf16 {
  static constexpr int kStep = 4, kBits = 16;
  static XPYD_INLINE Floats load(const std::byte* w, int i, const std::byte*, int h) {
    const Words both = read<Words>(w + (i / 2 * kPanel + h * kLanes) * 4);
    return as_floats(i % 2 == 0 ? both << 16 : both & 0xffff0000u);
  }
};

struct F16 {
  static constexpr int kStep = 4, kBits = 16;
  static XPYD_INLINE Floats load(const std::byte* w, int i, const std::byte*, int h) {
    return halves_to_floats(w + (i * kPanel + h * kLanes) * 2);
  }
};

XPYD_INLINE Floats scales(const std::byte* behind, int h) { return halves_to_floats(behind + h * kLanes * 2); }
XPYD_INLINE Ints zeros(const std::byte* behind, int h) {
  return Ints(bytes_to_words(behind + 2 * kPanel + h * kLanes));
}

// Quantised values of a column's lane. Byte k of it holds int8's k, or int4's k and, above it, k + 4. pair(w, i)
// returns 16-bit words, pair i of k as in DotRows.
template <int kBits_>
struct QuantisedRows {
  static constexpr int kBits = kBits_, kStep = 32 / kBits, kPairs = kStep / 2;
  static XPYD_INLINE Floats load(const std::byte* w, int i, const std::byte* behind, int h) {
    const Words code = read<Words>(w + h * kLanes * 4) >> (i % 4 * 8 + i / 4 * 4) & ((1u << kBits) - 1);
    return __builtin_convertvector(Ints(code) - zeros(behind, h), Floats) * scales(behind, h);
  }
  static XPYD_INLINE Halves pair(Halves w, int i) {
    const Halves right = w >> (kBits * i);
    return i + 1 == kPairs ? right : right & uint16_t((1 << kBits) - 1);
  }
};
using Int8 = QuantisedRows<8>;
using Int4 = QuantisedRows<4>;

// e4m3 in the upper byte of a word, shifted right by the one exponent bit that f16 has more, is the number times 2^-8,
// subnormals included. The arithmetic shift repeats the sign, and the mask removes the copy. A panel stores 2^8 times
// the scale.
struct Fp8 {
  static constexpr int kStep = 2, kBits = 8;
  static XPYD_INLINE Floats load(const std::byte* w, int i, const std::byte* behind, int h) {
    typedef int16_t Signed __attribute__((vector_size(2 * kPanel)));
    typedef uint16_t Unsigned __attribute__((vector_size(2 * kPanel)));
    Unsigned both = read<Unsigned>(w);
    if (i % 2 == 0) both <<= 8;
    const Unsigned halves = Unsigned(Signed(both) >> 1) & uint16_t(0xbf80);
    return halves_to_floats(reinterpret_cast<const std::byte*>(&halves) + h * kLanes * 2) *
           read<Floats>(behind + h * kLanes * 4);
  }
};

// ---- Tiles

// With one row, a tile reads a few streams that pause at every piece for its scales, so it prefetches early.
XPYD_INLINE void prefetch_codes(const std::byte* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at) + 1024, _MM_HINT_T0);
}

template <int kRows, int kPanels>
XPYD_INLINE void load_sums(const GemmTile& t, Floats (&sums)[kPanels][kRows][kParts]) {
  XPYD_UNROLL(6)
  for (int p = 0; p < kPanels; ++p) XPYD_UNROLL(12)
  for (int r = 0; r < kRows; ++r) XPYD_UNROLL(2)
  for (int h = 0; h < kParts; ++h)
    sums[p][r][h] = t.resume ? load(t.sums + (p * kRows + r) * kPanel + h * kLanes) : splat(0);
}
template <int kRows, int kPanels>
XPYD_INLINE void store_sums(const GemmTile& t, const Floats (&sums)[kPanels][kRows][kParts]) {
  XPYD_UNROLL(6)
  for (int p = 0; p < kPanels; ++p) XPYD_UNROLL(12)
  for (int r = 0; r < kRows; ++r) XPYD_UNROLL(2)
  for (int h = 0; h < kParts; ++h) store(t.sums + (p * kRows + r) * kPanel + h * kLanes, sums[p][r][h]);
}

template <int kRows, int kPanels, class Weight>
XPYD_INLINE void step(const float* x, const std::byte* w, int i, size_t panel_bytes, const std::byte* behind,
                      Floats (&sums)[kPanels][kRows][kParts]) {
  const Floats first = splat(x[0]);
  XPYD_UNROLL(6)
  for (int p = 0; p < kPanels; ++p) {
    // Keeps the loads of different panels and k apart; there are no registers for them.
    asm volatile("" ::: "memory");
    Floats parts[kParts];
    XPYD_UNROLL(2)
    for (int h = 0; h < kParts; ++h)
      parts[h] = Weight::load(w + size_t(p) * panel_bytes, i, behind + size_t(p) * panel_bytes, h);
    XPYD_UNROLL(12)
    for (int r = 0; r < kRows; ++r) {
      const Floats b = kRows == 1 ? first : splat(x[r]);
      XPYD_UNROLL(2)
      for (int h = 0; h < kParts; ++h) fma_into(sums[p][r][h], b, parts[h]);
    }
  }
}

template <int kRows, int kPanels, class Weight>
void tile(const GemmTile& t) {
  Floats sums[kPanels][kRows][kParts];
  load_sums(t, sums);
  const float* x = t.x;
  const std::byte *w = t.w, *behind = t.w + t.k * kPanel * Weight::kBits / 8;
  const std::byte* prefetch = t.prefetch;
  const size_t panel_bytes = t.panel_bytes;
  const size_t prefetch_step = size_t(t.prefetch_step);
  constexpr int kStep = Weight::kStep;
  int k = 0;
  for (; k + kStep <= t.k; k += kStep) {
    if (prefetch_step) {
      XPYD_UNROLL(6)
      for (int p = 0; p < kPanels; ++p) {
        auto* line = reinterpret_cast<const char*>(prefetch + size_t(p) * panel_bytes);
        _mm_prefetch(line, _MM_HINT_T0);
        if (prefetch_step > 64) _mm_prefetch(line + 64, _MM_HINT_T0);
      }
      prefetch += prefetch_step;
    }
    if constexpr (kRows == 1 && Weight::kBits <= 8) XPYD_UNROLL(6)
    for (int p = 0; p < kPanels; ++p) prefetch_codes(w + size_t(p) * panel_bytes);
    XPYD_UNROLL(8)
    for (int i = 0; i < kStep; ++i) step<kRows, kPanels, Weight>(x + i * kRows, w, i, panel_bytes, behind, sums);
    x += kStep * kRows;
    w += kStep * kPanel * Weight::kBits / 8;
  }
  for (int i = 0; k + i < t.k; ++i) step<kRows, kPanels, Weight>(x + i * kRows, w, i, panel_bytes, behind, sums);
  store_sums(t, sums);
}

// Adds a run to `sums`: (dots - zero * sum of x) * (scale of x * scale of the weights).
template <int kRows, int kPanels>
XPYD_INLINE void add_run(Ints (&dots)[kPanels][kRows][kParts], const DotRows<kRows>* x, const std::byte* behind,
                         size_t panel_bytes, Floats (&sums)[kPanels][kRows][kParts]) {
  XPYD_UNROLL(6)
  for (int p = 0; p < kPanels; ++p) XPYD_UNROLL(2)
  for (int h = 0; h < kParts; ++h) {
    const Floats scale = scales(behind + size_t(p) * panel_bytes, h);
    const Ints zero = zeros(behind + size_t(p) * panel_bytes, h);
    XPYD_UNROLL(12)
    for (int r = 0; r < kRows; ++r) {
      const Ints dot = dots[p][r][h] + zero * x->less[r];
      sums[p][r][h] = fma(__builtin_convertvector(dot, Floats), splat(x->scale[r]) * scale, sums[p][r][h]);
    }
  }
}

template <int kRows, int kPanels, class QuantisedRows>
void dot_tile(const GemmTile& t) {
  const auto* x = reinterpret_cast<const DotRows<kRows>*>(t.x);
  Ints dots[kPanels][kRows][kParts] = {};
  const std::byte* w = t.w;
  const size_t panel_bytes = t.panel_bytes;
  const auto* pairs = x->cells;
  for (int k = 0; k < t.k; k += QuantisedRows::kStep, w += 64, pairs += QuantisedRows::kPairs) XPYD_UNROLL(6)
  for (int p = 0; p < kPanels; ++p) {
    const std::byte* codes = w + size_t(p) * panel_bytes;
    if (kRows == 1) prefetch_codes(codes);
    Halves parts[kParts];
    XPYD_UNROLL(2)
    for (int h = 0; h < kParts; ++h) parts[h] = read<Halves>(codes + h * kLanes * 4);
    XPYD_UNROLL(4)
    for (int i = 0; i < QuantisedRows::kPairs; ++i) {
      Halves words[kParts];
      XPYD_UNROLL(2)
      for (int h = 0; h < kParts; ++h) words[h] = QuantisedRows::pair(parts[h], i);
      XPYD_UNROLL(12)
      for (int r = 0; r < kRows; ++r) XPYD_UNROLL(2)
      for (int h = 0; h < kParts; ++h) dot_into(dots[p][r][h], words[h], pairs[i][r]);
    }
  }
  Floats sums[kPanels][kRows][kParts];
  load_sums(t, sums);
  add_run(dots, x, w, panel_bytes, sums);
  store_sums(t, sums);
}

// Bytes times bytes. Without VNNI, a product of two pairs has 16 bits and sums of 16 bits take a whole run, for which a
// code must have 4 bits: 16 products of at most 15 * 127 stay below 2^15. So codes of 8 bits take two passes.
template <int kRows, int kPanels, class QuantisedRows>
void byte_tile(const GemmTile& t) {
  constexpr int kBits = QuantisedRows::kBits, kStep = QuantisedRows::kStep, kCells = kStep / 4;
  constexpr bool kWide = sizeof(ByteSums{}[0]) == 4;
  constexpr int kPasses = kWide || kBits == 4 ? 1 : 2;
  Floats sums[kPanels][kRows][kParts];
  load_sums(t, sums);
  const std::byte* w = t.w;
  const size_t panel_bytes = t.panel_bytes, behind_bytes = 3 * kPanel;
  auto* x = reinterpret_cast<const int32_t*>(t.x);
  for (int piece = 0; piece < t.pieces; ++piece, w += behind_bytes) {
    const std::byte* behind = w + t.k * kPanel * kBits / 8;
    for (; w < behind;) {
      const auto* rows = reinterpret_cast<const DotRows<kRows>*>(x);
      const std::byte *end = behind - w > kByteRun * kPanel * kBits / 8 ? w + kByteRun * kPanel * kBits / 8 : behind,
                      *run = w;
      Ints dots[kPanels][kRows][kParts] = {};
      XPYD_UNROLL(2)
      for (int pass = 0; pass < kPasses; ++pass) {
        ByteSums bytes[kPanels][kRows][kParts] = {};
        const auto* cells = rows->cells;
        for (w = run; w < end; w += 64, cells += kCells) XPYD_UNROLL(6)
        for (int p = 0; p < kPanels; ++p) {
          const std::byte* codes = w + size_t(p) * panel_bytes;
          if (kRows == 1 && pass == 0) prefetch_codes(codes);
          Words parts[kParts];
          XPYD_UNROLL(2)
          for (int h = 0; h < kParts; ++h) parts[h] = read<Words>(codes + h * kLanes * 4);
          XPYD_UNROLL(2)
          for (int i = 0; i < kCells; ++i) {
            Words of[kParts];
            XPYD_UNROLL(2)
            for (int h = 0; h < kParts; ++h)
              of[h] = kWide && kBits == 8 ? parts[h] : parts[h] >> (4 * (i + pass)) & 0x0f0f0f0fu;
            XPYD_UNROLL(12)
            for (int r = 0; r < kRows; ++r) XPYD_UNROLL(2)
            for (int h = 0; h < kParts; ++h) bytes_into(bytes[p][r][h], of[h], cells[i][r]);
          }
        }
        XPYD_UNROLL(6)
        for (int p = 0; p < kPanels; ++p) XPYD_UNROLL(12)
        for (int r = 0; r < kRows; ++r) XPYD_UNROLL(2)
        for (int h = 0; h < kParts; ++h) {
          if constexpr (kWide)
            dots[p][r][h] = bytes[p][r][h];
          else
            dot_into(dots[p][r][h], bytes[p][r][h], pass == 0 ? 0x00010001 : 0x00100010);
        }
      }
      x += kRows * (2 + (end - run) / (kPanel * kBits / 8) / 4);
      add_run(dots, rows, behind, panel_bytes, sums);
    }
  }
  store_sums(t, sums);
}

void add(float* into, const float* from, int n) {
  for (int i = 0; i < n; i += kLanes) store(into + i, load(into + i) + load(from + i));
}

template <class Weight>
struct TilesOf {
  template <int kRows, int kPanels>
  struct At {
    static constexpr GemmTileFn run = tile<kRows, kPanels, Weight>;
  };
};
template <class QuantisedRows>
struct DotTilesOf {
  template <int kRows, int kPanels>
  struct At {
    static constexpr GemmTileFn run = dot_tile<kRows, kPanels, QuantisedRows>;
  };
};
template <class QuantisedRows>
struct ByteTilesOf {
  template <int kRows, int kPanels>
  struct At {
    static constexpr GemmTileFn run = byte_tile<kRows, kPanels, QuantisedRows>;
  };
};

constexpr GemmKernels kTheseKernels = {tiles_of<TilesOf<F32>::At, kShapes>(),
                                       tiles_of<TilesOf<Bf16>::At, kShapes>(),
                                       tiles_of<TilesOf<F16>::At, kShapes>(),
                                       tiles_of<TilesOf<Int8>::At, kCodeShapes>(),
                                       tiles_of<TilesOf<Int4>::At, kCodeShapes>(),
                                       tiles_of<TilesOf<Fp8>::At, kCodeShapes>(),
                                       add};
constexpr DotKernels kTheseDots = {
    16, tiles_of<DotTilesOf<Int8>::At, kDotShapes>(), tiles_of<DotTilesOf<Int4>::At, kDotShapes>(), {}};
constexpr DotKernels kTheseDots8 = {
    8, tiles_of<ByteTilesOf<Int8>::At, kDotShapes>(), tiles_of<ByteTilesOf<Int4>::At, kDotShapes>(), {}};

}  // namespace
}  // namespace xpyd::model
