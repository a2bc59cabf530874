// The table of CPU variants, work(), append_kv(), and the reference over the cache.
#include <algorithm>

#include "attention/attention.h"
#include "attention/attention_reference.h"
#include "attention/cpu/kernels.h"
#include "attention/kv_dtype/kv_row.h"
#include "base/status.h"

namespace xpyd::attention {
namespace {

constexpr AttentionVariant kVariants[] = {
    {"portable", attention_portable, Isa::portable,
     "online softmax over fixed tiles (Milakov & Gimelshein 2018; FlashAttention, Dao et al. "
     "2022)"},
#if defined(__x86_64__)
    {"avx2", attention_avx2, Isa::avx2,
     "the same tiled attention with 6x16 FMA register tiles; split KV for decode (Flash-Decoding, Dao et al. 2023)"},
    {"avx512", attention_avx512, Isa::avx512, "as avx2 with vectors of 16 lanes; same bits as avx2"},
    {"avx512_vnni", attention_avx512_vnni, Isa::avx512_vnni,
     "as avx512; dot products of int8 and int4 KV use VNNI instructions"},
#endif
};

}  // namespace

std::span<const AttentionVariant> attention_variants() { return kVariants; }

const AttentionVariant& default_attention() { return best_row(kVariants); }

Work work(const AttentionArgs& args) {
  Work total;
  for (size_t s = 0; s < args.views.size(); ++s) {
    const KvShape& shape = args.views[s].layout->shape;
    int n_q = args.q_offsets[s + 1] - args.q_offsets[s], first = args.kv_lengths[s] - n_q;
    if (n_q == 0) continue;
    auto begin = [&](int position) {
      return args.sliding_window ? std::max(0, position - args.sliding_window + 1) : 0;
    };
    double row_elements = double(args.n_heads) * shape.head_dim;
    total.bytes += 2 * 4 * n_q * row_elements;  // q and out
    total.bytes += 2.0 * (args.kv_lengths[s] - begin(first)) * shape.n_kv_heads * double(shape.row_bytes());
    for (int p = first; p < args.kv_lengths[s]; ++p)  // q . K and weight * V: a multiplication and an addition each
      total.flops += 4.0 * (p + 1 - begin(p)) * row_elements;
  }
  return total;
}

// Threads share the tokens. The KV heads of a token are adjacent in the input; in the cache each has its own address.
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

void attention_reference(const AttentionArgs& args) {
  attention_reference_over(args, [&](int seq, int kv, int token, int head, int d) {
    const KvView& view = args.views[size_t(seq)];
    const KvShape& shape = view.layout->shape;
    return double(kv_element(shape.dtype, shape.head_dim, view.row(args.layer, kv, token, head), d));
  });
}

}  // namespace xpyd::attention
