// Quantised weights: the only code that knows how they are made and read.
//
//   int8, int4  scale * (code - zero): unsigned codes; one f16 scale and one integer zero per group of an output's K
//   fp8         scale * e4m3; one f32 scale
//
// code - zero has at most 9 bits and an f16 scale has 11, so the product is exact in f32: a weight is one f32 number.
// The fp8 product is rounded once.
//
// GPTQ's groups may be scattered over K (desc_act). gemm.h then stores K in another order, group after group.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/dtype.h"
#include "model/gemm/gemm_kernels.h"

namespace xpyd::model {

constexpr bool is_quantised(Dtype dtype) { return dtype == Dtype::int8 || dtype == Dtype::int4 || dtype == Dtype::fp8; }

// Bits per packed weight, with its share of scales and zeros. group: inputs that share one scale; 0: all.
constexpr double stored_bits(Dtype dtype, int group = 0) {
  const double piece = group > 0 && group < kMaxPiece ? group : kMaxPiece;
  return dtype_bits(dtype) + (!is_quantised(dtype) ? 0 : (dtype == Dtype::fp8 ? 32 : 24) / piece);
}

// Assigns an output's inputs to groups; a group shares one scale.
struct QuantGroups {
  int count = 1;
  std::vector<int32_t> of;  // [k]: the input's group, below count
  bool operator==(const QuantGroups&) const = default;
};
// Returns consecutive groups of `size` inputs; 0: one group for the whole row.
QuantGroups even_groups(int k, int size);

// One output's quantised weights.
struct QuantRow {
  std::vector<uint8_t> codes;  // [k], one per byte
  std::vector<float> scale;    // [groups]
  std::vector<uint8_t> zero;   // [groups]; empty for fp8
  QuantRow(Dtype dtype, int k, int groups)
      : codes(size_t(k)), scale(size_t(groups)), zero(dtype == Dtype::fp8 ? 0 : size_t(groups)) {}
};
// Reads output n in the matrix's dtype. It runs on any thread of the team.
using QuantReader = std::function<void(int n, QuantRow& row)>;

// Writes the f32 values of a row to out[k].
void widen_row(Dtype dtype, const QuantGroups& groups, const QuantRow& row, float* out);

// Quantises x[k] to the nearest codes.
// int8 is symmetric about 128, with scale = max |x| / 127. int4 spans the least to the largest element, zero included.
// fp8 uses scale = max |x| / 448. Scales of int8 and int4 are rounded up to f16.
// Error: |w - x| <= scale / 2 for int8 and int4. For fp8 it is at most 2^-4 |x| + 2^-10 scale, where the last term is
// the subnormal step; a row with max |x| below 2^-110 becomes 0.
// Returns false for values that are not finite or exceed 65504 x 127 (int8) or 65504 x 7 (int4).
[[nodiscard]] bool quantise_row(Dtype dtype, const QuantGroups& groups, const float* x, QuantRow& row);

}  // namespace xpyd::model
