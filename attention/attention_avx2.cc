// The kernels for AVX2 and FMA. One register tile does both products: R rows x 16 columns, C[r][0..16) += sum_k A[r][k]
// B[k][0..16), with A = q, B = packed K for the scores and A = weights, B = V for the values. 6 x 16 needs 12
// accumulators, 2 of B and 1 broadcast of 16 registers; 8 independent accumulators are enough to hide the latency of
// FMA (4 cycles x 2 per cycle).
#include <immintrin.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "attention/kernels.h"
#include "attention/kv_row.h"

namespace xpyd::attention {
namespace {

using Rows = const std::byte* const*;

// Hands out prefetches one by one, at the pace at which the arithmetic consumes lines: a burst would fill the core's
// miss buffers and hold up the loads that hit. Three instructions a step, in innermost loops.
class Stream {
 public:
  explicit Stream(const Prefetch& p) : rows_(p.rows), stop_(p.rows + p.n_rows), bytes_(64 * p.n_lines) { start_row(); }
  __attribute__((always_inline)) void step() {
    _mm_prefetch(next_, _MM_HINT_T1);
    next_ += stride_;
    if (next_ == end_) [[unlikely]] {
      ++rows_;
      start_row();
    }
  }

 private:
  __attribute__((always_inline)) void start_row() {
    if (rows_ == stop_) {  // from now on steps do nothing: one line again and again
      next_ = reinterpret_cast<const char*>(&kZero);
      stride_ = 0, end_ = nullptr;
      return;
    }
    next_ = reinterpret_cast<const char*>(*rows_), end_ = next_ + bytes_;
  }
  static constexpr char kZero = 0;
  Rows rows_, stop_;
  long bytes_, stride_ = 64;
  const char *next_, *end_;
};

// B: vector j of 8 columns of row k.
struct Dense {  // rows of 16 floats, packed
  const float* b;
  __m256 load(int k, int j) const { return _mm256_loadu_ps(b + k * 16 + 8 * j); }
};

// ---- Elements of kBits: f32, bf16, or codes (kv_row.h); 32 / kBits of them in a word.

template <int kBits>
constexpr Dtype kDtype = kBits == 32   ? Dtype::f32
                         : kBits == 16 ? Dtype::bf16
                         : kBits == 8  ? Dtype::int8
                                       : Dtype::int4;
// Calls f(kBits), a constant.
template <class F>
void with_bits(Dtype dtype, F&& f) {
  if (dtype == Dtype::f32) return f(std::integral_constant<int, 32>());
  if (dtype == Dtype::bf16) return f(std::integral_constant<int, 16>());
  if (dtype == Dtype::int8) return f(std::integral_constant<int, 8>());
  f(std::integral_constant<int, 4>());
}

// Of up to kTileTokens rows of codes, widened; of others nothing.
template <int kBits>
struct Scales {
  float scale[kTileTokens], zero[kTileTokens];
  // behind_codes: from a row pointer to its scale.
  Scales(Rows rows, int begin, int end, size_t behind_codes) {
    if constexpr (kBits <= 8) {
      alignas(32) unsigned short halves[2][kTileTokens];
      for (int t = begin; t < end; ++t) {
        __builtin_memcpy(&halves[0][t], rows[t] + behind_codes, 2);
        __builtin_memcpy(&halves[1][t], rows[t] + behind_codes + 2, 2);
      }
      for (int t = begin / 8 * 8; t < end; t += 8)
        for (int i = 0; i < 2; ++i)
          _mm256_storeu_ps((i ? zero : scale) + t,
                           _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(halves[i] + t))));
    }
  }
  static __m256 load(const float* of) { return kBits <= 8 ? _mm256_loadu_ps(of) : _mm256_setzero_ps(); }
};
__m256 value(__m256i code, __m256 scale, __m256 zero) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), scale, zero); }

// Element i of the word in each 32-bit lane.
template <int kBits>
__m256 element(__m256 words, int i, __m256 scale, __m256 zero) {
  const __m256i bits = _mm256_castps_si256(words);
  if constexpr (kBits == 32) return words;
  if constexpr (kBits == 16)
    return i == 0 ? _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))
                  : _mm256_and_ps(words, _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000u))));
  if constexpr (kBits == 4)
    return value(_mm256_and_si256(_mm256_srli_epi32(bits, 4 * i), _mm256_set1_epi32(15)), scale, zero);
  // Bytes i, 4 + i, 8 + i, 12 + i of each half, each to the bottom of its lane.
  const __m256i pick = _mm256_add_epi32(_mm256_set1_epi32(int(0x80808000u) | i),
                                        _mm256_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12));
  return value(_mm256_shuffle_epi8(bits, pick), scale, zero);
}

