// The kernels for AVX-512 with VNNI, whose instructions multiply codes and add the products at once.
#define XPYD_VNNI
#include "attention/cpu/quantised_rows.h"

namespace xpyd::attention {

void XPYD_AVX512(attention_avx512_vnni)(const AttentionArgs& args, ThreadTeam& team);
void XPYD_AVX512(attention_avx512_vnni)(const AttentionArgs& args, ThreadTeam& team) {
  tiled_attention(args, team, kFloats, kQuantised<Int8>, kQuantised<Int4>);
}

}  // namespace xpyd::attention
