// The kernels for AVX2 and FMA, on vectors of 8 lanes.
#include "attention/cpu/quantised_rows.h"

namespace xpyd::attention {

void attention_avx2(const AttentionArgs& args, ThreadTeam& team) {
  tiled_attention(args, team, kFloats, kQuantised<Int8>, kQuantised<Int4>);
}

}  // namespace xpyd::attention