template <int kBits>
struct RowsOf {                                    // elements of each cache row, from byte `offset`
  static constexpr int kRowBytes = kBits;          // of a vector
  static constexpr int kWide = kBits > 8 ? 3 : 2;  // vectors that 4 query rows take at once; of codes scale and
                                                   // zero are in registers, too
  Rows rows;
  size_t offset;
  const Scales<kBits>* scales;
  __m256 load(int k, int j) const {
    const std::byte* at = rows[k] + offset + kBits * j;
    if constexpr (kBits == 32) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
    } else if constexpr (kBits == 16) {
      const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
    } else {
      __m256i codes;
      if constexpr (kBits == 8) {
        codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
      } else {
        int word;
        __builtin_memcpy(&word, at, 4);
        codes = _mm256_and_si256(
            _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)),
            _mm256_set1_epi32(15));
      }
      return value(codes, _mm256_broadcast_ss(scales->scale + k), _mm256_broadcast_ss(scales->zero + k));
    }
  }
};

// ---- Register tiles.

// c[r * c_stride + 0..8 V) (+)= sum over k in [begin, end), ascending, of a[r * a_stride + k] b(k).
// kQuarters / 4 prefetches per k. Without the unrolling pragmas GCC keeps `sum` in memory.
template <int R, int V, int kQuarters, bool kAdd, class B>
void tile(const float* a, size_t a_stride, int begin, int end, const B& b, float* c, size_t c_stride,
          Stream& given_stream) {
  Stream stream = given_stream;  // in registers: stores to c cannot alias it
  __m256 sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j)
      sum[r][j] = kAdd ? _mm256_loadu_ps(c + size_t(r) * c_stride + 8 * j) : _mm256_setzero_ps();
  for (int k = begin; k < end; ++k) {
#pragma GCC unroll 4
    for (int i = 0; i < kQuarters / 4; ++i) stream.step();
    if (kQuarters % 4 == 2 && k % 2 == 0) stream.step();
    if (kQuarters % 4 == 3 && k % 4 != 0) stream.step();
    __m256 row[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) row[j] = b.load(k, j);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      __m256 x = _mm256_broadcast_ss(a + size_t(r) * a_stride + k);
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) sum[r][j] = _mm256_fmadd_ps(x, row[j], sum[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) _mm256_storeu_ps(c + size_t(r) * c_stride + 8 * j, sum[r][j]);
  given_stream = stream;
}

// Calls f(R, first row) for n_rows rows, R = 1 to kMost at a time: halves, where one or two that are left would not
// hide the latency.
template <int kMost, class F>
void by_rows(int n_rows, F&& f) {
  for (int row = 0, n; row < n_rows; row += n) {
    const int left = n_rows - row;
    n = left == kMost + 1 || left == kMost + 2 ? kMost / 2 + 1 : std::min(left, kMost);
    [&]<int... R>(std::integer_sequence<int, R...>) {
      ((n == R + 1 ? f(std::integral_constant<int, R + 1>(), row) : void()), ...);
    }
    (std::make_integer_sequence<int, kMost>());
  }
}

// tile() for n_rows rows; `burst` prefetches before each.
template <int kQuarters, bool kAdd>
void tiles(const float* a, size_t a_stride, int n_rows, int begin, int end, const Dense& b, float* c, size_t c_stride,
           Stream& stream, int burst) {
  by_rows<6>(n_rows, [&](auto n, int row) {
    for (int i = 0; i < burst; ++i) stream.step();
    tile<n, 2, kQuarters, kAdd>(a + size_t(row) * a_stride, a_stride, begin, end, b, c + size_t(row) * c_stride,
                                c_stride, stream);
  });
}

