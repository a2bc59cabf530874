// The operations in which int8 and int4 differ, on vectors of 256 bits, and the register tile of products with codes
// (quantised_rows.h).
#pragma once

#include "attention/cpu/attention_lanes.h"

namespace xpyd::attention {
namespace {

inline __m256i load_cells(const float* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_cells(float* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
inline __m256i splat_cell(const float* p) { return _mm256_castps_si256(_mm256_broadcast_ss(p)); }
inline __m128i load_16(const std::byte* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m128i load_8(const std::byte* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }

// Keeps g++ from reordering integer additions into trees, for which there are not enough registers.
inline void in_turn(__m256i& sum) { __asm__("" : "+x"(sum)); }

struct Int8 {
  static constexpr Dtype kDtype = Dtype::int8;
  static constexpr int kBits = 8, kMask = 0x00ff00ff;
  static constexpr int kBlockCells = 1 << 20;  // cells of q that one sum can take: all
  static constexpr int kVectors = 2;           // vectors of sums for 16 dims
  static __m256i multiply(__m256i x, __m256i codes) { return _mm256_madd_epi16(x, codes); }
#if defined(XPYD_VNNI)
  static __m256i add(__m256i sum, __m256i x, __m256i codes) { return _mm256_dpwssd_epi32(sum, x, codes); }
#else
  static __m256i add(__m256i sum, __m256i x, __m256i codes) { return _mm256_add_epi32(sum, multiply(x, codes)); }
#endif
  static __m256i wide(__m256i sum) { return sum; }  // the sums of a score in 32 bits
  // A sum of 32 bits += two products.
  static __m256i add_both(__m256i sum, const __m256i (&x)[2], const __m256i (&codes)[2]) {
    return add(add(sum, x[0], codes[0]), x[1], codes[1]);
  }
  // The cells of the odd codes of words.
  static __m256i odd(__m256i words) { return _mm256_srli_epi16(words, 8); }
  // Sums of 16 dims as floats, in order of dims.
  static void in_order(const __m256i* sum, __m256 (&v)[2]) {
    v[0] = _mm256_cvtepi32_ps(sum[0]), v[1] = _mm256_cvtepi32_ps(sum[1]);
  }
  // 16 dims of two tokens, interleaved.
  static void pair(const std::byte* a, const std::byte* b, __m256i* to) {
    const __m128i x = load_16(a), y = load_16(b);
    to[0] = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(x, y)), to[1] = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(x, y));
  }
  static float unit_of(float most, float, int head_dim) {
    const long room = 0x7fffffffL / (255 * long(head_dim));
    return most / float(room < 32767 ? room : 32767);
  }
  // 8 dims are two words of codes, whose cells hold dims (0, 2), (4, 6), and (1, 3), (5, 7).
  static void put_q(__m256i q, float* even, float* odd) {
    const __m256i low = _mm256_and_si256(q, _mm256_set1_epi32(0xffff));
    const __m256i pairs = _mm256_or_si256(low, _mm256_slli_epi32(_mm256_shuffle_epi32(q, 0x0e), 16));
    const __m256i words = _mm256_permutevar8x32_epi32(pairs, _mm256_setr_epi32(0, 4, 1, 5, 0, 0, 0, 0));
    alignas(16) int cells[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(cells), _mm256_castsi256_si128(words));
    __builtin_memcpy(even, cells, 8), __builtin_memcpy(odd, cells + 2, 8);
  }
  static void put_weights(const __m256i (&w)[4], float* cells) {
    for (int i = 0; i < 2; ++i)
      store_cells(cells + 8 * i, _mm256_permute4x64_epi64(_mm256_packs_epi32(w[2 * i], w[2 * i + 1]), 0xd8));
  }
};

struct Int4 {
  static constexpr Dtype kDtype = Dtype::int4;
  static constexpr int kBits = 4, kMask = 0x0f0f0f0f;
  static constexpr int kBlockCells = 16;  // 64 dims, 32 in each sum of 16 bits
  static constexpr int kVectors = 1;
  static __m256i multiply(__m256i x, __m256i codes) { return _mm256_maddubs_epi16(codes, x); }
  static __m256i add(__m256i sum, __m256i x, __m256i codes) { return _mm256_add_epi16(sum, multiply(x, codes)); }
  static __m256i wide(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
  static __m256i add_both(__m256i sum, const __m256i (&x)[2], const __m256i (&codes)[2]) {
#if defined(XPYD_VNNI)
    return _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(sum, codes[0], x[0]), codes[1], x[1]);
#else
    return _mm256_add_epi32(sum, wide(add(multiply(x[0], codes[0]), x[1], codes[1])));
#endif
  }
  static __m256i odd(__m256i words) { return _mm256_and_si256(_mm256_srli_epi16(words, 4), _mm256_set1_epi8(15)); }
  static void in_order(const __m256i* sum, __m256 (&v)[2]) {
    const __m256 even = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(*sum)));
    const __m256 odd = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(*sum, 1)));
    const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    v[0] = _mm256_permute2f128_ps(low, high, 0x20), v[1] = _mm256_permute2f128_ps(low, high, 0x31);
  }
  static __m256i halves(__m128i x) {
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(x, 4), x), _mm256_set1_epi8(15));
  }
  static void pair(const std::byte* a, const std::byte* b, __m256i* to) {
    to[0] = halves(_mm_unpacklo_epi8(load_8(a), load_8(b)));
  }
  static void two_pairs(const std::byte* a, const std::byte* b, __m256i* to) {  // 32 dims
    const __m128i x = load_16(a), y = load_16(b);
    to[0] = halves(_mm_unpacklo_epi8(x, y)), to[1] = halves(_mm_unpackhi_epi8(x, y));
  }
  static float unit_of(float most, float sum, int) {
    const float of_sum = sum / 2160;
    return most / 127 < of_sum ? of_sum : most / 127;
  }
  // 8 dims are one word of codes, whose cells hold dims (0, 2, 4, 6) and (1, 3, 5, 7).
  static void put_q(__m256i q, float* even, float* odd) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i cells = _mm_shuffle_epi8(words, order);
    const int low = _mm_cvtsi128_si32(cells), high = _mm_extract_epi32(cells, 1);
    __builtin_memcpy(even, &low, 4), __builtin_memcpy(odd, &high, 4);
  }
  static void put_weights(const __m256i (&w)[4], float* cells) {
    const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(w[0], w[1]), _mm256_packs_epi32(w[2], w[3]));
    const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    for (int i = 0; i < 2; ++i) {
      const __m256i pairs = _mm256_cvtepu16_epi32(i ? _mm256_extracti128_si256(bytes, 1)
                                                    : _mm256_castsi256_si128(bytes));
      store_cells(cells + 8 * i, _mm256_or_si256(pairs, _mm256_slli_epi32(pairs, 16)));
    }
  }
};

