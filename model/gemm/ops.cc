// Portable row operations, and the table of variants.
#include "model/gemm/ops.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace xpyd::model {

#if defined(__x86_64__)
extern const Ops kAvx2Ops, kAvx512Ops;  // ops_avx2.cc, ops_avx512.cc
#endif

namespace {

// Range reduction x = n ln 2 + r, |r| <= ln 2 / 2, then the polynomial of Cephes' expf for e^r.
float exp_portable(float x) {
  const float original = x;
  if (x > 88.0f) x = 88.0f;
  if (!(original >= -87.33654f)) return std::isnan(original) ? original : 0.0f;
  const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float n = x * 1.44269504f + rounder - rounder;
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * std::bit_cast<float>(uint32_t(int(n) + 127) << 23);
}

void exp_row(const float* x, float shift, float scale, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = exp_portable((x[i] - shift) * scale);
}

void swiglu(const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + exp_portable(-gate[i])) * up[i];
}

void rms_norm(const float* x, const float* weight, double eps, int n, float* out) {
  float lane[8] = {};  // independent chains, added in a fixed tree
  for (int i = 0; i < n; ++i) lane[i & 7] += x[i] * x[i];
  float sum = ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
  const float scale = float(1.0 / std::sqrt(double(sum) / n + eps));
  for (int i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void add(const float* delta, int n, float* x) {
  for (int i = 0; i < n; ++i) x[i] += delta[i];
}

void rope(const float* x, const float* cos, const float* sin, int head_dim, float* out) {
  const int half = head_dim / 2;
  for (int j = 0; j < half; ++j) {
    const float a = x[j], b = x[j + half];
    out[j] = a * cos[j] - b * sin[j];
    out[j + half] = b * cos[j] + a * sin[j];
  }
}

Largest peak(const float* x, int n) {
  Largest peak{-std::numeric_limits<float>::infinity(), 0};
  for (int i = 0; i < n; ++i) {
    if (x[i] > peak.value) peak.value = x[i];
    peak.nans += x[i] != x[i];
  }
  return peak;
}

double sum(const float* x, int n) {
  double lane[4] = {};
  for (int i = 0; i < n; ++i) lane[i & 3] += double(x[i]);
  return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

}  // namespace

std::span<const Ops> ops_variants() {
  static const Ops variants[] = {
#if defined(__x86_64__)
    kAvx512Ops,
    kAvx2Ops,
#endif
    {"portable", rms_norm, add, rope, swiglu, exp_row, peak, sum, Isa::portable,
     "plain loops; separate multiply and add"},
  };
  return variants;
}

const Ops& default_ops() {
  static const Ops& chosen = best_row(ops_variants());
  return chosen;
}

}  // namespace xpyd::model
