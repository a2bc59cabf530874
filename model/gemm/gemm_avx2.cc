#include "model/gemm/gemm_lanes.h"

namespace xpyd::model {

extern const GemmKernels kAvx2Kernels;
extern const DotKernels kAvx2Dot, kAvx2Dot8;
const GemmKernels kAvx2Kernels = kTheseKernels;
const DotKernels kAvx2Dot = kTheseDots, kAvx2Dot8 = kTheseDots8;

}  // namespace xpyd::model
