#include "disagg/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

namespace xpyd::disagg {

std::vector<uint64_t> kv_checksums(std::span<const KvView> views, const KvShards& shards, int token_begin,
                                   int token_end, int replica) {
  std::vector<uint64_t> sums;
  XXH3_state_t state;
  for (int begin = token_begin; begin < token_end; begin += kChecksumTokens) {
    XXH3_64bits_reset(&state);
    const int end = std::min(begin + kChecksumTokens, token_end);
    for (int stage = 0; stage < shards.pp; ++stage) {
      const int n_layers = shards.layers(stage).size();
      for (int plane = 0; plane < 2 * n_layers; ++plane)
        for (int token = begin; token < end; ++token)
          for (int rank = replica; rank < shards.tp; rank += shards.replicas()) {
            const KvView& view = views[size_t(stage * shards.tp + rank)];
            XXH3_64bits_update(&state, view.row(plane / 2, plane % 2, token, 0),
                               size_t(shards.heads(rank).size()) * view.layout->shape.row_bytes());
          }
    }
    sums.push_back(XXH3_64bits_digest(&state));
  }
  return sums;
}

}  // namespace xpyd::disagg
