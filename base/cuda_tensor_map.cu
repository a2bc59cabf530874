// The encoding is the driver's.
#include <cuda.h>

#include <cstring>

#include "base/cuda_driver.h"
#include "base/cuda_tensor_map.h"

namespace xpyd::cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode find() {
  Encode encode = nullptr;
  XPYD_CHECK(look_up(encode, "cuTensorMapEncodeTiled", 12000), "cuTensorMapEncodeTiled: the driver does not have it");
  return encode;
}

}  // namespace

TensorMap make_tensor_map(const BoxedMatrix& matrix) {
  static const Encode encode = find();
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  static_assert(alignof(TensorMap) >= alignof(CUtensorMap));
  const cuuint64_t sizes[] = {matrix.columns, matrix.rows}, strides[] = {matrix.row_stride};
  const cuuint32_t box[] = {cuuint32_t(kBoxColumns), cuuint32_t(matrix.box_rows)};
  const cuuint32_t every[] = {1, 1};
  CUtensorMap encoded;
  CUresult result = encode(&encoded, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix.data), sizes,
                           strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  XPYD_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: error " + std::to_string(int(result)));
  TensorMap map;
  std::memcpy(&map, &encoded, sizeof map);
  return map;
}

}  // namespace xpyd::cuda
