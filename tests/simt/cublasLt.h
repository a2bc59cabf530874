// What model/gemm_cuda.cu uses of cuBLASLt, for its choice of algorithms to run on the interpreter:
// products in orders of additions that a test plants. An algorithm is an order and the sizes for
// which the heuristics name it; nothing here is fast.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/cuda.h"

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
enum cublasLtMatmulDescAttributes_t { CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET };
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
};
enum cublasLtMatmulAlgoConfigAttributes_t {
  CUBLASLT_ALGO_CONFIG_ID,
  CUBLASLT_ALGO_CONFIG_TILE_ID,
  CUBLASLT_ALGO_CONFIG_STAGES_ID,
  CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
  CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
  CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION,
  CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
  CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME
};
constexpr uint32_t CUBLASLT_REDUCTION_SCHEME_NONE = 0;

struct cublasLtMatmulAlgo_t {
  int id;
  bool operator==(const cublasLtMatmulAlgo_t&) const = default;
};
struct cublasLtMatmulDescOpaque_t {
  int32_t sm_target = 0;
};
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

// halves: of K, added last; sixteens: exact sums of 16 products, as mma_m16n8k16 is interpreted
enum class Order { ascending, descending, halves, sixteens };
struct Algorithm {
  int id;
  Order order;
  int min_m, max_m;        // for which the heuristics name it
  int sm_target = 0;       // for which they do; 0: the whole card
  bool only_bf16 = false;  // has no f32 result
  int least_m = 0;         // that it can run
};
inline std::vector<Algorithm> all;
inline std::vector<int> broken;  // ids that cannot run now
inline std::vector<int> ran;     // ids, of successful products

const Algorithm* find(int id);

}  // namespace simt::cublas

const char* cublasLtGetStatusString(cublasStatus_t status);
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle);
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle);
cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDescOpaque_t* desc, cublasComputeType_t, cudaDataType_t);
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDescOpaque_t* desc, cublasLtMatmulDescAttributes_t what,
                                              const void* from, size_t bytes);
cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayoutOpaque_t* layout, cudaDataType_t dtype, uint64_t rows,
                                        uint64_t columns, int64_t stride);
cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreferenceOpaque_t*);
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreferenceOpaque_t*,
                                                    cublasLtMatmulPreferenceAttributes_t, const void*, size_t);
cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t what, void* to, size_t bytes,
                                                    size_t* written);
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, const cublasLtMatmulDescOpaque_t* desc,
                                              const cublasLtMatrixLayoutOpaque_t* w,
                                              const cublasLtMatrixLayoutOpaque_t* x,
                                              const cublasLtMatrixLayoutOpaque_t*, const cublasLtMatrixLayoutOpaque_t*,
                                              const cublasLtMatmulPreferenceOpaque_t*, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results, int* found);
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, const cublasLtMatmulDescOpaque_t* desc, const void* alpha,
                              const void* w, const cublasLtMatrixLayoutOpaque_t* w_layout, const void* x,
                              const cublasLtMatrixLayoutOpaque_t* x_layout, const void* beta, const void*,
                              const cublasLtMatrixLayoutOpaque_t*, void* y,
                              const cublasLtMatrixLayoutOpaque_t* y_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t bytes, cudaStream_t stream);
