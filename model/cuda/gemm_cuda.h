// y = x W^T on CUDA: cuBLASLt, and a kernel of ours for few rows (gemv_sm90.cu), where there is a GPU
// (model/cuda/gemm_cuda.cu), plain loops where the interpreter stands in for one (tests/simt/gemm_simt.cc). A bias
// belongs to the operation that follows, which adds it in f32 before anything is rounded.
//
// One addition order: the bits of y[m, :] depend on x[m, :] and W, not on M or the row's place. cuBLASLt promises no
// such thing, so prepare() makes it so: algorithms that split K are refused, and of the rest only those are used whose
// rows have the same bits as one another's, on the weights that come first and random x, for every size of M. Which
// bits is the same choice in every process with this card and library.
//
// Thread safety: one thread, its stream's.
#pragma once

#include <memory>
#include <string>

#include "base/cuda/cuda.h"
#include "base/dtype.h"
#include "model/cuda/weights_cuda.h"

namespace xpyd::model {

struct CudaGemmArgs {
  const void* x = nullptr;  // [m, w.k], row stride x_stride, x_dtype, device, 16-byte aligned
  void* y = nullptr;        // [m, w.n], row stride y_stride, y_dtype, device, 16-byte aligned
  CudaMatrix w;             // of x_dtype; of codes for cuda_codes() alone (codes_cuda.h)
  Dtype x_dtype = Dtype::f32,
        y_dtype = Dtype::f32;  // f32 -> f32, bf16 -> bf16 or f32; sums are f32
  int m = 0;
  int x_stride = 0, y_stride = 0;  // elements
};

class CudaGemm {
 public:
  // Everything that run() enqueues goes to this stream; the workspace is one for all products on it. one_order = false
  // lets every size of M have the fastest algorithm there is, whatever the bits: for measuring what the promise above
  // costs.
  explicit CudaGemm(const cuda::On& on, bool one_order = true);
  ~CudaGemm();
  // Chooses for products like this one (matrix shape, strides, dtypes) with m up to max_m, and checks, unless this
  // process has done so before (one_order); waits, and uses device memory that it gives back. x, y and m of `like` are
  // not read. Error `unavailable`: no memory for the check, or no algorithm passes it.
  Status prepare(const CudaGemmArgs& like, int max_m);
  // Before: prepare() of its like. Allocates nothing and may be captured. m may be 0.
  void run(const CudaGemmArgs& args);
  size_t bytes() const;          // workspace, device memory
  std::string describe() const;  // what was chosen, one line per prepared product

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// y = x W^T for up to 32 rows of bf16, limited by reading W (gemv_sm90.cu): a candidate beside cuBLASLt's, which is
// taken where its rows have the same bits. One addition order: one accumulator per element and k ascending by 16, as in
// large products whose K is not split (model/README.md).
constexpr int kGemvRows = 32;

// A card of sm_90, bf16, at most kGemvRows rows, K and strides in multiples of 16 bytes.
bool cuda_gemv_takes(const CudaGemmArgs& args);
// Before: cuda_gemv_takes(). Allocates nothing and may be captured.
void cuda_gemv(const CudaGemmArgs& args, const cuda::On& on);

}  // namespace xpyd::model
