// The row operations with AVX2 and FMA. A row's last, partial vector goes through a padded copy and
// the same instructions as the others.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "model/ops.h"

namespace xpyd::model {
namespace {

constexpr int kLanes = 8;

// full(i) for each whole vector of a row, then rest(i, lanes) for what is left of it.
template <class Full, class Rest>
inline void for_vectors(int n, Full full, Rest rest) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) full(i);
  if (i < n) rest(i, n - i);
}

inline __m256 load_part(const float* x, int n) {
  alignas(32) float padded[kLanes] = {};
  memcpy(padded, x, size_t(n) * sizeof(float));
  return _mm256_load_ps(padded);
}

inline void store_part(float* x, int n, __m256 value) {
  alignas(32) float padded[kLanes];
  _mm256_store_ps(padded, value);
  memcpy(x, padded, size_t(n) * sizeof(float));
}

inline float lane_sum(__m256 v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// As exp_portable in ops.cc, with fused multiply-adds. The second operand of min is x, so that NaN passes through.
inline __m256 exp_vector(__m256 original) {
  const __m256 smallest = _mm256_set1_ps(-87.33654f);
  __m256 x = _mm256_min_ps(_mm256_set1_ps(88.0f), original);
  x = _mm256_max_ps(smallest, x);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const __m256 tiny = _mm256_cmp_ps(original, smallest, _CMP_LT_OQ);
  return _mm256_andnot_ps(tiny, _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)));
}

void exp_row(const float* x, float shift, float scale, int n, float* out) {
  const __m256 shifts = _mm256_set1_ps(shift), scales = _mm256_set1_ps(scale);
  auto f = [&](__m256 v) { return exp_vector(_mm256_mul_ps(_mm256_sub_ps(v, shifts), scales)); };
  for_vectors(
      n, [&](int i) { _mm256_storeu_ps(out + i, f(_mm256_loadu_ps(x + i))); },
      [&](int i, int rest) { store_part(out + i, rest, f(load_part(x + i, rest))); });
}

void swiglu(const float* gate, const float* up, int n, float* out) {
  const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
  auto f = [&](__m256 g, __m256 u) {
    const __m256 below = _mm256_add_ps(one, exp_vector(_mm256_xor_ps(g, sign)));
    return _mm256_mul_ps(_mm256_div_ps(g, below), u);
  };
  for_vectors(
      n, [&](int i) { _mm256_storeu_ps(out + i, f(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(up + i))); },
      [&](int i, int rest) { store_part(out + i, rest, f(load_part(gate + i, rest), load_part(up + i, rest))); });
}

void rms_norm(const float* x, const float* weight, double eps, int n, float* out) {
  __m256 sums[4] = {};  // vector i of the row goes to sums[i % 4]
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      const __m256 v = _mm256_loadu_ps(x + i + j * kLanes);
      sums[j] = _mm256_fmadd_ps(v, v, sums[j]);
    }
  for (int j = 0; i < n; i += kLanes, ++j) {
    const __m256 v = n - i >= kLanes ? _mm256_loadu_ps(x + i) : load_part(x + i, n - i);
    sums[j] = _mm256_fmadd_ps(v, v, sums[j]);
  }
  const float sum = lane_sum(_mm256_add_ps(_mm256_add_ps(sums[0], sums[2]), _mm256_add_ps(sums[1], sums[3])));
  const __m256 scale = _mm256_set1_ps(float(1.0 / sqrt(double(sum) / n + eps)));
  auto f = [&](__m256 v, __m256 w) { return _mm256_mul_ps(_mm256_mul_ps(v, scale), w); };
  for_vectors(
      n, [&](int k) { _mm256_storeu_ps(out + k, f(_mm256_loadu_ps(x + k), _mm256_loadu_ps(weight + k))); },
      [&](int k, int rest) { store_part(out + k, rest, f(load_part(x + k, rest), load_part(weight + k, rest))); });
}

// add and rope only multiply and add without fusing: a scalar element has the bits of a vector one.
void add(const float* delta, int n, float* x) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(delta + i)));
  for (; i < n; ++i) x[i] += delta[i];
}

void rope(const float* x, const float* cos, const float* sin, int head_dim, float* out) {
  const int half = head_dim / 2;
  int j = 0;
  for (; j + kLanes <= half; j += kLanes) {
    const __m256 a = _mm256_loadu_ps(x + j), b = _mm256_loadu_ps(x + j + half);
    const __m256 c = _mm256_loadu_ps(cos + j), s = _mm256_loadu_ps(sin + j);
    _mm256_storeu_ps(out + j, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
    _mm256_storeu_ps(out + j + half, _mm256_add_ps(_mm256_mul_ps(b, c), _mm256_mul_ps(a, s)));
  }
  for (; j < half; ++j) {
    const float a = x[j], b = x[j + half];
    out[j] = a * cos[j] - b * sin[j];
    out[j + half] = b * cos[j] + a * sin[j];
  }
}

// The first operand of max is x: where it is NaN, max gives the second one.
Largest peak(const float* x, int n) {
  constexpr float kLowest = -__builtin_inff();
  __m256 best[4];
  __m256i nans[4] = {};
  for (__m256& b : best) b = _mm256_set1_ps(kLowest);
  auto take = [&](__m256 v, int j) {
    best[j] = _mm256_max_ps(v, best[j]);
    nans[j] = _mm256_sub_epi32(nans[j], _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  };
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) take(_mm256_loadu_ps(x + i + j * kLanes), j);
  for (; i + kLanes <= n; i += kLanes) take(_mm256_loadu_ps(x + i), 0);
  alignas(32) float values[kLanes];
  alignas(32) int counts[kLanes];
  _mm256_store_ps(values, _mm256_max_ps(_mm256_max_ps(best[0], best[1]), _mm256_max_ps(best[2], best[3])));
  _mm256_store_si256(reinterpret_cast<__m256i*>(counts),
                     _mm256_add_epi32(_mm256_add_epi32(nans[0], nans[1]), _mm256_add_epi32(nans[2], nans[3])));
  Largest peak{kLowest, 0};
  for (int j = 0; j < kLanes; ++j) {
    peak.value = values[j] > peak.value ? values[j] : peak.value;
    peak.nans += counts[j];
  }
  for (; i < n; ++i) {
    peak.value = x[i] > peak.value ? x[i] : peak.value;
    peak.nans += x[i] != x[i];
  }
  return peak;
}

double sum(const float* x, int n) {
  __m256d sums[4] = {};
  int i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 4; ++j) sums[j] = _mm256_add_pd(sums[j], _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * j)));
  const __m256d all = _mm256_add_pd(_mm256_add_pd(sums[0], sums[1]), _mm256_add_pd(sums[2], sums[3]));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(all), _mm256_extractf128_pd(all, 1));
  double total = _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
  for (; i < n; ++i) total += double(x[i]);
  return total;
}

}  // namespace

extern const Ops kAvx2Ops;
const Ops kAvx2Ops = {
    "avx2",  rms_norm, add, rope,         swiglu,
    exp_row, peak,     sum, Isa::avx2, "8 lanes; fused multiply-adds in exp and in the sum of squares"};

}  // namespace xpyd::model
