// The part of cuBLASLt that model/cuda/gemm_cuda.cu uses, so that its choice of algorithms runs on the interpreter.
// Products are computed in orders of additions that a test plants. An algorithm is an order and the sizes for which the
// heuristics name it. Nothing here is fast.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/cuda/cuda.h"
#include "base/dtype.h"

using cudaDataType_t = int;
constexpr int CUDA_R_32F = 0, CUDA_R_16BF = 14;
enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_NOT_INITIALIZED = 1,
  CUBLAS_STATUS_ALLOC_FAILED = 3,
  CUBLAS_STATUS_NOT_SUPPORTED = 15,
};
enum cublasOperation_t { CUBLAS_OP_T = 1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_PEDANTIC = 69 };
enum cublasLtMatmulDescAttributes_t { CUBLASLT_MATMUL_DESC_TRANSA };
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
};
enum cublasLtMatmulAlgoConfigAttributes_t { CUBLASLT_ALGO_CONFIG_SPLITK_NUM, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME };
constexpr uint32_t CUBLASLT_REDUCTION_SCHEME_NONE = 0;

struct cublasLtMatmulAlgo_t {
  int id;
};
struct cublasLtMatmulDescOpaque_t {};
struct cublasLtMatrixLayoutOpaque_t {
  int dtype;
  uint64_t rows, columns;
  int64_t stride;
};
struct cublasLtMatmulPreferenceOpaque_t {};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  cublasStatus_t state;
};
using cublasLtHandle_t = void*;

namespace simt::cublas {

enum class Order { ascending, descending, halves };  // halves: the two halves of K, added last
struct Algorithm {
  int id;
  Order order;
  int min_m, max_m;     // the sizes for which the heuristics name it
  bool splits = false;  // it says that it splits K
  int least_m = 0;      // the smallest m that it can run
};
inline std::vector<Algorithm> all;
inline std::vector<int> broken;  // ids that cannot run now
inline std::vector<int> ran;     // ids of successful products

inline const Algorithm* find(int id) {
  for (const Algorithm& a : all)
    if (a.id == id) return &a;
  return nullptr;
}

}  // namespace simt::cublas

inline const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "not supported";
}
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = &simt::cublas::all;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDescOpaque_t* desc, cublasComputeType_t, cudaDataType_t) {
  *desc = {};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDescOpaque_t*, cublasLtMatmulDescAttributes_t,
                                                     const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayoutOpaque_t* layout, cudaDataType_t dtype,
                                               uint64_t rows, uint64_t columns, int64_t stride) {
  *layout = {dtype, rows, columns, stride};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreferenceOpaque_t*) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreferenceOpaque_t*,
                                                           cublasLtMatmulPreferenceAttributes_t, const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                           cublasLtMatmulAlgoConfigAttributes_t what, void* to,
                                                           size_t bytes, size_t* written) {
  std::memset(to, 0, bytes);
  const int32_t parts = simt::cublas::find(algo->id)->splits ? 2 : 1;
  if (what == CUBLASLT_ALGO_CONFIG_SPLITK_NUM) std::memcpy(to, &parts, 4);
  *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, const cublasLtMatmulDescOpaque_t*, const cublasLtMatrixLayoutOpaque_t*,
    const cublasLtMatrixLayoutOpaque_t* x, const cublasLtMatrixLayoutOpaque_t*, const cublasLtMatrixLayoutOpaque_t*,
    const cublasLtMatmulPreferenceOpaque_t*, int wanted, cublasLtMatmulHeuristicResult_t* results, int* found) {
  *found = 0;
  const int m = int(x->columns);
  for (const simt::cublas::Algorithm& a : simt::cublas::all)
    if (*found < wanted && m >= a.min_m && m <= a.max_m) results[(*found)++] = {{a.id}, CUBLAS_STATUS_SUCCESS};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t, const cublasLtMatmulDescOpaque_t*, const void*, const void* w,
                                     const cublasLtMatrixLayoutOpaque_t* w_layout, const void* x,
                                     const cublasLtMatrixLayoutOpaque_t* x_layout, const void*, const void*,
                                     const cublasLtMatrixLayoutOpaque_t*, void* y,
                                     const cublasLtMatrixLayoutOpaque_t* y_layout, const cublasLtMatmulAlgo_t* algo,
                                     void*, size_t, cudaStream_t stream) {
  using namespace xpyd;
  const simt::cublas::Algorithm a = *simt::cublas::find(algo->id);
  if (std::count(simt::cublas::broken.begin(), simt::cublas::broken.end(), a.id) || int(x_layout->columns) < a.least_m)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  XPYD_CHECK(reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0);
  simt::cublas::ran.push_back(a.id);
  auto product = [=, wl = *w_layout, xl = *x_layout, yl = *y_layout] {
    using simt::cublas::Order;
    const auto *wp = static_cast<const bf16*>(w), *xp = static_cast<const bf16*>(x);
    const size_t k = size_t(wl.rows), n_columns = size_t(wl.columns);
    std::vector<float> turned(k * n_columns);  // k by k, so that the columns' chains run side by side
    for (size_t i = 0; i < k; ++i)
      for (size_t n = 0; n < n_columns; ++n) turned[i * n_columns + n] = to_f32(wp[n * size_t(wl.stride) + i]);
    for (size_t m = 0; m < xl.columns; ++m) {
      std::vector<float> sums(n_columns), second(n_columns);
      const auto add = [&](size_t i, auto& to) {
        const float factor = to_f32(xp[m * size_t(xl.stride) + i]);
        for (size_t n = 0; n < n_columns; ++n) to[n] += turned[i * n_columns + n] * factor;
      };
      if (a.order == Order::ascending)
        for (size_t i = 0; i < k; ++i) add(i, sums);
      if (a.order == Order::descending)
        for (size_t i = k; i-- > 0;) add(i, sums);
      if (a.order == Order::halves)
        for (size_t i = 0; i < k / 2; ++i) add(i, sums), add(k / 2 + i, second);
      for (size_t n = 0; n < n_columns; ++n) {
        const size_t at = m * size_t(yl.stride) + n;
        if (yl.dtype == CUDA_R_32F)
          static_cast<float*>(y)[at] = sums[n] + second[n];
        else
          static_cast<bf16*>(y)[at] = to_bf16(sums[n] + second[n]);
      }
    }
  };
  cuda::simt::launch("product", 1, 1, 0, stream, product);
  return CUBLAS_STATUS_SUCCESS;
}
