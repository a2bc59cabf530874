// Integers by VPDPWSSD and VPDPBUSD: one instruction multiplies two pairs or four bytes and adds them to a sum.
#define XPYD_VNNI
#include "model/gemm/gemm_lanes.h"

namespace xpyd::model {

extern const DotKernels XPYD_AVX512(kAvx512VnniDot), XPYD_AVX512(kAvx512VnniDot8);
const DotKernels XPYD_AVX512(kAvx512VnniDot) = kTheseDots, XPYD_AVX512(kAvx512VnniDot8) = kTheseDots8;

}  // namespace xpyd::model
