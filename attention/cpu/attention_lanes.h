// The kernels of f32, bf16 and fp8 over vectors of 8 or 16 lanes (base/lanes.h). One register tile does both products:
// R rows x 16 columns, C[r][0..16) += sum_k A[r][k] B[k][0..16). For scores A is q and B is packed K; for values A is
// the weights and B is V. With 8 lanes, 6 x 16 needs 12 accumulators, 2 registers of B and 1 broadcast out of 16; 8
// independent accumulators hide the latency of FMA (4 cycles x 2 per cycle). Every output is one chain of FMAs in one
// order for any number of lanes, so the bits of AVX2 and AVX-512 are equal.
#pragma once

#include <type_traits>
#include <utility>

#include "attention/cpu/kernels.h"
#include "attention/kv_dtype/fp8_vectors.h"
#include "attention/kv_dtype/kv_row.h"
#include "base/lanes.h"

namespace xpyd::attention {
namespace {

using Rows = const std::byte* const*;

// Issues prefetches one by one, at the pace at which the arithmetic consumes lines. A burst would fill the core's miss
// buffers and delay the loads that hit. A step is three instructions, in innermost loops.
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
  void rest() {
    while (rows_ != stop_) step();
  }

 private:
  __attribute__((always_inline)) void start_row() {
    if (rows_ == stop_) {  // no rows are left: further steps prefetch one line again and again
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

// ---- Operations that differ with the number of lanes.

constexpr int kColumns = kPanelDims / kLanes;  // vectors in 16 columns
static_assert(kPanelDims == kPanelTokens);

#if defined(__AVX512F__) || defined(XPYD_EMULATE)

constexpr int kTileRows = 12;  // there are 32 registers

inline Line ints(Floats v) { return _mm512_castps_si512(v); }
inline Floats floats(Line v) { return _mm512_castsi512_ps(v); }
inline Line to_int(Floats v) { return _mm512_cvtps_epi32(v); }  // to nearest even
inline Floats to_float(Line v) { return _mm512_cvtepi32_ps(v); }
inline Line add_int(Line a, Line b) { return _mm512_add_epi32(a, b); }
template <int kBy>
inline Line left(Line v) {
  return _mm512_slli_epi32(v, kBy);
}
inline Line masked(Line v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi32(mask)); }
inline Floats load_bf16(const std::byte* at) {
  return floats(left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))));
}
template <Dtype kDtype>
inline Floats load_fp8(const std::byte* at) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(widen_fp8<kDtype>(at)), widen_fp8<kDtype>(at + 8), 1);
}
inline Floats zero_below(float least, Floats x, Floats y) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, splat(least), _CMP_LT_OQ), splat(0.0f));
}
// x in the lanes [begin, end), `elsewhere` in the others, of the vector that starts at `first`.
inline Floats within(Floats x, float elsewhere, int first, int begin, int end) {
  const int from = begin > first ? begin - first : 0, to = end - first < 16 ? end - first : 16;
  return _mm512_mask_mov_ps(splat(elsewhere), __mmask16(((1u << to) - 1) & ~((1u << from) - 1)), x);
}
inline __m256 low_half(Floats v) { return _mm512_castps512_ps256(v); }
inline __m256 high_half(Floats v) { return _mm512_extractf32x8_ps(v, 1); }

#else

constexpr int kTileRows = 6;  // there are 16 registers

inline Line ints(Floats v) { return _mm256_castps_si256(v); }
inline Floats floats(Line v) { return _mm256_castsi256_ps(v); }
inline Line to_int(Floats v) { return _mm256_cvtps_epi32(v); }  // to nearest even
inline Floats to_float(Line v) { return _mm256_cvtepi32_ps(v); }
inline Line add_int(Line a, Line b) { return _mm256_add_epi32(a, b); }
template <int kBy>
inline Line left(Line v) {
  return _mm256_slli_epi32(v, kBy);
}
inline Line masked(Line v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi32(mask)); }
inline Floats load_bf16(const std::byte* at) {
  return floats(left<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))));
}
template <Dtype kDtype>
inline Floats load_fp8(const std::byte* at) {
  return widen_fp8<kDtype>(at);
}
inline Floats zero_below(float least, Floats x, Floats y) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, splat(least), _CMP_LT_OQ), y);
}
// x in the lanes [begin, end), `elsewhere` in the others, of the vector that starts at `first`.
inline Floats within(Floats x, float elsewhere, int first, int begin, int end) {
  const __m256i i = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i from = _mm256_cmpgt_epi32(i, _mm256_set1_epi32(begin - 1));
  const __m256i to = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), i);
  return _mm256_blendv_ps(splat(elsewhere), x, _mm256_castsi256_ps(_mm256_and_si256(from, to)));
}
inline __m256 low_half(Floats v) { return v; }

