// Scores of int8 and int4 KV (quantised_rows.h): from packed panels, or for few rows of q straight from the cache rows.
#pragma once

#include "attention/cpu/quantised_vectors.h"

namespace xpyd::attention {
namespace {

// Where the two cells of a word of codes are. The cells of up to 8 words (32 bytes, one vector) are adjacent, the even
// ones before the odd ones.
struct Word {
  int even, odd;
};
template <class C>
inline Word word_at(int head_dim, int w) {
  const int left = cells_of<C>(head_dim) / 2 - w / 8 * 8, first = w / 8 * 16 + w % 8;
  return {first, first + (left < 8 ? left : 8)};
}

// 8 dims of q, times scale; dims beyond head_dim are 0.
inline __m256 load_q(const float* q, int d, int head_dim, __m256 scale) {
  if (d + 8 <= head_dim) return _mm256_mul_ps(_mm256_loadu_ps(q + d), scale);
  alignas(32) float last[8] = {};
  for (int i = 0; d + i < head_dim; ++i) last[i] = q[d + i];
  return _mm256_mul_ps(_mm256_load_ps(last), scale);
}

template <class C>
void take_q_quantised(Dtype, const float* q, float factor, int head_dim, float* row) {
  const __m256 scale = _mm256_set1_ps(factor), sign = _mm256_set1_ps(-0.0f);
  __m256 sizes = _mm256_setzero_ps(), nan = sizes;
  float sum = 0;  // the largest sum of |q| that meets in one 16-bit sum
  for (int d = 0; d < head_dim;) {
    __m256 block = _mm256_setzero_ps();
    for (int i = 0; i < 8 && d < head_dim; ++i, d += 8) {
      const __m256 x = load_q(q, d, head_dim, scale), size = _mm256_andnot_ps(sign, x);
      sizes = _mm256_max_ps(sizes, size);
      nan = _mm256_or_ps(nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
      block = _mm256_add_ps(block, size);
    }
    alignas(32) float b[8];
    _mm256_store_ps(b, block);
    const float low = b[0] + b[1] + b[2] + b[3], high = b[4] + b[5] + b[6] + b[7];
    sum = low > sum ? low : sum, sum = high > sum ? high : sum;
  }
  const float most = _mm256_movemask_ps(nan) ? __builtin_nanf("") : largest_of(sizes);
  const float unit = C::unit_of(most, sum, head_dim), inverse = unit > 0x1p-100f ? 1 / unit : 0.0f;
  const int n_cells = cells_of<C>(head_dim);
  __m256i total = _mm256_setzero_si256();
  for (int d = 0; d < head_dim; d += 8) {
    const __m256i x = _mm256_cvtps_epi32(_mm256_mul_ps(load_q(q, d, head_dim, scale), _mm256_set1_ps(inverse)));
    total = _mm256_add_epi32(total, x);
    const Word at = word_at<C>(head_dim, d * C::kBits / 32);
    if (C::kBits == 8 && d + 4 >= head_dim) {  // only the first of two words exists
      alignas(8) float even[2], odd[2];
      C::put_q(x, even, odd);
      row[at.even] = even[0], row[at.odd] = odd[0];
    } else {
      C::put_q(x, row + at.even, row + at.odd);
    }
  }
  alignas(32) int t[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(t), total);
  row[n_cells] = unit;
  row[n_cells + 1] = float(t[0] + t[1] + t[2] + t[3] + t[4] + t[5] + t[6] + t[7]);
}

// Stores the two cells of a word of codes of each of 8 rows in panel[.][16].
template <class C>
inline void store_word(__m256i words, Word at, float* panel) {
  const __m256i mask = _mm256_set1_epi32(C::kMask);
  store_cells(panel + 16 * at.even, _mm256_and_si256(words, mask));
  store_cells(panel + 16 * at.odd, C::odd(words));
}

template <class C>
inline void pack_words(Rows given, size_t offset, int head_dim, float* panel, Stream& stream) {
  const std::byte* rows[kPanelTokens];
  readable_rows(given, offset, rows);
  const int bytes = code_bytes<C>(head_dim);
  transposed(rows, bytes, stream, [&](int half, int w, __m256 words) {
    store_word<C>(_mm256_castps_si256(words), word_at<C>(head_dim, w), panel + 8 * half);
  });
  for (int at = bytes / 16 * 16; at < bytes; at += 4)  // the last word may include bytes of scale and zero
    for (int half = 0; half < 2; ++half) {
      alignas(32) int words[8];
      for (int t = 0; t < 8; ++t) __builtin_memcpy(&words[t], rows[8 * half + t] + at, 4);
      store_word<C>(_mm256_load_si256(reinterpret_cast<const __m256i*>(words)), word_at<C>(head_dim, at / 4),
                    panel + 8 * half);
    }
  float* scales = panel + cells_of<C>(head_dim) * 16;
  for (int t = 0; t < kPanelTokens; t += 8) widen_scales(rows + t, size_t(bytes), scales + t, scales + 16 + t);
}

// Scores of 8 tokens from their integer sums. `behind` points behind the cells of q: its unit and its sum.
inline void store_scores(__m256i total, __m256 scale, __m256 zero, const float* behind, float* to) {
  const __m256 x = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), scale,
                                   _mm256_mul_ps(zero, _mm256_broadcast_ss(behind + 1)));
  _mm256_storeu_ps(to, _mm256_mul_ps(x, _mm256_broadcast_ss(behind)));
}

template <class C, int kMost, int kSteps>
inline void scores_of(const float* q, int n_rows, int head_dim, const float* panel, float* s, Stream& stream,
                      int burst) {
  const int n_cells = cells_of<C>(head_dim), stride = padded_dim(head_dim);
  const float* scales = panel + n_cells * 16;
  by_rows<kMost>(n_rows, [&](auto n, int row) {
    constexpr int R = decltype(n)::value;
    const float* a = q + row * stride;
    float* to = s + row * kTileTokens;
    for (int i = 0; i < burst; ++i) stream.step();
    for (int begin = 0; begin < n_cells; begin += C::kBlockCells) {
      const int end = n_cells - begin > C::kBlockCells ? begin + C::kBlockCells : n_cells;
      code_tile<C, R, 2, kSteps>(a, size_t(stride), begin, end, Cells{panel, 16, 8}, stream, [&](const auto& sum) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          const __m256 scale = _mm256_loadu_ps(scales + 8 * j), zero = _mm256_loadu_ps(scales + 16 + 8 * j);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            float* at = to + r * kTileTokens + 8 * j;
            __m256i total = C::wide(sum[r][j]);
            if (begin > 0) total = _mm256_add_epi32(total, load_cells(at));  // the sums of the blocks before
            if (end < n_cells) {
              store_cells(at, total);
            } else {
              store_scores(total, scale, zero, a + r * stride + n_cells, at);
            }
          }
        }
      });
    }
  });
}

