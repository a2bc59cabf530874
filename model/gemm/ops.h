// Row operations between the matrix products, on f32.
//
// One addition order: every function works on one row, and its bits depend on that row's values only. Elementwise
// functions treat every element alike, the tail of a row included, so that a row may be cut anywhere.
//
// Thread safety: plain functions without state.
#pragma once

#include <span>

#include "base/cpu.h"

namespace xpyd::model {

struct Largest {
  float value;  // the largest value; -infinity if there is none but NaN
  int nans;
};

struct Ops {
  const char* name;
  // out[i] = weight[i] * (x[i] / sqrt(mean(x^2) + eps)), i < n. out may be x.
  void (*rms_norm)(const float* x, const float* weight, double eps, int n, float* out);
  // x[i] += delta[i]
  void (*add)(const float* delta, int n, float* x);
  // Applies RoPE to one head: rotates the pair (x[j], x[j + half]) by the angle of cos[j], sin[j], for j < half =
  // head_dim / 2 ("rotate half", as Hugging Face). out may be x.
  void (*rope)(const float* x, const float* cos, const float* sin, int head_dim, float* out);
  // out[i] = silu(gate[i]) * up[i], silu(g) = g / (1 + e^-g). out may be gate.
  void (*swiglu)(const float* gate, const float* up, int n, float* out);
  // out[i] = e^((x[i] - shift) * scale) within 2 units in the last place. Below 2^-126 the result is 0, above e^88 it
  // is e^88; NaN stays NaN. out may be x.
  void (*exp)(const float* x, float shift, float scale, int n, float* out);
  Largest (*peak)(const float* x, int n);  // ignores and counts NaN
  double (*sum)(const float* x, int n);    // in double
  Isa needs;
  const char* source;
  bool available() const { return cpu_has(needs); }
};

std::span<const Ops> ops_variants();

// The row for this machine.
const Ops& default_ops();

}  // namespace xpyd::model
