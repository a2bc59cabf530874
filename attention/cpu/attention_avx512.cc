// The kernels for AVX-512. Those of f32, bf16 and fp8 use 16 lanes, with the bits of 8; those of int8 and int4 use 256
// bits.
#include "attention/cpu/quantised_rows.h"

namespace xpyd::attention {

void XPYD_AVX512(attention_avx512)(const AttentionArgs& args, ThreadTeam& team);
void XPYD_AVX512(attention_avx512)(const AttentionArgs& args, ThreadTeam& team) {
  tiled_attention(args, team, kFloats, kQuantised<Int8>, kQuantised<Int4>);
}

}  // namespace xpyd::attention
