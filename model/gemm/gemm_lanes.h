// The tiles of gemm_kernels.h for AVX2 and AVX-512 from one source. The including file's instruction set decides the
// vector width; a panel's 16 columns are kParts vectors. Only gemm.cc calls these, after a run-time check of the CPU.
#pragma once

#include <type_traits>

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
// Adds the products of codes and of the integers of a cell: two of 16 bits or four of 8.
#if defined(XPYD_VNNI)
constexpr bool kVnni = true;
template <int kXBits>
XPYD_INLINE void dot_into(Ints& sum, Halves codes, int cell) {
  const __m512i x = _mm512_set1_epi32(cell);
  sum = Ints(kXBits == 16 ? _mm512_dpwssd_epi32(__m512i(sum), __m512i(codes), x)
                          : _mm512_dpbusd_epi32(__m512i(sum), __m512i(codes), x));
}
#else
constexpr bool kVnni = false;
template <int>
XPYD_INLINE void dot_into(Ints& sum, Halves codes, int cell) {
  sum += Ints(_mm512_madd_epi16(__m512i(codes), _mm512_set1_epi32(cell)));
}
template <int>
XPYD_INLINE void dot_into(Halves& sum, Halves codes, int cell) {
  sum += Halves(_mm512_maddubs_epi16(__m512i(codes), _mm512_set1_epi32(cell)));
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
// Without the asm, g++ 12 computes all products of a step before it adds them, for which there are no registers.
#define XPYD_DOT(multiply, add, sum, codes, cell)                                       \
  __m256i product;                                                                      \
  asm volatile(multiply " %3, %2, %1\n\t" add " %1, %0, %0" : "+x"(sum), "=&x"(product) \
               : "x"(codes), "x"(_mm256_set1_epi32(cell)))
template <int>
XPYD_INLINE void dot_into(Ints& sum, Halves codes, int cell) {
  XPYD_DOT("vpmaddwd", "vpaddd", sum, codes, cell);
}
template <int>
XPYD_INLINE void dot_into(Halves& sum, Halves codes, int cell) {
  XPYD_DOT("vpmaddubsw", "vpaddw", sum, codes, cell);
}
constexpr bool kVnni = false;
// 16 registers: 12 accumulators of 8 floats, two weights, one broadcast and one mask.
constexpr TileShapes kShapes = {6, {0, 6, 3, 2, 1, 1, 1}};
// Quantised weights need registers for unpacking.
constexpr TileShapes kCodeShapes = {6, {0, 4, 2, 1, 1, 1, 1}};
constexpr TileShapes kDotShapes = {5, {0, 5, 2, 1, 1, 1}};

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

// Quantised values of a column's lane. Byte k of it holds int8's k, or int4's k and, above it, k + 4.
template <int kBits_>
struct QuantisedRows {
  static constexpr int kBits = kBits_, kStep = 32 / kBits;
  static XPYD_INLINE Floats load(const std::byte* w, int i, const std::byte* behind, int h) {
    const Words code = read<Words>(w + h * kLanes * 4) >> (i % 4 * 8 + i / 4 * 4) & ((1u << kBits) - 1);
    return __builtin_convertvector(Ints(code) - zeros(behind, h), Floats) * scales(behind, h);
  }
  // What meets cell i of DotRows: words of 16 bits, or bytes.
  template <int kXBits>
  static XPYD_INLINE Halves cell(Halves w, int i) {
    if (kXBits == 8 && kBits == 8) return w;
    const Halves right = w >> (kBits * i);
    if (kXBits == 8) return right & uint16_t(0x0f0f);
    return kBits * (i + 1) == 16 ? right : right & uint16_t((1 << kBits) - 1);
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
constexpr int kAhead = 1024;
XPYD_INLINE void prefetch_codes(const std::byte* at, int ahead) {
  _mm_prefetch(reinterpret_cast<const char*>(at) + ahead, _MM_HINT_T0);
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
    for (int p = 0; p < kPanels; ++p) prefetch_codes(w + size_t(p) * panel_bytes, kAhead);
    XPYD_UNROLL(8)
    for (int i = 0; i < kStep; ++i) step<kRows, kPanels, Weight>(x + i * kRows, w, i, panel_bytes, behind, sums);
    x += kStep * kRows;
    w += kStep * kPanel * Weight::kBits / 8;
  }
  for (int i = 0; k + i < t.k; ++i) step<kRows, kPanels, Weight>(x + i * kRows, w, i, panel_bytes, behind, sums);
  store_sums(t, sums);
}

// With 4 bits, 16 products of at most 15 * 127 stay below 2^15, so 16-bit sums take a whole run of 8-bit x.
template <int kXBits>
using Dots = std::conditional_t<kXBits == 16 || kVnni, Ints, Halves>;
XPYD_INLINE Ints to_ints(Ints dots) { return dots; }
XPYD_INLINE Ints to_ints(Halves dots) {
  Ints ints = {};
  dot_into<16>(ints, dots, 0x00010001);
  return ints;
}

// Adds a run to `sums`: (dots - zero * sum of x) * (scale of x * scale of the weights).
template <int kRows, int kPanels, class Dots, class Sum>
XPYD_INLINE void add_run(const Dots (&dots)[kPanels][kRows][kParts], const DotRows<kRows>* x, const std::byte* behind,
                         size_t panel_bytes, Sum (&sums)[kPanels][kRows][kParts]) {
  XPYD_UNROLL(6)
  for (int p = 0; p < kPanels; ++p) XPYD_UNROLL(2)
  for (int h = 0; h < kParts; ++h) {
    const Floats scale = scales(behind + size_t(p) * panel_bytes, h);
    const Ints zero = zeros(behind + size_t(p) * panel_bytes, h);
    XPYD_UNROLL(12)
    for (int r = 0; r < kRows; ++r) {
      const Ints dot = to_ints(dots[p][r][h]) + zero * x->less[r];
      sums[p][r][h] = fma(__builtin_convertvector(dot, Floats), splat(x->scale[r]) * scale, sums[p][r][h]);
    }
  }
}

// The same for sums in memory. If this were inlined, g++ 12 would spill dots: AVX2 has 16 registers.
template <int kRows, int kPanels, class Dots>
__attribute__((noinline)) void add_run_apart(const Dots (&dots)[kPanels][kRows][kParts], const DotRows<kRows>* x,
                                             const std::byte* behind, size_t panel_bytes, float* sums) {
  typedef Floats InMemory __attribute__((may_alias));
  add_run(dots, x, behind, panel_bytes, *reinterpret_cast<InMemory(*)[kPanels][kRows][kParts]>(sums));
}

// Integers times integers: words by VPMADDWD or VPDPWSSD, bytes by VPMADDUBSW or VPDPBUSD.
template <int kRows, int kPanels, class QuantisedRows, int kXBits>
void dot_tile(const GemmTile& t) {
  constexpr int kStep = QuantisedRows::kStep, kCells = kStep * kXBits / 32;
  constexpr int kRunBytes = kByteRun * kPanel * QuantisedRows::kBits / 8;
  static_assert(kXBits == 16 || kVnni || QuantisedRows::kBits == 4, "VPMADDUBSW saturates with 8-bit codes");
  constexpr bool kApart = kLanes == 8 && kXBits == 16;
  // The first run of a piece needs the scales, which lie behind the piece.
  constexpr int kXAhead = kXBits == 8 ? kMaxPiece * kPanel * QuantisedRows::kBits / 8 : kAhead;
  const size_t panel_bytes = t.panel_bytes;
  const std::byte* w = t.w;
  const float* x = t.x;
  Floats sums[kPanels][kRows][kParts];
  if (!kApart)
    load_sums(t, sums);
  else if (!t.resume)
    for (int i = 0; i < kPanels * kRows * kPanel; i += kLanes) store(t.sums + i, splat(0));
  for (int piece = 0; piece < t.pieces; ++piece, w += 3 * kPanel) {
    const std::byte* behind = w + t.k * kPanel * QuantisedRows::kBits / 8;
    while (w < behind) {
      const auto* rows = reinterpret_cast<const DotRows<kRows>*>(x);
      const auto* cells = rows->cells;
      const std::byte* end = kXBits == 8 && behind - w > kRunBytes ? w + kRunBytes : behind;
      Dots<kXBits> dots[kPanels][kRows][kParts] = {};
      for (; w < end; w += 64, cells += kCells) XPYD_UNROLL(6)
      for (int p = 0; p < kPanels; ++p) {
        const std::byte* codes = w + size_t(p) * panel_bytes;
        if (kRows == 1) prefetch_codes(codes, kXAhead);
        Halves parts[kParts];
        XPYD_UNROLL(2)
        for (int h = 0; h < kParts; ++h) parts[h] = read<Halves>(codes + h * kLanes * 4);
        XPYD_UNROLL(4)
        for (int i = 0; i < kCells; ++i) {
          Halves of[kParts];
          XPYD_UNROLL(2)
          for (int h = 0; h < kParts; ++h) of[h] = QuantisedRows::template cell<kXBits>(parts[h], i);
          XPYD_UNROLL(12)
          for (int r = 0; r < kRows; ++r) XPYD_UNROLL(2)
          for (int h = 0; h < kParts; ++h) dot_into<kXBits>(dots[p][r][h], of[h], cells[i][r]);
        }
      }
      x = reinterpret_cast<const float*>(cells);
      if constexpr (kApart) {
        Dots<kXBits> stored[kPanels][kRows][kParts];
        XPYD_UNROLL(6)
        for (int p = 0; p < kPanels; ++p) XPYD_UNROLL(12)
        for (int r = 0; r < kRows; ++r) XPYD_UNROLL(2)
        for (int h = 0; h < kParts; ++h) stored[p][r][h] = dots[p][r][h];
        add_run_apart(stored, rows, behind, panel_bytes, t.sums);
      } else {
        add_run(dots, rows, behind, panel_bytes, sums);
      }
    }
  }
  if (!kApart) store_sums(t, sums);
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
template <class QuantisedRows, int kXBits>
struct DotTilesOf {
  template <int kRows, int kPanels>
  struct At {
    static constexpr GemmTileFn run = dot_tile<kRows, kPanels, QuantisedRows, kXBits>;
  };
};

constexpr GemmKernels kTheseKernels = {tiles_of<TilesOf<F32>::At, kShapes>(),
                                       tiles_of<TilesOf<Bf16>::At, kShapes>(),
                                       tiles_of<TilesOf<F16>::At, kShapes>(),
                                       tiles_of<TilesOf<Int8>::At, kCodeShapes>(),
                                       tiles_of<TilesOf<Int4>::At, kCodeShapes>(),
                                       tiles_of<TilesOf<Fp8>::At, kCodeShapes>(),
                                       add};
template <class QuantisedRows, int kXBits>
constexpr DotTiles kDots = {kXBits, tiles_of<DotTilesOf<QuantisedRows, kXBits>::template At, kDotShapes>()};
constexpr DotKernels kTheseDots = {kDots<Int8, 16>, kDots<Int4, 16>, {}};
// Without VPDPBUSD, int8 is slower with 8-bit x than with 16-bit x, and VPMADDUBSW would saturate (README.md).
constexpr DotKernels kTheseDots8 = {kDots<Int8, kVnni ? 8 : 16>, kDots<Int4, 8>, {}};

}  // namespace
}  // namespace xpyd::model
