// y = x W^T on CUDA, by cuBLASLt. On the interpreter it is plain loops (tests/simt/gemm_simt.cc). The next operation
// adds the bias, in f32, to y as it is stored: f32 or rounded to bf16.
//
// One addition order: the bits of y[m, :] depend on x[m, :] and W, not on M or the row's place. cuBLASLt does not
// promise this, so prepare() enforces it. It refuses algorithms that split K. Of the others, it uses only algorithms
// whose rows have the bits of one reference for every size of M, tried on real weights and random x. The reference is
// the same in every process with this card and library.
//
// Thread safety: one thread, its stream's.
#pragma once

#include <memory>

#include "base/cuda/cuda.h"
#include "base/dtype.h"
#include "model/cuda/weights_cuda.h"

namespace xpyd::model {

struct CudaGemmArgs {
  const void* x = nullptr;  // [m, w.k], row stride x_stride, x_dtype, device, 16-byte aligned
  void* y = nullptr;        // [m, w.n], row stride y_stride, y_dtype, device, 16-byte aligned
  CudaMatrix w;             // of x_dtype
  Dtype x_dtype = Dtype::f32,
        y_dtype = Dtype::f32;  // f32 -> f32, bf16 -> bf16 or f32; sums are f32
  int m = 0;
  int x_stride = 0, y_stride = 0;  // elements
};

class CudaGemm {
 public:
  explicit CudaGemm(cuda::Stream& stream);  // run() enqueues there; its products share one workspace
  ~CudaGemm();
  // Chooses and checks algorithms for products like this one (matrix shape, strides, dtypes) with m up to max_m. It
  // waits, and frees the device memory of its trials. x, y and m of `like` are ignored. Error `unavailable`: no memory
  // for the check, or no algorithm passes it.
  Status prepare(const CudaGemmArgs& like, int max_m);
  // Enqueues one product; m may be 0. Requires: prepare() of such a product. It allocates nothing and may be captured.
  void run(const CudaGemmArgs& args);
  size_t bytes() const;  // workspace on the device

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace xpyd::model