// Four 32-bit elements, from byte `at`, of each of 8 rows -> four vectors of 8: out[i] = element i of each.
inline __attribute__((always_inline)) void transpose_8x4(const std::byte* const (&rows)[8], size_t at, __m256 out[4]) {
  __m256 r[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m128 low = _mm_loadu_ps(reinterpret_cast<const float*>(rows[i] + at));
    __m128 high = _mm_loadu_ps(reinterpret_cast<const float*>(rows[i + 4] + at));
    r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
  }
  __m256 a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
  __m256 c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
  out[0] = _mm256_shuffle_ps(a, c, 0x44);
  out[1] = _mm256_shuffle_ps(a, c, 0xee);
  out[2] = _mm256_shuffle_ps(b, d, 0x44);
  out[3] = _mm256_shuffle_ps(b, d, 0xee);
}

// A column that must not be read takes another's values: its scores are masked.
void readable_rows(Rows given, size_t offset, const std::byte* rows[kPanelTokens]) {
  const std::byte* some = nullptr;
  for (int t = 0; t < kPanelTokens; ++t)
    if (given[t]) some = given[t];
  for (int t = 0; t < kPanelTokens; ++t) rows[t] = (given[t] ? given[t] : some) + offset;
}

// panel[d][kPanelTokens] of elements, or, raw, panel[word][kPanelTokens] of 32 / kBits elements each as they were;
// before raw: head_dim is a multiple of the elements in 16 bytes.
template <int kBits, bool kRaw>
void pack(Rows rows, const Scales<kBits>& scales, int head_dim, float* panel, Stream& given) {
  // Tokens are often a multiple of 4 KiB apart, so that 16 rows do not fit the 8 ways of their L1
  // set: finish with 8 rows before the others.
  constexpr int kPerWord = 32 / kBits, kStep = 4 * kPerWord;
  const int whole = head_dim / kStep * kStep;
  Stream stream = given;
  for (int half = 0; half < 2; ++half) {
    const std::byte* r[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = rows[8 * half + i];
    const __m256 scale = scales.load(scales.scale + 8 * half), zero = scales.load(scales.zero + 8 * half);
    float* to = panel + 8 * half;
    for (int d = 0; d < whole; d += kStep) {
      __m256 words[4];
      stream.step();
      transpose_8x4(r, size_t(d) * kBits / 8, words);
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) {
        if constexpr (kRaw) {
          _mm256_storeu_ps(to, words[w]), to += 16;
        } else {
#pragma GCC unroll 8
          for (int i = 0; i < kPerWord; ++i, to += 16) _mm256_storeu_ps(to, element<kBits>(words[w], i, scale, zero));
        }
      }
    }
  }
  given = stream;
  for (int d = whole; !kRaw && d < head_dim; ++d)
    for (int t = 0; t < kPanelTokens; ++t) panel[d * 16 + t] = kv_element(kDtype<kBits>, head_dim, rows[t], d);
}

void pack_k(Dtype dtype, Rows given, size_t offset, int head_dim, float* panel) {
  const std::byte* rows[kPanelTokens];
  readable_rows(given, offset, rows);
  Stream none({});
  with_bits(dtype, [&](auto bits) {
    pack<bits, false>(rows, Scales<bits>(rows, 0, kPanelTokens, size_t(head_dim * bits / 8)), head_dim, panel, none);
  });
}

void scores(const float* q, int n_rows, int head_dim, const float* panel, float* s, Prefetch prefetch) {
  Stream stream(prefetch);
  int burst = prefetch.n_rows * prefetch.n_lines / ((n_rows + 5) / 6) + 1;
  tiles<0, false>(q, size_t(head_dim), n_rows, 0, head_dim, Dense{panel}, s, kTileTokens, stream, burst);
}

