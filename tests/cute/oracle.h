// CuTe's layouts (NVIDIA CUTLASS, evaluated on the host) of the instructions that attention kernels use: the places of
// a fragment's elements, the places of a matrix's elements in shared memory, and the descriptor of a matrix. This has
// its own object file, because CuTe's headers and the interpreter both define CUDA's words.
#pragma once

#include <cstdint>

namespace xpyd::cute_oracle {

struct At {
  int row, column;
};
// Element i of a lane's fragment. mma m16n8k16: a is [m, k], b is [n, k], c is [m, n]. For a and b, i counts 16-bit
// halves of the registers.
At mma_a(int lane, int i);
At mma_b(int lane, int i);
At mma_c(int lane, int i);
// wgmma m64nNk16, by thread of the warpgroup; a is in registers. n: 64 or 128.
At wgmma_a(int thread, int i);
At wgmma_c(int n, int thread, int i);
// ldmatrix x4: lane l supplies elements 8 l to 8 l + 7. Returns which of these 256 is half i of a lane's four
// registers.
int ldmatrix(bool transposed, int lane, int i);

// A matrix in shared memory with the 128-byte swizzle. Its rows are queries or tokens, and its columns dims (64 or
// 128). rows: 128 or 192.
struct Matrix {
  int rows, columns;
  bool k_innermost;  // true for q and K; false for V, whose k is the row
};
// Index of an element after the matrix's begin, which is at a multiple of 1024 bytes.
int element(const Matrix& m, int row, int column);
// The descriptor of k-step `step` (16 of k) of a matrix at byte `address`. `first` and `rows` select rows that are m or
// n: 64 from first, or all 128. V: all columns.
uint64_t descriptor(const Matrix& m, uint32_t address, int first, int rows, int step);
// The same elements in the layout of attention_mma.h: rows of `columns` elements, in swizzled pieces of 8.
int row_major(int columns, int row, int column);

}  // namespace xpyd::cute_oracle
