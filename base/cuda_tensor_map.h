// How the copy engine of sm_90 sees an array in device memory (PTX ISA, "Tensor-map"): a matrix of
// bf16 of which it copies boxes, 64 columns wide, to shared memory.
//
// Each row of a box becomes 128 bytes; of these, the 16-byte piece p of the row at shared address
// 128 r lies at place p xor (r mod 8) (the 128-byte swizzle, which wgmma undoes). Rows and columns
// outside of the matrix arrive as zeros.
#pragma once

#include "base/cuda.h"

namespace xpyd::cuda {

constexpr int kBoxColumns = 64;

// A kernel's parameter, `const __grid_constant__`. Opaque: CUtensorMap on a card.
struct alignas(128) TensorMap {
  uint64_t words[16];
};

struct BoxedMatrix {
  const void* data = nullptr;  // device memory, aligned to 16 bytes
  size_t rows = 0, columns = 0;
  size_t row_stride = 0;  // bytes, a multiple of 16
  int box_rows = 0;       // 1 to 256
};
// A pure computation: legal inside a capture. Needs a driver for CUDA 12.0 or later.
TensorMap make_tensor_map(const BoxedMatrix& matrix);

}  // namespace xpyd::cuda
