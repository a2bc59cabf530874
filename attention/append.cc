// Writes the K and V of a step's tokens to their places in the cache. Threads share the tokens.
// [head_dim] of each kv head are consecutive in the input, each at its own address in the cache.
#include <algorithm>

#include "attention/attention.h"
#include "attention/kv_row.h"
#include "base/status.h"

namespace xpyd {

void append_kv(const AppendArgs& args, ThreadTeam& team) {
  size_t n_seqs = args.views.size();
  if (n_seqs == 0) return;
  XPYD_CHECK(args.q_offsets.size() == n_seqs + 1 && args.kv_lengths.size() == n_seqs);
  for (size_t s = 0; s < n_seqs; ++s) {
    const KvShape& shape = args.views[s].layout->shape;
    XPYD_CHECK(args.kv_lengths[s] >= args.q_offsets[s + 1] - args.q_offsets[s]);
    XPYD_CHECK(kv_rows_supported(shape), dtype_name(shape.dtype));
    XPYD_CHECK(args.stride >= shape.n_kv_heads * shape.head_dim);
    XPYD_CHECK(args.layer >= 0 && args.layer < shape.n_layers);
  }
  int first_token = args.q_offsets[0], n_tokens = args.q_offsets[n_seqs] - first_token;
  team.run([&](int rank) {
    Range mine = share(n_tokens, rank, team.size());
    for (size_t s = 0; s < n_seqs; ++s) {
      int begin = std::max(args.q_offsets[s], first_token + mine.begin);
      int end = std::min(args.q_offsets[s + 1], first_token + mine.end);
      const KvView& view = args.views[s];
      const KvShape& shape = view.layout->shape;
      for (int i = begin; i < end; ++i) {
        int position = args.kv_lengths[s] - args.q_offsets[s + 1] + i;
        for (int kv = 0; kv < 2; ++kv) {
          const float* from = (kv ? args.v : args.k) + size_t(i) * size_t(args.stride);
          for (int h = 0; h < shape.n_kv_heads; ++h)
            write_kv_row(shape.dtype, shape.head_dim, from + size_t(h) * size_t(shape.head_dim),
                         view.row(args.layer, kv, position, h));
        }
      }
    }
  });
}

}  // namespace xpyd
