// Integers by VPDPWSSD: one instruction multiplies two pairs and adds them to a sum.
#define XPYD_VNNI
#include "model/gemm/gemm_lanes.h"

namespace xpyd::model {

extern const DotKernels XPYD_AVX512(kAvx512VnniDot);
const DotKernels XPYD_AVX512(kAvx512VnniDot) = kTheseDots;

}  // namespace xpyd::model
