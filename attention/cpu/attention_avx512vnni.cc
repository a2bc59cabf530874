// The kernels for AVX-512 with VNNI, whose instructions multiply codes and add the products at once.
#define XPYD_VNNI
#include "attention/cpu/codes_256.h"

namespace xpyd::attention {

void XPYD_AVX512(attention_avx512_vnni)(const AttentionArgs& args, ThreadTeam& team);
void XPYD_AVX512(attention_avx512_vnni)(const AttentionArgs& args, ThreadTeam& team) {
  attention_walk(args, team, kFloats, kCodes<Int8>, kCodes<Int4>);
}

}  // namespace xpyd::attention
