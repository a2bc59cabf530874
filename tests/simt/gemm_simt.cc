// CudaGemm without a GPU: one thread of the interpreter, one chain of additions per element.
#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "model/cuda/gemm_cuda.h"

namespace xpyd::model {
namespace {

float load(const void* p, Dtype dtype, size_t i) {
  return dtype == Dtype::f32 ? static_cast<const float*>(p)[i] : to_f32(static_cast<const bf16*>(p)[i]);
}

void gemm(CudaGemmArgs a) {
  const size_t k = size_t(a.w.k);
  std::vector<float> x(k), w(k);
  auto read_row = [&](const void* from, int row, int stride, std::vector<float>& to) {
    for (size_t i = 0; i < k; ++i) to[i] = load(from, a.x_dtype, size_t(row) * size_t(stride) + i);
  };
  for (int n = 0; n < a.w.n; ++n) {
    read_row(a.w.data, n, a.w.stride, w);
    for (int m = 0; m < a.m; ++m) {
      read_row(a.x, m, a.x_stride, x);
      float sum = 0;
      for (size_t i = 0; i < k; ++i) sum += x[i] * w[i];
      const size_t at = size_t(m) * size_t(a.y_stride) + size_t(n);
      if (a.y_dtype == Dtype::f32)
        static_cast<float*>(a.y)[at] = sum;
      else
        static_cast<bf16*>(a.y)[at] = to_bf16(sum);
    }
  }
}

using Like = std::tuple<int, int, int, int, int, Dtype, Dtype>;
Like like_of(const CudaGemmArgs& a) { return {a.w.n, a.w.k, a.w.stride, a.x_stride, a.y_stride, a.x_dtype, a.y_dtype}; }

}  // namespace

struct CudaGemm::Impl {
  cuda::Stream& stream;
  std::vector<std::pair<Like, int>> prepared;  // with the largest m
};

CudaGemm::CudaGemm(cuda::Stream& stream) : impl_(new Impl{stream, {}}) {}
CudaGemm::~CudaGemm() = default;

Status CudaGemm::prepare(const CudaGemmArgs& like, int max_m) {
  impl_->prepared.emplace_back(like_of(like), max_m);
  return ok();
}

void CudaGemm::run(const CudaGemmArgs& a) {
  if (a.m == 0) return;
  XPYD_CHECK(
      std::any_of(impl_->prepared.begin(), impl_->prepared.end(),
                  [&](const auto& p) { return p.first == like_of(a) && a.m <= p.second; }),
      "no prepare() of " + std::to_string(a.w.n) + " x " + std::to_string(a.w.k) + ", m = " + std::to_string(a.m));
  cuda::launch(gemm, "gemm", cuda::Shape{}, impl_->stream, a);
}

size_t CudaGemm::bytes() const { return 0; }

}  // namespace xpyd::model
