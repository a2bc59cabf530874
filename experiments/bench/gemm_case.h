// One matrix product to time, and a check that the result of every contestant must pass. Weights rotate through enough
// copies that they come from memory. Used by gemm_bench.cc and the peers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "base/random.h"
#include "model/gemm/gemm.h"

namespace xpyd::experiments {

struct GemmCase {
  GemmCase(int m_, int n_, int k_, int groups_, Dtype dtype_, size_t footprint, ThreadTeam& team)
      : m(m_), n(n_), k(k_), dtype(dtype_), scales(even_groups(k_, 128)), scratch(m_, k_ + 64, team.size()) {
    size_t copies = std::max<size_t>(1, footprint / (size_t(n) * size_t(k) * size_t(dtype_bits(dtype)) / 8) + 1);
    for (size_t c = 0; c < copies; ++c)
      weights.push_back(
          is_quantised(dtype)
              ? pack_codes(
                    n, k, groups_, dtype, scales, [&](int row, QuantRow& out) { codes(int(c), row, out); }, team)
              : pack_matrix(
                    n, k, groups_, dtype, [&](int row, float* out) { weight_row(int(c), row, out); }, team));
    Random random(7);
    x.resize(size_t(m) * size_t(k));
    for (float& v : x) v = float(random.uniform() * 2 - 1);
    y.resize(size_t(m) * size_t(n) + 16);
    y0 = y.data();
    while (reinterpret_cast<uintptr_t>(y0) % 64) ++y0;
  }

  void codes(int copy, int row, QuantRow& out) const {
    uint32_t state = uint32_t(row) * 2654435761u + uint32_t(copy) * 40503u + 1;
    for (uint8_t& code : out.codes) {
      state = state * 1664525u + 1013904223u;
      code = uint8_t(dtype == Dtype::int4 ? state >> 28 : dtype == Dtype::int8 ? state >> 24 : state >> 26);
    }
    std::fill(out.scale.begin(), out.scale.end(), dtype == Dtype::int4 ? 1.0f / 8 : 1.0f / 128);
    std::fill(out.zero.begin(), out.zero.end(), uint8_t(dtype == Dtype::int4 ? 8 : 128));
  }
  // The elements are exact in bf16, so one oracle serves all dense dtypes. They are cheap, because a row is made
  // several times.
  void weight_row(int copy, int row, float* out) const {
    if (is_quantised(dtype)) {
      QuantRow made(dtype, k, scales.count);
      codes(copy, row, made);
      return widen_row(dtype, scales, made, out);
    }
    uint32_t state = uint32_t(row) * 2654435761u + uint32_t(copy) * 40503u + 1;
    for (int i = 0; i < k; ++i) {
      state = state * 1664525u + 1013904223u;
      out[i] = float(int(state >> 24) - 128) / 128;
    }
  }

  GemmArgs args(size_t copy) {
    return {.x = x.data(), .y = y0, .w = &weights[copy], .bias = nullptr, .m = m, .x_stride = k, .y_stride = n};
  }
  void run(ThreadTeam& team, const GemmVariant& variant = default_gemm()) {
    variant.run(args(turn), scratch, team);
    turn = (turn + 1) % weights.size();
  }
  // Compares some columns of most rows of contestant's product with weights[0] against double precision. The bound is
  // that of a chain of k roundings, doubled because a library may round products and sums, and that of activations
  // rounded to integers of activation_bits.
  template <class Contestant>
  std::string check(Contestant contestant, int activation_bits = 32) {
    const double step = activation_bits == 32 ? 0 : 1.01 / (std::exp2(activation_bits) - 2);
    std::fill(y.begin(), y.end(), NAN);
    turn = 0;
    contestant();
    turn = 0;
    const int row_step = m > 64 ? 7 : 1;
    std::vector<float> w(static_cast<size_t>(k));
    for (int column = 0; column < n; column += column < 32 || column > n - 18 ? 1 : 61) {
      weight_row(0, column, w.data());
      for (int r = column % row_step; r < m; r += row_step) {
        double sum = 0, magnitude = 0, rounded = 0;
        for (int i = 0; i < k; ++i) {
          if (is_quantised(dtype)) rounded += step * std::abs(w[size_t(i)]);  // activations are at most 1
          double product = double(x[size_t(r) * size_t(k) + size_t(i)]) * double(w[size_t(i)]);
          sum += product, magnitude += std::abs(product);
        }
        double got = y0[size_t(r) * size_t(n) + size_t(column)];
        if (!(std::abs(got - sum) <= 2 * (k + 8) * 0x1p-24 * magnitude + rounded))
          return "row " + std::to_string(r) + " column " + std::to_string(column) + " is " + std::to_string(got) +
                 ", expected " + std::to_string(sum);
      }
    }
    return "";
  }

  int m, n, k;
  Dtype dtype;
  QuantGroups scales;
  std::vector<PackedMatrix> weights;
  std::vector<float> x, y;
  float* y0;
  GemmScratch scratch;
  size_t turn = 0;
};

}  // namespace xpyd::experiments
