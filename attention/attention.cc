// The table of variants, the check of arguments, and what the operation must move and compute.
#include "attention/attention.h"

#include <algorithm>

#include "attention/kernels.h"
#include "base/status.h"

namespace xpyd {
namespace {

bool always() { return true; }
#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

// Best last: default_attention takes the last available row.
constexpr AttentionVariant kVariants[] = {
    {"portable", attention_portable, always,
     "online softmax over fixed tiles (Milakov & Gimelshein 2018; FlashAttention, Dao et al. "
     "2022)"},
#if defined(__x86_64__)
    {"avx2", attention_avx2, has_avx2,
     "the same walk with 6x16 FMA register tiles; split KV for decode (Flash-Decoding, Dao et al. "
     "2023)"},
#endif
};

}  // namespace

std::span<const AttentionVariant> attention_variants() { return kVariants; }

const AttentionVariant& default_attention() {
  const AttentionVariant* best = nullptr;
  for (const AttentionVariant& variant : kVariants)
    if (variant.available()) best = &variant;
  XPYD_CHECK(best);
  return *best;
}

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
    for (int p = first; p < args.kv_lengths[s]; ++p)  // a multiply and an add for q.K and for w V
      total.flops += 4.0 * (p + 1 - begin(p)) * row_elements;
  }
  return total;
}

}  // namespace xpyd