// scores() over a panel of raw words: the same chain over the same elements.
template <int R, int kBits>
void score_words(const float* q, int head_dim, const float* panel, const Scales<kBits>& scales, float* s,
                 Stream stream) {
  const __m256 scale[2] = {scales.load(scales.scale), scales.load(scales.scale + 8)};
  const __m256 zero[2] = {scales.load(scales.zero), scales.load(scales.zero + 8)};
  __m256 sum[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
  for (int d = 0; d < head_dim; d += 32 / kBits, panel += 16) {
    if (kBits == 4 || d % (64 / kBits) == 0) stream.step();
    const __m256 left = _mm256_loadu_ps(panel), right = _mm256_loadu_ps(panel + 8);
#pragma GCC unroll 8
    for (int i = 0; i < 32 / kBits; ++i) {
      const __m256 k[2] = {element<kBits>(left, i, scale[0], zero[0]), element<kBits>(right, i, scale[1], zero[1])};
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m256 x = _mm256_broadcast_ss(q + r * head_dim + d + i);
        sum[r][0] = _mm256_fmadd_ps(x, k[0], sum[r][0]);
        sum[r][1] = _mm256_fmadd_ps(x, k[1], sum[r][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    _mm256_storeu_ps(s + r * kTileTokens, sum[r][0]);
    _mm256_storeu_ps(s + r * kTileTokens + 8, sum[r][1]);
  }
}

// Packing asks for half of the memory to come, the products for the other half.
void scores_in_place(Dtype dtype, Rows given, size_t offset, const float* q, int n_rows, int head_dim, float* panel,
                     float* s, Prefetch prefetch) {
  with_bits(dtype, [&](auto bits) {
    if (bits < 32 && head_dim % (128 / bits) != 0) {
      pack_k(dtype, given, offset, head_dim, panel);
      scores(q, n_rows, head_dim, panel, s, prefetch);
      return;
    }
    const std::byte* rows[kPanelTokens];
    readable_rows(given, offset, rows);
    const Scales<bits> scales(rows, 0, kPanelTokens, size_t(head_dim * bits / 8));
    Stream stream(prefetch);
    pack<bits, bits != 32>(rows, scales, head_dim, panel, stream);
    if constexpr (bits == 32) {
      tiles<2, false>(q, size_t(head_dim), n_rows, 0, head_dim, Dense{panel}, s, kTileTokens, stream, 0);
    } else {
      by_rows<4>(n_rows, [&](auto n, int row) {
        score_words<n, bits>(q + row * head_dim, head_dim, panel, scales, s + row * kTileTokens, stream);
        stream = Stream({});
      });
    }
  });
}

// 2^x for x <= 0, relative error < 1.1e-7 (minimax polynomial of degree 6 on [-0.5, 0.5]); below
// 2^-126 it is 0. NaN stays NaN.
__m256 exp2_negative8(__m256 x) {
  __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 f = _mm256_sub_ps(x, n);
  __m256 y = _mm256_set1_ps(1.535335905e-4f);
  y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(1.339887385e-3f));
  y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(9.618436918e-3f));
  y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(5.550332367e-2f));
  y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(2.402264774e-1f));
  y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(6.931471825e-1f));
  y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(1.0f));
  __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), y);
}

// All ones in the lanes [begin, end) of the vector that starts at `first`.
__m256 lanes(int first, int begin, int end) {
  __m256i i = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256i from = _mm256_cmpgt_epi32(i, _mm256_set1_epi32(begin - 1));
  __m256i to = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), i);
  return _mm256_castsi256_ps(_mm256_and_si256(from, to));
}

