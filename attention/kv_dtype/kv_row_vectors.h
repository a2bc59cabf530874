// The vector functions that kv_row.cc calls. Each processes as many whole vectors from the start of a row as there are,
// gives the bits of kv_row.cc's loops, and returns the number of elements that it processed.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace xpyd::attention {

struct KvRowVectors {
  // Lowers *min, raises *max and adds the sum of 0 * x to *poison. NaN does not change *min or *max.
  int (*range)(const float* x, int n, float* min, float* max, float* poison);
  // Encode with the members of KvQuantiser, decode with those of KvScale. If not int8, a byte holds two codes.
  int (*codes)(bool int8, const float* x, int n, float offset, float inverse, float largest, std::byte* row);
  int (*values)(bool int8, const std::byte* row, int n, float scale, float zero, float* x);
  int (*to_bf16)(const float* x, int n, std::byte* row);
  int (*of_bf16)(const std::byte* row, int n, float* x);
  int (*to_fp8)(const Fp8Form& form, const float* x, int n, std::byte* row);
  int (*of_fp8)(Dtype dtype, const std::byte* row, int n, float* x);
};

extern const KvRowVectors kKvRowAvx2;

}  // namespace xpyd::attention