#endif

// The sum and the largest of 8 lanes. Halves are combined first.
template <class F>
inline float reduce(__m256 v, F&& f) {
  __m128 m = f(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = f(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(f(m, _mm_movehdup_ps(m)));
}
inline float sum_of(__m256 v) {
  return reduce(v, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
inline float largest_of(__m256 v) {
  return reduce(v, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}

// ---- Register tiles.

// The sources of B: at(k, j) is vector j of row k.
struct Dense {  // packed rows of 16 floats
  const float* b;
  Floats at(int k, int j) const { return load(b + k * 16 + kLanes * j); }
};

template <Dtype kDtype>
struct RowsOf {  // the elements of each cache row from byte `offset` on
  static constexpr int kBits = dtype_bits(kDtype);
  Rows rows;
  size_t offset;
  Floats at(int k, int j) const {
    const std::byte* from = rows[k] + offset + kBits * kLanes / 8 * j;
    if constexpr (kBits == 32) return load(reinterpret_cast<const float*>(from));
    if constexpr (kBits == 16) return load_bf16(from);
    return load_fp8<kDtype>(from);
  }
};

// Calls f with an integral_constant of dtype. Requires one of the dtypes of these kernels.
template <class F>
inline void of_dtype(Dtype dtype, F&& f) {
  if (dtype == Dtype::f32) f(std::integral_constant<Dtype, Dtype::f32>());
  if (dtype == Dtype::bf16) f(std::integral_constant<Dtype, Dtype::bf16>());
  if (dtype == Dtype::fp8_e4m3) f(std::integral_constant<Dtype, Dtype::fp8_e4m3>());
  if (dtype == Dtype::fp8_e5m2) f(std::integral_constant<Dtype, Dtype::fp8_e5m2>());
}

// c[r * c_stride + 0..) (+)= sum over k in [begin, end), ascending, of a[r * a_stride + k] b(k), for R x V vectors.
// Each k issues kQuarters / 4 prefetches. Without the unrolling pragmas GCC keeps `sum` in memory.
template <int R, int V, int kQuarters, bool kAdd, class B>
void tile(const float* a, size_t a_stride, int begin, int end, const B& b, float* c, size_t c_stride,
          Stream& given_stream) {
  Stream stream = given_stream;  // a copy in registers, which stores to c cannot alias
  Floats sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) sum[r][j] = kAdd ? load(c + size_t(r) * c_stride + kLanes * j) : splat(0.0f);
  for (int k = begin; k < end; ++k) {
#pragma GCC unroll 4
    for (int i = 0; i < kQuarters / 4; ++i) stream.step();
    if (kQuarters % 4 == 2 && k % 2 == 0) stream.step();
    if (kQuarters % 4 == 3 && k % 4 != 0) stream.step();
    Floats row[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) row[j] = b.at(k, j);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Floats x = splat(a[size_t(r) * a_stride + size_t(k)]);
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) sum[r][j] = fma(x, row[j], sum[r][j]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) store(c + size_t(r) * c_stride + kLanes * j, sum[r][j]);
  given_stream = stream;
}

// Calls f(R, first row) for n_rows rows, R = 1 to kMost at a time. If one or two rows would be left over, which cannot
// hide the latency, the last kMost + 1 or + 2 rows are halved.
template <int kMost, class F>
void by_rows(int n_rows, F&& f) {
  for (int row = 0, n; row < n_rows; row += n) {
    const int left_over = n_rows - row;
    n = left_over == kMost + 1 || left_over == kMost + 2 ? kMost / 2 + 1 : left_over < kMost ? left_over : kMost;
    [&]<int... R>(std::integer_sequence<int, R...>) {
      ((n == R + 1 ? f(std::integral_constant<int, R + 1>(), row) : void()), ...);
    }
    (std::make_integer_sequence<int, kMost>());
  }
}

// tile() for n_rows rows, with `burst` prefetches before each tile.
template <int kQuarters, bool kAdd>
void tiles(const float* a, size_t a_stride, int n_rows, int begin, int end, const Dense& b, float* c, size_t c_stride,
           Stream& stream, int burst) {
  by_rows<kTileRows>(n_rows, [&](auto n, int row) {
    for (int i = 0; i < burst; ++i) stream.step();
    tile<n, kColumns, kQuarters, kAdd>(a + size_t(row) * a_stride, a_stride, begin, end, b, c + size_t(row) * c_stride,
                                       c_stride, stream);
  });
}
inline int burst_of(const Prefetch& p, int n_rows, int n_panels) {
  return p.n_rows * p.n_lines / ((n_rows + kTileRows - 1) / kTileRows * n_panels) + 1;
}

// ---- Packing takes 8 rows at a time, for any number of lanes. Tokens are often a multiple of 4 KiB apart, and then 16
// rows do not fit the 8 ways of their L1 set.

// Transposes four 32-bit words from byte `at` on of 8 rows: lane r of out[i] is word i of row r.
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

// A row that must not be read is replaced by a readable one; its scores are masked.
inline void readable_rows(Rows given, size_t offset, const std::byte* rows[kPanelTokens]) {
  const std::byte* some = nullptr;
  for (int t = 0; t < kPanelTokens; ++t)
    if (given[t]) some = given[t];
  for (int t = 0; t < kPanelTokens; ++t) rows[t] = (given[t] ? given[t] : some) + offset;
}

// Calls f(half, word, vector) for each 32-bit word in the whole 16-byte pieces of `bytes`: the vector has that word of
// the 8 rows of one half.
template <class F>
inline void transposed(Rows rows, int bytes, Stream& given, F&& f) {
  Stream stream = given;
  for (int half = 0; half < 2; ++half) {
    const std::byte* r[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = rows[8 * half + i];
    for (int at = 0; at + 16 <= bytes; at += 16) {
      __m256 words[4];
      stream.step();
      transpose_8x4(r, size_t(at), words);
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) f(half, at / 4 + w, words[w]);
    }
  }
  given = stream;
}

inline __m256 even_bf16(__m256 words) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(words), 16)); }
inline __m256 odd_bf16(__m256 words) {
  return _mm256_and_ps(words, _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000u))));
}