void softmax_row(float* s, int begin, int end, SoftmaxState* state, float* acc, int d_pad) {
  const __m256 minus_infinity = _mm256_set1_ps(-__builtin_inff());
  int first = begin / 8 * 8;
  __m256 max8 = _mm256_set1_ps(state->max);
  for (int t = first; t < end; t += 8) {
    __m256 x = _mm256_loadu_ps(s + t);
    if (t < begin || t + 8 > end) x = _mm256_blendv_ps(minus_infinity, x, lanes(t, begin, end));
    max8 = _mm256_max_ps(max8, x);
  }
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(max8), _mm256_extractf128_ps(max8, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  m = _mm_max_ss(m, _mm_movehdup_ps(m));
  float max = _mm_cvtss_f32(m);
  if (max != state->max) {
    __m256 alpha = exp2_negative8(_mm256_set1_ps(state->max - max));
    state->max = max;
    state->sum *= _mm256_cvtss_f32(alpha);
    for (int d = 0; d < d_pad; d += 8) _mm256_storeu_ps(acc + d, _mm256_mul_ps(_mm256_loadu_ps(acc + d), alpha));
  }
  __m256 sum8 = _mm256_setzero_ps();
  max8 = _mm256_set1_ps(max);
  for (int t = first; t < end; t += 8) {
    __m256 p = exp2_negative8(_mm256_sub_ps(_mm256_loadu_ps(s + t), max8));
    if (t < begin || t + 8 > end) p = _mm256_and_ps(p, lanes(t, begin, end));
    _mm256_storeu_ps(s + t, p);
    sum8 = _mm256_add_ps(sum8, p);
  }
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(sum8), _mm256_extractf128_ps(sum8, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  sum = _mm_add_ss(sum, _mm_movehdup_ps(sum));
  state->sum += _mm_cvtss_f32(sum);
}

void softmax(float* s, int n_rows, int begin, int end, SoftmaxState* state, float* acc, int d_pad) {
  for (int r = 0; r < n_rows; ++r)
    softmax_row(s + r * kTileTokens, begin, end, state + r, acc + size_t(r) * size_t(d_pad), d_pad);
}

void pack_v(Dtype dtype, Rows rows, int begin, int end, size_t offset, int head_dim, float* panels) {
  with_bits(dtype, [&](auto bits) {
    const Scales<bits> scales(rows, begin, end, offset + size_t(head_dim * bits / 8));
    const RowsOf<bits> b{rows, offset, &scales};
    const int whole = head_dim / 8 * 8;
    for (int t = begin; t < end; ++t) {
      float* to = panels + t * 16;
      for (int d = 0; d < whole; d += 8) _mm256_storeu_ps(to + d / 16 * kTileTokens * 16 + d % 16, b.load(t, d / 8));
      for (int d = whole; d % 16 != 0 || d < head_dim; ++d)
        to[d / 16 * kTileTokens * 16 + d % 16] = d < head_dim ? kv_element(dtype, head_dim, rows[t] + offset, d) : 0.0f;
    }
  });
}

void values(const float* p, int n_rows, int begin, int end, const float* panels, float* acc, int d_pad,
            Prefetch prefetch) {
  Stream stream(prefetch);
  int n_tiles = (n_rows + 5) / 6 * (d_pad / kPanelDims);
  int burst = prefetch.n_rows * prefetch.n_lines / n_tiles + 1;
  for (int d = 0; d < d_pad; d += kPanelDims)
    tiles<0, true>(p, kTileTokens, n_rows, begin, end, Dense{panels + d * kTileTokens}, acc + d, size_t(d_pad), stream,
                   burst);
}

// R query rows x all dims straight from the cache rows, in tiles as wide as 16 registers allow: V
// vectors, then 2. head_dim is a multiple of 16.
template <int R, int V, class B>
void in_place(const float* p, int begin, int end, B b, float* acc, int head_dim, Stream& stream) {
  constexpr int kWide = V == 3 ? 48 : 8 * V;  // two tiles of 24 leave a multiple of 16
  // Per token, as many lines as it reads; tile() has no rate below a half.
  auto quarters = [](int vectors) { return std::max(2, (vectors * B::kRowBytes + 15) / 16); };
  constexpr int kQuarters = quarters(V), kQuarters2 = quarters(2);
  int d = 0, wide = head_dim / kWide * kWide;
  for (; d < wide; d += 8 * V, b.offset += V * B::kRowBytes)
    tile<R, V, kQuarters, true>(p, kTileTokens, begin, end, b, acc + d, size_t(head_dim), stream);
  for (; d < head_dim; d += 16, b.offset += 2 * B::kRowBytes)
    tile<R, 2, kQuarters2, true>(p, kTileTokens, begin, end, b, acc + d, size_t(head_dim), stream);
}

void values_in_place(Dtype dtype, const float* p, int n_rows, int begin, int end, Rows rows, size_t offset, float* acc,
                     int head_dim, Prefetch prefetch) {
  Stream stream(prefetch);
  with_bits(dtype, [&](auto bits) {
    const Scales<bits> scales(rows, begin, end, offset + size_t(head_dim * bits / 8));
    const RowsOf<bits> b{rows, offset, &scales};
    by_rows<6>(n_rows, [&](auto n, int row) {
      constexpr int kVectors = n == 1 ? 8 : n <= 3 ? 4 : n == 4 ? RowsOf<bits>::kWide : 2;
      in_place<n, kVectors>(p + row * kTileTokens, begin, end, b, acc + size_t(row) * size_t(head_dim), head_dim,
                            stream);
    });
  });
}

constexpr AttentionKernels kAvx2 = {pack_k, scores, scores_in_place, softmax, pack_v, values, values_in_place};

}  // namespace

void attention_avx2(const AttentionArgs& args, ThreadTeam& team) { attention_walk(args, team, kAvx2); }

}  // namespace xpyd::attention
