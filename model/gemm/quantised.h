// Weights of few bits, and what they stand for. The one place that knows how they are made and read.
//
//   int8, int4   scale * (code - zero): unsigned codes, one f16 scale and one whole zero for a group of K of an output
//   fp8          scale * e4m3, one f32 scale
//
// A code less a zero has at most 9 bits and a scale 11: the product is exact in f32, so that a weight is one f32 number
// and not a rounding. fp8's product is rounded once.
//
// GPTQ's groups may be scattered over K (desc_act): gemm.h keeps such a matrix with its K in another order, group after
// group.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/dtype.h"

namespace xpyd::model {

constexpr bool is_quantised(Dtype dtype) { return dtype == Dtype::int8 || dtype == Dtype::int4 || dtype == Dtype::fp8; }

inline constexpr int kMaxPiece = 128;  // inputs that are stored with one scale: their products of 16 bits fit 32

// Bits of a weight as gemm.h keeps it, its share of scales and zeros included. group: inputs with one scale; 0: all.
constexpr double stored_bits(Dtype dtype, int group = 0) {
  const double piece = group > 0 && group < kMaxPiece ? group : kMaxPiece;
  return dtype_bits(dtype) + (!is_quantised(dtype) ? 0 : (dtype == Dtype::fp8 ? 32 : 24) / piece);
}

// Which of an output's inputs have one scale.
struct QuantGroups {
  int count = 1;
  std::vector<int32_t> of;  // [k]: below count
  bool operator==(const QuantGroups&) const = default;
};
// Of `size` inputs each, one after another; 0: one for the whole row.
QuantGroups even_groups(int k, int size);

// One output's weights.
struct QuantRow {
  std::vector<uint8_t> codes;  // [k], one to a byte
  std::vector<float> scale;    // [groups]
  std::vector<uint8_t> zero;   // [groups]; fp8: none
  QuantRow(Dtype dtype, int k, int groups)
      : codes(size_t(k)), scale(size_t(groups)), zero(dtype == Dtype::fp8 ? 0 : size_t(groups)) {}
};
// Reads output n, whose codes are of `dtype`. From any thread of the team.
using QuantReader = std::function<void(int n, QuantRow& row)>;

// The f32 that row stands for -> out[k].
void widen_row(Dtype dtype, const QuantGroups& groups, const QuantRow& row, float* out);

// Nearest codes of x[k]. int8: symmetric about 128, scale = max |x| / 127. int4: between the least and the largest
// element, zero among them. fp8: scale = max |x| / 448. Scales of codes are rounded upwards to an f16; then
// |w - x| <= scale / 2 (int8, int4) or 2^-4 |x| + 2^-10 scale (fp8, whose last term is its subnormal step), while
// max |x| is 2^-110 or more (fp8; below, all is 0). What is not finite, or beyond 65504 x 127 (int8) or 7 (int4), has
// no codes: false.
[[nodiscard]] bool quantise_row(Dtype dtype, const QuantGroups& groups, const float* x, QuantRow& row);

}  // namespace xpyd::model
