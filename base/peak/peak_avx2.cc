#include "base/peak/peak_lanes.h"

namespace xpyd {

extern const PeakKernels kAvx2Peak;
const PeakKernels kAvx2Peak = {Isa::avx2, fma_peak, read_peak, copy_peak};

}  // namespace xpyd
