#include "base/peak/peak_lanes.h"

namespace xpyd {

extern const PeakKernels XPYD_AVX512(kAvx512Peak);
const PeakKernels XPYD_AVX512(kAvx512Peak) = {Isa::avx512, fma_peak, read_peak, copy_peak};

}  // namespace xpyd
