#include "model/gemm/gemm_lanes.h"

namespace xpyd::model {

extern const GemmKernels kAvx2Kernels;
extern const DotKernels kAvx2Dot;
const GemmKernels kAvx2Kernels = kTheseKernels;
const DotKernels kAvx2Dot = kTheseDots;

}  // namespace xpyd::model
