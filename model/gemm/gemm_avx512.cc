#include "model/gemm/gemm_lanes.h"

namespace xpyd::model {

extern const GemmKernels XPYD_AVX512(kAvx512Kernels);
extern const DotKernels XPYD_AVX512(kAvx512Dot);
const GemmKernels XPYD_AVX512(kAvx512Kernels) = kTheseKernels;
const DotKernels XPYD_AVX512(kAvx512Dot) = kTheseDots;

}  // namespace xpyd::model
