#include "base/copy_lanes.h"

namespace xpyd {

void XPYD_AVX512(copy_streaming_avx512)(const Copy* pieces, size_t n);
void XPYD_AVX512(copy_streaming_avx512)(const Copy* pieces, size_t n) { copy_pieces(pieces, n); }

}  // namespace xpyd