// Sums of each half of 4 vectors a, b, c, d: [a b c d | a b c d].
inline __m256i sums_of_4(const __m256i (&v)[4]) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

// Floats of a row of q whose codes are kVectors whole vectors. It is a constant, so one register addresses all rows.
template <class C, int kVectors>
constexpr int kRowOfQ = 256 * kVectors / C::kBits;

// 4 rows of q by 8 tokens, on codes as they are stored: only the sums are transposed.
template <class C, int kVectors>
inline void dot_4(const float* q, Rows rows, size_t offset, const float* scale, const float* zero, float* s,
                  Stream& given) {
  constexpr int kStride = kRowOfQ<C, kVectors>;
  Stream stream = given;
  const __m256i mask = _mm256_set1_epi32(C::kMask);
  auto token = [&](int t) __attribute__((always_inline)) {
    __asm__ volatile("" ::: "memory");  // q is loaded again, as a memory operand: it takes no registers
    const std::byte* at = rows[t] + offset;
    __m256i sum[4] = {};
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      if (i % 2 == 0 && (kVectors > 1 || t % 2 == 0)) stream.step();  // one prefetch for each 64 bytes
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 32 * i));
      const __m256i codes[2] = {_mm256_and_si256(words, mask), C::odd(words)};
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const float* row = q + r * kStride + 16 * i;
        sum[r] = C::add_both(sum[r], {load_cells(row), load_cells(row + 8)}, codes);
        in_turn(sum[r]);
      }
    }
    return sums_of_4(sum);
  };
  __m256i y[4];
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    const __m256i a = token(t), b = token(t + 4);
    y[t] = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
  }
  given = stream;
  const __m256i a = _mm256_unpacklo_epi32(y[0], y[1]), b = _mm256_unpackhi_epi32(y[0], y[1]);
  const __m256i c = _mm256_unpacklo_epi32(y[2], y[3]), d = _mm256_unpackhi_epi32(y[2], y[3]);
  const __m256i by_row[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d),
                             _mm256_unpackhi_epi64(b, d)};
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r)
    store_scores(by_row[r], _mm256_loadu_ps(scale), _mm256_loadu_ps(zero), q + r * kStride + 16 * kVectors,
                 s + r * kTileTokens);
}

