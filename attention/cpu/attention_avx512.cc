// The kernels for AVX-512: of f32 and bf16 over vectors of 16 lanes, with the bits of 8; of codes those of 256 bits.
#include "attention/cpu/codes_256.h"

namespace xpyd::attention {

void XPYD_AVX512(attention_avx512)(const AttentionArgs& args, ThreadTeam& team);
void XPYD_AVX512(attention_avx512)(const AttentionArgs& args, ThreadTeam& team) {
  attention_walk(args, team, kFloats, kCodes<Int8>, kCodes<Int4>);
}

}  // namespace xpyd::attention
