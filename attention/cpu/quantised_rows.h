// The kernels of int8 and int4 KV on vectors of 256 bits. Codes are not widened to floats. With x' = c scale + zero
// (kv_row.h), for each row of q and each part of 32 tokens,
//
//   sum_d q_d k'_td = scale_t sum_d q_d c_td + zero_t sum_d q_d
//   sum_t p_t v'_td = sum_t (p_t scale_t) c_td + sum_t p_t zero_t
//
// where q_d is rounded to a multiple of one unit of its row, and w_t = p_t scale_t to a multiple of one unit of its row
// and part. Products with codes are then integers, and their sums are exact, so they have no order. A token that a row
// does not see has weight 0, which is safe because no code is NaN.
//
//   int8  q and w have 16 bits: vpmaddwd, 16 products an instruction, sums of 32 bits
//   int4  q and w have 8 bits: vpmaddubsw, 32 products an instruction, sums of 16 bits
//   VNNI  the same integers: vpdpwssd (int8) and, for scores, vpdpbusd (int4) multiply and add
//
// A unit is as small as the sums allow. int8: the largest element / L, L = min(32767, (2^31 - 1) / (255 head_dim)).
// int4: the larger of the largest element / 127 and the sum of the elements of one 16-bit sum (32 of q, or a part of
// weights) / 2160. Rounding q_d by half a unit therefore moves
//
//   a score by 0.51 unit sum_d |k'_td|,
//   a part of an output by 0.51 unit sum_t c_td (unit of the weights),
//
// where q's unit is 2^-15 (int8) or about 2^-7 (int4) of its largest element. K' was rounded more coarsely before:
// these are 2^-7 and 1/8 of a step of its codes. The products with scale and with zero are rounded before they are
// added, which costs 4 u (|scale sum q c| + |zero sum q|), u = 2^-24: digits, if zeros are large beside the range of a
// row.
//
// A cell has 32 bits: 2 numbers of 16 bits or 4 of 8. For scores a cell holds dims, in the order in which a mask and a
// shift take them from words of 4 or 8 codes. For values it holds tokens (t, t + 1), in int4 twice.
//   row of q   cells [n_cells], unit, sum of q in units
//   panel of K cells [n_cells][16 tokens], scale [16], zero [16]
//   panel of V of 16 dims: cells [32 pairs of tokens][16]; in int4 [8], whose halves are even and odd dims
//   weights    for each part, in its place in a row of scores: cells [16], unit, sum of p zero
#pragma once

#include "attention/cpu/quantised_scores.h"

namespace xpyd::attention {
namespace {

constexpr int kPartCells = kPartTokens / 2;

// Turns p of one row and part into weights. A part that is not seen adds -0, which keeps every bit of an accumulator.
template <class C>
inline void weigh_row(float* p, Tokens seen, const float* scale, const float* zero) {
  if (seen.begin >= seen.end) {
    for (int i = 0; i < kPartCells; ++i) p[i] = 0;
    p[kPartCells] = p[kPartCells + 1] = -0.0f;
    return;
  }
  const bool whole = seen.begin <= 0 && seen.end >= kPartTokens;
  __m256 w[4], zeros = _mm256_setzero_ps();
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256 x = _mm256_loadu_ps(p + 8 * i);
    w[i] = _mm256_mul_ps(x, _mm256_loadu_ps(scale + 8 * i));
    __m256 z = _mm256_mul_ps(x, _mm256_loadu_ps(zero + 8 * i));
    if (!whole) [[unlikely]] {
      const __m256i lane = _mm256_add_epi32(_mm256_set1_epi32(8 * i), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
      const __m256 in = _mm256_castsi256_ps(
          _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(seen.begin - 1)),
                           _mm256_cmpgt_epi32(_mm256_set1_epi32(seen.end), lane)));
      w[i] = _mm256_and_ps(w[i], in), z = _mm256_and_ps(z, in);
    }
    zeros = _mm256_add_ps(zeros, z);
  }
  const float most = largest_of(_mm256_max_ps(_mm256_max_ps(w[0], w[1]), _mm256_max_ps(w[2], w[3])));
  const float sum = C::kBits == 4 ? sum_of(_mm256_add_ps(_mm256_add_ps(w[0], w[1]), _mm256_add_ps(w[2], w[3]))) : 0;
  const float unit = C::unit_of(most, sum, 1), inverse = unit > 0x1p-100f ? 1 / unit : 0.0f;
  __m256i codes[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) codes[i] = _mm256_cvtps_epi32(_mm256_mul_ps(w[i], _mm256_set1_ps(inverse)));
  C::put_weights(codes, p);
  p[kPartCells] = unit;
  p[kPartCells + 1] = sum_of(zeros);
}

template <class C>
void weigh_quantised(Dtype, Rows rows, Tokens part, Tokens readable, size_t offset, int head_dim, float* p,
                     const Tokens* seen, int n_tokens, int group) {
  alignas(32) float scale[kPartTokens], zero[kPartTokens];
  const size_t behind = offset + size_t(code_bytes<C>(head_dim));
  const std::byte* some = rows[readable.begin];
  const std::byte* whole[kPartTokens];  // a copy of the part's rows without a null
  Rows of_part = rows + part.begin;
  if (part.begin < readable.begin || part.end > readable.end) {
    for (int i = 0; i < kPartTokens; ++i) whole[i] = of_part[i] ? of_part[i] : some;
    of_part = whole;
  }
#pragma GCC unroll 4
  for (int i = 0; i < kPartTokens; i += 8) widen_scales(of_part + i, behind, scale + i, zero + i);
  p += part.begin;
  for (int i = 0; i < n_tokens; ++i) {
    const int begin = seen[i].begin - part.begin, end = seen[i].end - part.begin;
    const Tokens in_part = {begin > 0 ? begin : 0, end < kPartTokens ? end : kPartTokens};
    for (int r = 0; r < group; ++r, p += kTileTokens) weigh_row<C>(p, in_part, scale, zero);
  }
}