// Packs elements into panel[d][kPanelTokens].
inline void pack_rows(Dtype dtype, Rows rows, int head_dim, float* panel, Stream& stream) {
  const auto put = [&](int half, int d, __m256 x) { _mm256_storeu_ps(panel + 16 * d + 8 * half, x); };
  int whole = head_dim / 8 * 8;
  of_dtype(dtype, [&](auto type) {
    if constexpr (type == Dtype::f32) {
      whole = head_dim / 4 * 4;
      transposed(rows, 4 * head_dim, stream, put);
    } else if constexpr (type == Dtype::bf16) {
      transposed(rows, 2 * head_dim, stream, [&](int half, int w, __m256 words) {
        put(half, 2 * w, even_bf16(words)), put(half, 2 * w + 1, odd_bf16(words));
      });
    } else {  // fp8: widened 8 by 8, then packed as f32
      Stream none({});
      for (int d = 0; d < whole; d += 8) {
        alignas(32) float wide[kPanelTokens][8];
        const std::byte* at[kPanelTokens];
        for (int t = 0; t < kPanelTokens; ++t) {
          _mm256_store_ps(wide[t], widen_fp8<type>(rows[t] + d));
          at[t] = reinterpret_cast<const std::byte*>(wide[t]);
        }
        stream.step();
        transposed(at, 32, none, [&](int half, int w, __m256 words) { put(half, d + w, words); });
      }
    }
  });
  for (int d = whole; d < head_dim; ++d)
    for (int t = 0; t < kPanelTokens; ++t) panel[d * 16 + t] = kv_element(dtype, head_dim, rows[t], d);
}

void take_q(Dtype, const float* q, float scale, int head_dim, float* row) {
  for (int d = 0; d < head_dim; ++d) row[d] = q[d] * scale;
}

void pack_k(Dtype dtype, Rows given, size_t offset, int head_dim, float* panel) {
  const std::byte* rows[kPanelTokens];
  readable_rows(given, offset, rows);
  Stream none({});
  pack_rows(dtype, rows, head_dim, panel, none);
}

