#include "attention/plan.h"

#include "attention/kernels.h"

namespace xpyd::attention {
namespace {

constexpr int kStreamRows = 8;  // at most this many rows per kv head are streamed

}  // namespace

void make_plan(const AttentionArgs& args, int n_threads, Plan& plan) {
  const KvShape& shape = args.views[0].layout->shape;
  plan.units.clear(), plan.splits.clear(), plan.n_partials = 0;
  int group = args.n_heads / shape.n_kv_heads, streams = 0;
  auto is_stream = [&](int n_q) { return n_q == 1 || n_q * group <= kStreamRows; };
  auto splits_of = [&](Seq seq) {
    return Tokens{seq.visible(0).begin / kSplitTokens, (seq.visible(seq.n_q() - 1).end - 1) / kSplitTokens + 1};
  };
  for (int s = 0; s < int(args.views.size()); ++s) {
    Seq seq{args, s};
    if (seq.n_q() == 0) continue;
    if (is_stream(seq.n_q())) streams += splits_of(seq).end - splits_of(seq).begin;
  }
  // Few streams: cut them by kv heads, so that every thread has some.
  int wanted = n_threads > 1 ? 4 * n_threads : 1;
  int cuts = streams ? std::clamp((wanted + streams - 1) / streams, 1, shape.n_kv_heads) : 1;
  int heads = (shape.n_kv_heads + cuts - 1) / cuts;
  for (int s = 0; s < int(args.views.size()); ++s) {
    Seq seq{args, s};
    int n_q = seq.n_q();
    if (n_q == 0) continue;
    if (!is_stream(n_q)) {  // the last blocks see the most: first
      int tokens = std::max(1, kBlockRows / group);
      for (int first = (n_q - 1) / tokens * tokens; first >= 0; first -= tokens)
        for (int h = 0; h < shape.n_kv_heads; ++h)
          plan.units.push_back({s, first, std::min(tokens, n_q - first), h, 1, -1, false, 0});
      continue;
    }
    Tokens splits = splits_of(seq);
    bool apart = splits.end - splits.begin > 1;
    if (apart) plan.splits.push_back({s, splits.begin, plan.n_partials});
    for (int split = splits.begin; split < splits.end; ++split) {
      for (int h = 0; h < shape.n_kv_heads; h += heads)
        plan.units.push_back(
            {s, 0, n_q, h, std::min(heads, shape.n_kv_heads - h), apart ? split : -1, true, plan.n_partials});
      if (apart) plan.n_partials += size_t(n_q) * size_t(args.n_heads);
      if (!apart) break;
    }
  }
}

}  // namespace xpyd::attention