// Scores of n_rows rows (a multiple of 4) by a panel of tokens; `scale` is scratch.
template <class C, int kVectors>
void dots(Rows given, size_t offset, const float* q, int n_rows, float* scale, float* s, Stream& stream) {
  const std::byte* readable[kPanelTokens];
  if (!given[0] || !given[kPanelTokens - 1]) {  // readable tokens are consecutive, so the ends tell
    readable_rows(given, offset, readable);
    given = readable, offset = 0;
  }
  float* zero = scale + kPanelTokens;
  for (int t = 0; t < kPanelTokens; t += 8) {
    widen_scales(given + t, offset + 32 * kVectors, scale + t, zero + t);
    for (int row = 0; row < n_rows; row += 4)
      dot_4<C, kVectors>(q + row * kRowOfQ<C, kVectors>, given + t, offset, scale + t, zero + t,
                         s + row * kTileTokens + t, stream);
  }
}

template <class C>
void pack_k_quantised(Dtype, Rows rows, size_t offset, int head_dim, float* panel) {
  Stream none({});
  pack_words<C>(rows, offset, head_dim, panel, none);
}

template <class C>
void scores_quantised(Dtype, const float* q, int n_rows, int head_dim, const float* panel, float* s,
                      Prefetch prefetch) {
  Stream stream(prefetch);
  scores_of<C, 6, 0>(q, n_rows, head_dim, panel, s, stream, burst_of(prefetch, n_rows, 1));
}

template <class C>
void scores_in_place_quantised(Dtype, Rows given, size_t offset, const float* q, int n_rows, int head_dim, float* panel,
                               float* s, Prefetch prefetch) {
  Stream stream(prefetch);
  const int bytes = code_bytes<C>(head_dim);
  auto dot = [&](auto vectors) { dots<C, vectors>(given, offset, q, n_rows, panel, s, stream); };
  if (n_rows % 4 == 0 && bytes == 32) {
    dot(std::integral_constant<int, 1>());
  } else if (n_rows % 4 == 0 && bytes == 64) {
    dot(std::integral_constant<int, 2>());
  } else if (n_rows % 4 == 0 && bytes == 128) {
    dot(std::integral_constant<int, 4>());
  } else {
    pack_words<C>(given, offset, head_dim, panel, stream);
    scores_of<C, 4, 1>(q, n_rows, head_dim, panel, s, stream, 0);
  }
  stream.rest();
}

}  // namespace
}  // namespace xpyd::attention
