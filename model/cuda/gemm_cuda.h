// y = x W^T on CUDA. On a GPU it uses cuBLASLt and, for few rows, a GEMV kernel (gemv_sm90.cu). On the interpreter it
// is plain loops (tests/simt/gemm_simt.cc). The next operation adds the bias, in f32, to y as it is stored: f32 or
// rounded to bf16.
//
// One addition order: the bits of y[m, :] depend on x[m, :] and W, not on M or the row's place. cuBLASLt does not
// promise this, so prepare() enforces it. It refuses algorithms that split K. Of the others, it uses only algorithms
// whose rows have equal bits for every size of M, tried on real weights and random x. The choice of bits is the same in
// every process with this card and library.
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
  CudaMatrix w;             // of x_dtype; quantised for cuda_quantised_gemm() only (quantised_gemm_cuda.h)
  Dtype x_dtype = Dtype::f32,
        y_dtype = Dtype::f32;  // f32 -> f32, bf16 -> bf16 or f32; sums are f32
  int m = 0;
  int x_stride = 0, y_stride = 0;  // elements
};

class CudaGemm {
 public:
  // run() enqueues on this stream, whose products share one workspace. one_order = false allows the fastest algorithm
  // for each size of M, whatever its bits; benches use it to measure what the promise above costs.
  explicit CudaGemm(const cuda::On& on, bool one_order = true);
  ~CudaGemm();
  // Chooses and checks algorithms for products like this one (matrix shape, strides, dtypes) with m up to max_m, unless
  // this process has done so before (one_order). It waits, and frees the device memory of its trials. x, y and m of
  // `like` are ignored. Error `unavailable`: no memory for the check, or no algorithm passes it.
  Status prepare(const CudaGemmArgs& like, int max_m);
  // Enqueues one product; m may be 0. Requires: prepare() of such a product. It allocates nothing and may be captured.
  // If no chosen algorithm starts, another runs, with a warning in the log; it may add in another order.
  void run(const CudaGemmArgs& args);
  size_t bytes() const;          // workspace on the device
  std::string describe() const;  // the choices, one line per prepared product

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// y = x W^T for up to 32 rows of bf16, limited by reading W (gemv_sm90.cu). It is a candidate beside cuBLASLt's
// algorithms and is used if its rows have the same bits. One addition order: one accumulator per element takes k in
// ascending steps of 16, as large products do whose K is not split (README.md).
constexpr int kGemvRows = 32;

// True for bf16 on a card of sm_90 with at most kGemvRows rows, if K and strides are multiples of 16 bytes.
bool cuda_gemv_takes(const CudaGemmArgs& args);
// Requires: cuda_gemv_takes(). It allocates nothing and may be captured.
void cuda_gemv(const CudaGemmArgs& args, const cuda::On& on);

}  // namespace xpyd::model