// acc += the integer sums of one part times their unit, plus the sum of p zero, for V vectors of sums.
template <class C, int R, int V, int kSteps, class B>
inline void add_part(const float* p, int part, int begin, int end, const B& b, float* acc, size_t stride,
                     Stream& stream) {
  const float* weights = p + part * kPartTokens;
  code_tile<C, R, V, kSteps>(
      weights - part * kPartCells, kTileTokens, begin / 2, (end + 1) / 2, b, stream, [&](const auto& sum) {
        const float* behind = weights + kPartCells;
        float* to = acc;
        __asm__("" : "+r"(behind), "+r"(to));  // one register each; g++ would keep an address of every row in memory
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r, behind += kTileTokens, to += stride) {
          const __m256 unit = _mm256_broadcast_ss(behind), zeros = _mm256_broadcast_ss(behind + 1);
#pragma GCC unroll 8
          for (int j = 0; j < V; j += C::kVectors) {
            __m256 v[2];
            C::in_order(&sum[r][j], v);
            float* at = to + 16 * (j / C::kVectors);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i)
              _mm256_storeu_ps(at + 8 * i,
                               _mm256_fmadd_ps(v[i], unit, _mm256_add_ps(_mm256_loadu_ps(at + 8 * i), zeros)));
          }
        }
      });
}

template <class C>
void pack_v_quantised(Dtype, Rows rows, int begin, int end, size_t offset, int head_dim, float* panels) {
  constexpr int kFloats16 = 8 * C::kVectors;
  for (int k = begin / 2; k < (end + 1) / 2; ++k) {
    const std::byte* a = rows[2 * k] ? rows[2 * k] + offset : rows[2 * k + 1] + offset;
    const std::byte* b = rows[2 * k + 1] ? rows[2 * k + 1] + offset : a;
    float* to = panels + k * kFloats16;
    for (int d = 0; d < head_dim; d += 16, to += kTileTokens / 2 * kFloats16) {
      __m256i pairs[C::kVectors];
      const std::byte *from_a = a + code_bytes<C>(d), *from_b = b + code_bytes<C>(d);
      std::byte last[2][16] = {};
      if (d + 16 > head_dim) {
        const size_t n = size_t(code_bytes<C>(head_dim - d));
        __builtin_memcpy(last[0], from_a, n), __builtin_memcpy(last[1], from_b, n);
        from_a = last[0], from_b = last[1];
      }
      C::pair(from_a, from_b, pairs);
#pragma GCC unroll 2
      for (int j = 0; j < C::kVectors; ++j) store_cells(to + 8 * j, pairs[j]);
    }
  }
}

template <class C>
void values_quantised(const float* p, int n_rows, int begin, int end, const float* panels, float* acc, int d_pad,
                      Prefetch prefetch) {
  constexpr int kFloats16 = 8 * C::kVectors;
  Stream stream(prefetch);
  const int burst = burst_of(prefetch, n_rows, d_pad / kPanelDims);
  for (int d = 0; d < d_pad; d += kPanelDims, panels += kTileTokens / 2 * kFloats16)
    by_rows<6>(n_rows, [&](auto n, int row) {
      for (int i = 0; i < burst; ++i) stream.step();
      for (int part = 0; part < kTileTokens / kPartTokens; ++part) {
        const int first = part * kPartTokens, last = first + kPartTokens;
        const int from = begin > first ? begin : first, to = end < last ? end : last;
        if (from < to)
          add_part<C, n, C::kVectors, 0>(p + row * kTileTokens, part, from, to, Cells{panels, kFloats16, 8},
                                         acc + row * d_pad + d, size_t(d_pad), stream);
      }
    });
}

template <class C>
void values_in_place_quantised(Dtype, const float* p, int n_rows, int begin, int end, Rows rows, size_t offset,
                               float* acc, int head_dim, Prefetch prefetch) {
  Stream stream(prefetch);
  const std::byte* whole[kTileTokens];  // a copy of `rows` without a null in a pair
  if (begin % 2 != 0 || end % 2 != 0) {
    for (int t = begin; t < end; ++t) whole[t] = rows[t];
    if (begin % 2 != 0) whole[begin - 1] = rows[begin];
    if (end % 2 != 0) whole[end] = rows[end - 1];
    rows = whole;
  }
  by_rows<4>(n_rows, [&](auto n, int row) {
    auto add = [&](auto v, int d) {
      constexpr int V = decltype(v)::value, kDims = 16 * V / C::kVectors;
      add_part<C, n, V, kDims * C::kBits / 64>(p + row * kTileTokens, begin / kPartTokens, begin, end,
                                               CodePairs<C>{rows, offset + size_t(code_bytes<C>(d))},
                                               acc + row * head_dim + d, size_t(head_dim), stream);
    };
    constexpr int kWide = 16 * 2 / C::kVectors;
    int d = 0;
    for (; d + kWide <= head_dim; d += kWide) add(std::integral_constant<int, 2>(), d);
    if (d < head_dim) add(std::integral_constant<int, C::kVectors>(), d);
  });
  stream.rest();
}

template <class C>
constexpr AttentionKernels kQuantised = {
    take_q_quantised<C>, pack_k_quantised<C>, scores_quantised<C>, scores_in_place_quantised<C>, softmax,
    weigh_quantised<C>,  pack_v_quantised<C>, values_quantised<C>, values_in_place_quantised<C>};

}  // namespace
}  // namespace xpyd::attention