void scores(Dtype, const float* q, int n_rows, int head_dim, const float* panel, float* s, Prefetch prefetch) {
  Stream stream(prefetch);
  tiles<0, false>(q, size_t(padded_dim(head_dim)), n_rows, 0, head_dim, Dense{panel}, s, kTileTokens, stream,
                  burst_of(prefetch, n_rows, 1));
}

// scores() of bf16 over a panel of words of two elements. The elements are widened in registers, once for up to 4 rows.
// The chain and its elements are the same as in scores().
template <int R>
void score_words(const float* q, int head_dim, const float* panel, float* s, Stream stream) {
  Floats sum[R][kColumns];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < kColumns; ++j) sum[r][j] = splat(0.0f);
  for (int d = 0; d < head_dim; d += 2, panel += 16) {
    if (d % 4 == 0) stream.step();
    Floats words[kColumns];
#pragma GCC unroll 2
    for (int j = 0; j < kColumns; ++j) words[j] = load(panel + kLanes * j);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      Floats k[kColumns];
#pragma GCC unroll 2
      for (int j = 0; j < kColumns; ++j)
        k[j] = i == 0 ? floats(left<16>(ints(words[j]))) : floats(masked(ints(words[j]), int(0xffff0000u)));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Floats x = splat(q[r * padded_dim(head_dim) + d + i]);
#pragma GCC unroll 2
        for (int j = 0; j < kColumns; ++j) sum[r][j] = fma(x, k[j], sum[r][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < kColumns; ++j) store(s + r * kTileTokens + kLanes * j, sum[r][j]);
}

// Packing issues half of the prefetches, the products issue the other half.
void scores_in_place(Dtype dtype, Rows given, size_t offset, const float* q, int n_rows, int head_dim, float* panel,
                     float* s, Prefetch prefetch) {
  const std::byte* rows[kPanelTokens];
  readable_rows(given, offset, rows);
  Stream stream(prefetch);
  const int stride = padded_dim(head_dim);
  if (dtype == Dtype::bf16 && head_dim % 8 == 0) {
    transposed(rows, 2 * head_dim, stream,
               [&](int half, int w, __m256 words) { _mm256_storeu_ps(panel + 16 * w + 8 * half, words); });
    by_rows<4>(n_rows, [&](auto n, int row) {
      score_words<n>(q + row * stride, head_dim, panel, s + row * kTileTokens, stream);
      stream = Stream({});
    });
  } else {
    pack_rows(dtype, rows, head_dim, panel, stream);
    tiles<2, false>(q, size_t(stride), n_rows, 0, head_dim, Dense{panel}, s, kTileTokens, stream, 0);
  }
}

// ---- Softmax.

// 2^x for x <= 0 with a relative error below 1.1e-7 (minimax polynomial of degree 6 on [-0.5, 0.5]). Below 2^-126 the
// result is 0; NaN stays NaN.
inline Floats exp2_of(Floats x) {
  const Line n = to_int(x);
  const Floats f = x - to_float(n);
  Floats y = splat(1.535335905e-4f);
  y = fma(y, f, splat(1.339887385e-3f));
  y = fma(y, f, splat(9.618436918e-3f));
  y = fma(y, f, splat(5.550332367e-2f));
  y = fma(y, f, splat(2.402264774e-1f));
  y = fma(y, f, splat(6.931471825e-1f));
  y = fma(y, f, splat(1.0f));
  return zero_below(-126.0f, x, floats(add_int(ints(y), left<23>(n))));
}

// Sums are over 8 lanes for any number of lanes, so that the bits are equal.
void softmax_row(float* s, int begin, int end, SoftmaxState* state, float* acc, int d_pad) {
  const int first = begin / kLanes * kLanes;
  Floats max8 = splat(state->max);
  for (int t = first; t < end; t += kLanes) {
    Floats x = load(s + t);
    if (t < begin || t + kLanes > end) x = within(x, -__builtin_inff(), t, begin, end);
    max8 = max(max8, x);
  }
#if defined(__AVX512F__) || defined(XPYD_EMULATE)
  const float new_max = largest_of(_mm256_max_ps(low_half(max8), high_half(max8)));
#else
  const float new_max = largest_of(max8);
#endif
  if (new_max != state->max) {
    const Floats alpha = exp2_of(splat(state->max - new_max));
    state->max = new_max;
    state->sum *= _mm256_cvtss_f32(low_half(alpha));
    for (int d = 0; d < d_pad; d += kLanes) store(acc + d, load(acc + d) * alpha);
  }
  __m256 sum8 = _mm256_setzero_ps();
  for (int t = first; t < end; t += kLanes) {
    Floats p = exp2_of(load(s + t) - splat(new_max));
    if (t < begin || t + kLanes > end) p = within(p, 0.0f, t, begin, end);
    store(s + t, p);
    sum8 = _mm256_add_ps(sum8, low_half(p));
#if defined(__AVX512F__) || defined(XPYD_EMULATE)
    sum8 = _mm256_add_ps(sum8, high_half(p));
#endif
  }
  state->sum += sum_of(sum8);
}

void softmax(float* s, int n_rows, int begin, int end, SoftmaxState* state, float* acc, int d_pad) {
  for (int r = 0; r < n_rows; ++r)
    softmax_row(s + r * kTileTokens, begin, end, state + r, acc + size_t(r) * size_t(d_pad), d_pad);
}

// ---- Values.

void pack_v(Dtype dtype, Rows rows, int begin, int end, size_t offset, int head_dim, float* panels) {
  const int whole = head_dim / kLanes * kLanes;
  of_dtype(dtype, [&](auto type) {
    const RowsOf<type> b{rows, offset};
    for (int t = begin; t < end; ++t) {
      float* to = panels + t * 16;
      for (int d = 0; d < whole; d += kLanes) store(to + d / 16 * kTileTokens * 16 + d % 16, b.at(t, d / kLanes));
      for (int d = whole; d % 16 != 0 || d < head_dim; ++d)
        to[d / 16 * kTileTokens * 16 + d % 16] = d < head_dim ? kv_element(dtype, head_dim, rows[t] + offset, d) : 0.0f;
    }
  });
}

void values(const float* p, int n_rows, int begin, int end, const float* panels, float* acc, int d_pad,
            Prefetch prefetch) {
  Stream stream(prefetch);
  const int burst = burst_of(prefetch, n_rows, d_pad / kPanelDims);
  for (int d = 0; d < d_pad; d += kPanelDims)
    tiles<0, true>(p, kTileTokens, n_rows, begin, end, Dense{panels + d * kTileTokens}, acc + d, size_t(d_pad), stream,
                   burst);
}

// Calls f(V, d) for the vectors of dims from d on: V at a time while there are that many, then 16 dims at a time.
// Requires head_dim to be a multiple of 16.
template <int V, class F>
inline void by_columns(int head_dim, F&& f) {
  constexpr int kWide = V % kColumns == 0 ? kLanes * V : 2 * kLanes * V;  // two tiles of 24 dims leave a multiple of 16
  int d = 0;
  for (const int wide = head_dim / kWide * kWide; d < wide; d += kLanes * V) f(std::integral_constant<int, V>(), d);
  for (; d < head_dim; d += 16) f(std::integral_constant<int, kColumns>(), d);
}

// V is read straight from the cache rows.
void values_in_place(Dtype dtype, const float* p, int n_rows, int begin, int end, Rows rows, size_t offset, float* acc,
                     int head_dim, Prefetch prefetch) {
  Stream stream(prefetch);
  of_dtype(dtype, [&](auto type) {
    constexpr int kBits = dtype_bits(type);
    by_rows<6>(n_rows, [&](auto n, int row) {
      constexpr int kVectors = n == 1 ? 8 : n <= 3 || kLanes == 16 ? 4 : n == 4 ? 3 : 2;  // as registers allow
      by_columns<kVectors>(head_dim, [&](auto v, int d) {
        // Per token, a tile prefetches as many lines as it reads, and at least half a line.
        constexpr int kOwn = (v * kLanes * kBits + 127) / 128, kQuarters = kOwn < 2 ? 2 : kOwn;
        tile<n, v, kQuarters, true>(p + row * kTileTokens, kTileTokens, begin, end,
                                    RowsOf<type>{rows, offset + size_t(d * kBits / 8)},
                                    acc + size_t(row) * size_t(head_dim) + d, size_t(head_dim), stream);
      });
    });
  });
}

constexpr AttentionKernels kFloats = {take_q,  pack_k, scores, scores_in_place, softmax,
                                      nullptr, pack_v, values, values_in_place};

}  // namespace
}  // namespace xpyd::attention