template <class C>
constexpr int code_bytes(int head_dim) {
  return head_dim * C::kBits / 8;
}
// Cells of a row of q and of K: those of all words that hold a code. Bits behind the last code are multiplied by a q of
// 0.
template <class C>
constexpr int cells_of(int head_dim) {
  return (code_bytes<C>(head_dim) + 3) / 4 * 2;
}

// Calls done(sum), where sum[r][j] is the sum of a[r * a_stride + k] b(k) over k in [begin, end). Four k issue kSteps
// prefetches.
template <class C, int R, int V, int kSteps, class B, class Done>
inline void code_tile(const float* a, size_t a_stride, int begin, int end, const B& b, Stream& given, Done&& done) {
  Stream stream = given;
  __m256i sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) sum[r][j] = _mm256_setzero_si256();
  auto one = [&](int k) __attribute__((always_inline)) {
    __m256i row[V];
    b.load(k, row);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256i x = splat_cell(a + size_t(r) * a_stride + size_t(k));
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) {
        sum[r][j] = C::add(sum[r][j], x, row[j]);
        in_turn(sum[r][j]);
      }
    }
  };
  int k = begin;
  for (; k + 4 <= end; k += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < kSteps; ++i) stream.step();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) one(k + i);
  }
  for (; k < end; ++k) one(k);
  given = stream;
  done(sum);
}

struct Cells {  // packed; `stride` floats from one k to the next, `next` floats from one vector to the next
  const float* b;
  int stride, next;
  template <int V>
  void load(int k, __m256i (&row)[V]) const {
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) row[j] = load_cells(b + k * stride + j * next);
  }
};

template <class C>
struct CodePairs {  // pairs of cache rows, from byte `offset` on
  Rows rows;
  size_t offset;
  template <int V>
  void load(int k, __m256i (&row)[V]) const {
    const std::byte *a = rows[2 * k] + offset, *b = rows[2 * k + 1] + offset;
    if constexpr (V == C::kVectors) {
      C::pair(a, b, row);
    } else {
      C::two_pairs(a, b, row);
    }
  }
};

// Reads scale and zero of 8 rows, which follow their codes.
inline void widen_scales(Rows rows, size_t behind_codes, float* scale, float* zero) {
  alignas(32) int both[8];
#pragma GCC unroll 8
  for (int t = 0; t < 8; ++t) __builtin_memcpy(&both[t], rows[t] + behind_codes, 4);
  const __m256i v = _mm256_load_si256(reinterpret_cast<const __m256i*>(both));
  const __m256i halves = _mm256_permute4x64_epi64(
      _mm256_packus_epi32(_mm256_and_si256(v, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(v, 16)), 0xd8);
  _mm256_storeu_ps(scale, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
  _mm256_storeu_ps(zero, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}

}  // namespace
}  // namespace xpyd::attention
