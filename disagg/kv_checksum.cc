#include "disagg/kv_checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

#include "base/status.h"

namespace xpyd {

std::vector<uint64_t> kv_checksums(const KvView& view, int tokens, int block_tokens) {
  XPYD_CHECK(tokens >= 0 && block_tokens > 0);
  const KvShape& shape = view.layout->shape;
  const size_t heads_bytes = size_t(shape.n_kv_heads) * shape.row_bytes();  // neighbours everywhere
  std::vector<uint64_t> sums;
  XXH3_state_t state;
  for (int begin = 0; begin < tokens; begin += block_tokens) {
    const int end = std::min(tokens, begin + block_tokens);
    XXH3_64bits_reset(&state);
    for (int layer = 0; layer < shape.n_layers; ++layer)
      for (int kv = 0; kv < 2; ++kv)
        for (int token = begin; token < end;) {
          // Tokens that follow each other in memory are hashed together.
          const std::byte* run = view.row(layer, kv, token, 0);
          size_t bytes = heads_bytes;
          for (++token; token < end && view.row(layer, kv, token, 0) == run + bytes; ++token)
            bytes += heads_bytes;
          XXH3_64bits_update(&state, run, bytes);
        }
    sums.push_back(XXH3_64bits_digest(&state));
  }
  return sums;
}

}  // namespace xpyd
