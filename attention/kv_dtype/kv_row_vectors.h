// Rows of KV in vectors: what kv_row.cc asks of an instruction set. Each function does as many of the first elements as
// are whole vectors, with the bits of the loops there, and returns how many.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace xpyd::attention {

struct KvRowVectors {
  // Least and largest, of these and what is there; NaN is left out. poison: 0 x of each is added.
  int (*range)(const float* x, int n, float* min, float* max, float* poison);
  // Codes of a row with KvQuantiser's members, and values of codes with KvScale's. int8, or two in a byte.
  int (*codes)(bool int8, const float* x, int n, float offset, float inverse, float largest, std::byte* row);
  int (*values)(bool int8, const std::byte* row, int n, float scale, float zero, float* x);
  int (*to_bf16)(const float* x, int n, std::byte* row);
  int (*of_bf16)(const std::byte* row, int n, float* x);
  int (*to_fp8)(const Fp8Form& form, const float* x, int n, std::byte* row);
  int (*of_fp8)(Dtype dtype, const std::byte* row, int n, float* x);
};

extern const KvRowVectors kKvRowAvx2;

}  // namespace xpyd::attention
