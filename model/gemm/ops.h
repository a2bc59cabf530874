// The row operations between the matrix products, on f32.
//
// One addition order: every function works on one row, and its bits depend on that
// row's values alone. Elementwise functions run the same code for every element, the last ones of a
// row included, so that a row may also be cut anywhere.
//
// Thread safety: plain functions without state.
#pragma once

#include <span>

#include "base/cpu.h"

namespace xpyd::model {

struct Largest {
  float value;  // the largest; -infinity when there is none but NaN
  int nans;
};

struct Ops {
  const char* name;
  // out[i] = weight[i] * (x[i] / sqrt(mean(x^2) + eps)), i < n. out may be x.
  void (*rms_norm)(const float* x, const float* weight, double eps, int n, float* out);
  // x[i] += delta[i]
  void (*add)(const float* delta, int n, float* x);
  // One head turned by its position: pair (x[j], x[j + half]) by the angle of cos[j], sin[j],
  // j < half = head_dim / 2 (the "rotate half" pairing of Hugging Face). out may be x.
  void (*rope)(const float* x, const float* cos, const float* sin, int head_dim, float* out);
  // out[i] = silu(gate[i]) * up[i], silu(g) = g / (1 + e^-g). out may be gate.
  void (*swiglu)(const float* gate, const float* up, int n, float* out);
  // out[i] = e^((x[i] - shift) * scale) within 2 units in the last place; below 2^-126 it is 0,
  // above e^88 it stays e^88, NaN stays NaN. out may be x.
  void (*exp)(const float* x, float shift, float scale, int n, float* out);
  Largest (*peak)(const float* x, int n);  // NaN is passed over and counted
  double (*sum)(const float* x, int n);    // in double
  Isa needs;
  const char* source;
  bool available() const { return cpu_has(needs); }
};

std::span<const Ops> ops_variants();

// The row that this machine uses.
const Ops& default_ops();

}  // namespace xpyd::model
