// The definition of attention.h in double precision, over any source of K and V elements. attention_reference() reads
// the cache; the test that proves work() reads through a recorder.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/attention.h"

namespace xpyd::attention {

// `element(seq, kv, token, kv_head, d)` returns one element as a double; kv is 0 for K and 1 for V.
template <class Element>
void attention_reference_over(const AttentionArgs& args, Element&& element) {
  for (size_t s = 0; s < args.views.size(); ++s) {
    const KvShape& shape = args.views[s].layout->shape;
    int group = args.n_heads / shape.n_kv_heads, dim = shape.head_dim;
    for (int i = args.q_offsets[s]; i < args.q_offsets[s + 1]; ++i) {
      int position = args.kv_lengths[s] - (args.q_offsets[s + 1] - args.q_offsets[s]) + i - args.q_offsets[s];
      int first = args.sliding_window ? std::max(0, position - args.sliding_window + 1) : 0;
      for (int h = 0; h < args.n_heads; ++h) {
        const float* q = args.q + (size_t(i) * size_t(args.n_heads) + size_t(h)) * size_t(dim);
        float* out = args.out + (q - args.q);
        std::vector<double> score, sum(size_t(dim), 0.0);
        for (int t = first; t <= position; ++t) {
          double dot = 0;
          for (int d = 0; d < dim; ++d) dot += double(q[d]) * element(int(s), 0, t, h / group, d);
          score.push_back(dot * double(args.scale));
        }
        double max = *std::max_element(score.begin(), score.end()), total = 0;
        for (double& x : score) total += x = std::exp(x - max);
        for (int t = first; t <= position; ++t)
          for (int d = 0; d < dim; ++d)
            sum[size_t(d)] += score[size_t(t - first)] * element(int(s), 1, t, h / group, d);
        for (int d = 0; d < dim; ++d) out[d] = float(sum[size_t(d)] / total);
      }
    }
  }
}

}  // namespace xpyd::attention
