// Row operations on vectors of 8 or 16 lanes (base/lanes.h); both widths give the same bits. Elementwise operations
// treat all elements alike. A sum has 32 chains (16 in double): element i goes to chain i % 32, and one tree adds the
// chains.
#pragma once

#include <math.h>

#include "base/lanes.h"
#include "model/gemm/ops.h"

namespace xpyd::model {
namespace {

using Ints = decltype(Floats{} != Floats{});

// Calls full(i) for each whole vector of a row, then rest(i, lanes) for the tail.
template <class Full, class Rest>
inline void for_vectors(int n, Full full, Rest rest) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) full(i);
  if (i < n) rest(i, n - i);
}

// Adds the chains in one tree: the upper half of the vectors to the lower half, and so on.
template <class Vector, size_t n>
inline auto tree(Vector (&chains)[n]) {
  for (size_t half = n / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) chains[i] += chains[i + half];
  return chains[0];
}

// exp_portable of ops.cc with fused multiply-adds. x is the second operand of min, so that NaN passes through.
inline Floats exp_vector(Floats original) {
  const Floats smallest = splat(-87.33654f), x = max(smallest, min(splat(88.0f), original));
  const Floats n = nearest(x * splat(1.44269504f));
  Floats r = fnma(n, splat(0.693359375f), x);
  r = fnma(n, splat(-2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
#pragma GCC unroll 5
  for (float term : kTerms) p = fma(p, r, splat(term));
  p = fma(p, r * r, r) + splat(1.0f);
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return original < smallest ? Floats{} : p * reinterpret_cast<Floats>(exponent);
}

void exp_row(const float* x, float shift, float scale, int n, float* out) {
  auto f = [&](Floats v) { return exp_vector((v - splat(shift)) * splat(scale)); };
  for_vectors(
      n, [&](int i) { store(out + i, f(load(x + i))); },
      [&](int i, int rest) { store(out + i, rest, f(load(x + i, rest))); });
}

void swiglu(const float* gate, const float* up, int n, float* out) {
  auto f = [&](Floats g, Floats u) { return g / (splat(1.0f) + exp_vector(-g)) * u; };
  for_vectors(
      n, [&](int i) { store(out + i, f(load(gate + i), load(up + i))); },
      [&](int i, int rest) { store(out + i, rest, f(load(gate + i, rest), load(up + i, rest))); });
}

void rms_norm(const float* x, const float* weight, double eps, int n, float* out) {
  constexpr int kChains = 32 / kLanes;
  Floats sums[kChains] = {};  // vector i of the row goes to sums[i % kChains]
  auto take = [&](int j, Floats v) { sums[j] = fma(v, v, sums[j]); };
  int i = 0;
  for (; i + 32 <= n; i += 32)
    for (int j = 0; j < kChains; ++j) take(j, load(x + i + j * kLanes));
  for (int j = 0; i < n; i += kLanes, ++j) take(j, n - i >= kLanes ? load(x + i) : load(x + i, n - i));
  const Floats scale = splat(float(1.0 / sqrt(double(total(tree(sums))) / n + eps)));
  for_vectors(
      n, [&](int k) { store(out + k, load(x + k) * scale * load(weight + k)); },
      [&](int k, int rest) { store(out + k, rest, load(x + k, rest) * scale * load(weight + k, rest)); });
}

// add and rope do not fuse, so scalar and vector elements have the same bits.
void add(const float* delta, int n, float* x) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) + load(delta + i));
  for (; i < n; ++i) x[i] += delta[i];
}

void rope(const float* x, const float* cos, const float* sin, int head_dim, float* out) {
  const int half = head_dim / 2;
  int j = 0;
  for (; j + kLanes <= half; j += kLanes) {
    const Floats a = load(x + j), b = load(x + j + half), c = load(cos + j), s = load(sin + j);
    store(out + j, a * c - b * s);
    store(out + j + half, b * c + a * s);
  }
  for (; j < half; ++j) {
    const float a = x[j], b = x[j + half];
    out[j] = a * cos[j] - b * sin[j];
    out[j + half] = b * cos[j] + a * sin[j];
  }
}

// x is the first operand of max, which returns the second one if x is NaN.
Largest peak(const float* x, int n) {
  constexpr float kLowest = -__builtin_inff();
  Floats best[4];
  Ints nans[4] = {};
  for (Floats& b : best) b = splat(kLowest);
  auto take = [&](Floats v, int j) {
    best[j] = max(v, best[j]);
    nans[j] -= v != v;
  };
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) take(load(x + i + j * kLanes), j);
  for (; i + kLanes <= n; i += kLanes) take(load(x + i), 0);
  float values[kLanes];
  store(values, max(max(best[0], best[1]), max(best[2], best[3])));
  Largest peak{kLowest, 0};
  const Ints counts = tree(nans);
  for (int j = 0; j < kLanes; ++j) peak.nans += counts[j];
  for (float value : values) peak.value = value > peak.value ? value : peak.value;
  for (; i < n; ++i) {
    peak.value = x[i] > peak.value ? x[i] : peak.value;
    peak.nans += x[i] != x[i];
  }
  return peak;
}

double sum(const float* x, int n) {
  constexpr int kChains = 32 / kLanes;
  Doubles sums[kChains] = {};
  int i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < kChains; ++j) sums[j] += load_doubles(x + i + j * kLanes / 2);
  double result = total(tree(sums));
  for (; i < n; ++i) result += double(x[i]);
  return result;
}

}  // namespace

}  // namespace xpyd::model
