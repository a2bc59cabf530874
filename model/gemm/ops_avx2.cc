#include "model/gemm/ops_lanes.h"

namespace xpyd::model {

extern const Ops kAvx2Ops;
const Ops kAvx2Ops = {"avx2",  rms_norm, add, rope,      swiglu,
                      exp_row, peak,     sum, Isa::avx2, "8 lanes; FMA in exp and in the sum of squares"};

}  // namespace xpyd::model
