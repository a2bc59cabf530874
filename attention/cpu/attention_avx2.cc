// The kernels for AVX2 and FMA, on vectors of 8 lanes.
#include "attention/cpu/codes_256.h"

namespace xpyd::attention {

void attention_avx2(const AttentionArgs& args, ThreadTeam& team) {
  attention_walk(args, team, kFloats, kCodes<Int8>, kCodes<Int4>);
}

}  // namespace xpyd::attention
