// Writes the K and V of a step's tokens to their places in the cache. Threads share the tokens.
#include <algorithm>
#include <cstring>

#include "attention/attention.h"
#include "base/status.h"

namespace xpyd {
namespace {

// [head_dim] of each kv head: consecutive in `from`, each at its own address in the cache.
void write_row(std::byte* to, const float* from, const KvShape& shape) {
  if (shape.dtype == Dtype::f32) {
    std::memcpy(to, from, shape.row_bytes());
    return;
  }
  bf16* out = reinterpret_cast<bf16*>(to);
  for (int d = 0; d < shape.head_dim; ++d) out[d] = to_bf16(from[d]);
}

}  // namespace

void append_kv(const AppendArgs& args, ThreadTeam& team) {
  size_t n_seqs = args.views.size();
  if (n_seqs == 0) return;
  XPYD_CHECK(args.q_offsets.size() == n_seqs + 1 && args.kv_lengths.size() == n_seqs);
  for (size_t s = 0; s < n_seqs; ++s) {
    const KvShape& shape = args.views[s].layout->shape;
    XPYD_CHECK(args.kv_lengths[s] >= args.q_offsets[s + 1] - args.q_offsets[s]);
    XPYD_CHECK(shape.dtype == Dtype::f32 || shape.dtype == Dtype::bf16);
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
            write_row(view.row(args.layer, kv, position, h),
                      from + size_t(h) * size_t(shape.head_dim), shape);
        }
      }
    }
  });
}

}  // namespace xpyd
