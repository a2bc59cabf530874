#include "base/copy_lanes.h"

namespace xpyd {

void copy_streaming_avx2(const Copy* pieces, size_t n);
void copy_streaming_avx2(const Copy* pieces, size_t n) { copy_pieces(pieces, n); }

}  // namespace xpyd
