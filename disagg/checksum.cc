#include "disagg/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

namespace xpyd {

std::vector<uint64_t> kv_checksums(const KvView& view, int token_begin, int token_end) {
  constexpr int kRun = 64;
  const KvShape& shape = view.layout->shape;
  const size_t bytes = size_t(shape.n_kv_heads) * shape.row_bytes();  // of a token: heads are neighbours
  XXH3_state_t state;
  std::vector<uint64_t> sums;
  for (int begin = token_begin; begin < token_end; begin += kRun) {
    XXH3_64bits_reset(&state);
    for (int layer = 0; layer < shape.n_layers; ++layer)
      for (int kv = 0; kv < 2; ++kv)
        for (int token = begin; token < std::min(begin + kRun, token_end); ++token)
          XXH3_64bits_update(&state, view.row(layer, kv, token, 0), bytes);
    sums.push_back(XXH3_64bits_digest(&state));
  }
  return sums;
}

}  // namespace xpyd
