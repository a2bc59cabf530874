#include "model/gemm/ops_lanes.h"

namespace xpyd::model {

extern const Ops XPYD_AVX512(kAvx512Ops);
const Ops XPYD_AVX512(kAvx512Ops) = {"avx512", rms_norm, add, rope,        swiglu,
                                     exp_row,  peak,     sum, Isa::avx512, "16 lanes; same bits as avx2"};

}  // namespace xpyd::model
