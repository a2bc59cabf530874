// y = x W^T for up to 16 rows of bf16, limited by reading W: a candidate of gemm_cuda.cu beside
// cuBLASLt's, which is taken where its rows have the same bits.
// One addition order: one accumulator per element and k ascending by 16, as in large products whose
// K is not split (model/README.md).
#pragma once

#include "base/cuda_early.h"
#include "model/gemm_cuda.h"

namespace xpyd {

constexpr int kGemvRows = 16;

// bf16, at most kGemvRows rows, K and strides in multiples of 16 bytes.
bool cuda_gemv_takes(const CudaGemmArgs& args);
// Before: cuda_gemv_takes(). Allocates nothing and may be captured.
void cuda_gemv(const CudaGemmArgs& args, const cuda::On& on);

}  // namespace xpyd
