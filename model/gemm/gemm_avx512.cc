#include "model/gemm/gemm_lanes.h"

namespace xpyd::model {

extern const GemmKernels XPYD_AVX512(kAvx512Kernels);
extern const DotKernels XPYD_AVX512(kAvx512Dot), XPYD_AVX512(kAvx512Dot8);
const GemmKernels XPYD_AVX512(kAvx512Kernels) = kTheseKernels;
const DotKernels XPYD_AVX512(kAvx512Dot) = kTheseDots, XPYD_AVX512(kAvx512Dot8) = kTheseDots8;

}  // namespace xpyd::model
