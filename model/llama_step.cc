#include "model/llama_step.h"

#include <algorithm>
#include <string>

#include "attention/attention.h"
#include "base/status.h"

namespace xpyd {

void check_step(const StepInput& step, const ModelConfig& c, int max_step_tokens, int max_logits, int n_previous,
                int n_ranks) {
  const int n = int(step.token_ids.size()), n_seqs = int(step.kv_lengths.size());
  XPYD_CHECK(n > 0 && n <= max_step_tokens,
             std::to_string(n) + " tokens of at most " + std::to_string(max_step_tokens));
  XPYD_CHECK(int(step.logit_rows.size()) <= max_logits,
             std::to_string(step.logit_rows.size()) + " of " + std::to_string(max_logits));
  XPYD_CHECK(int(step.q_offsets.size()) == n_seqs + 1 && int(step.views.size()) == n_seqs * n_ranks,
             std::to_string(step.views.size()) + " views of " + std::to_string(n_seqs) + " sequences on " +
                 std::to_string(n_ranks) + " ranks");
  XPYD_CHECK(step.q_offsets[0] == 0 && step.q_offsets[size_t(n_seqs)] == n);
  for (size_t s = 0; s < size_t(n_seqs); ++s) {
    const int q_tokens = step.q_offsets[s + 1] - step.q_offsets[s];
    XPYD_CHECK(q_tokens >= 0 && step.kv_lengths[s] >= q_tokens && step.kv_lengths[s] <= c.max_position,
               "sequence " + std::to_string(s) + ": " + std::to_string(q_tokens) + " tokens, KV length " +
                   std::to_string(step.kv_lengths[s]));
  }
  for (int32_t id : step.token_ids) XPYD_CHECK(id >= -n_previous && id < c.vocab, std::to_string(id));
  int previous = -1;
  for (int32_t r : step.logit_rows) {
    XPYD_CHECK(r > previous && r < n, std::to_string(r));
    previous = r;
  }
}

void WantedRows::reserve(size_t n) {
  for (auto* v : {&tokens, &kv_lengths, &logit_rows}) v->reserve(n);
  q_offsets.reserve(n + 1);
  views.reserve(n);
}

void WantedRows::select(const StepInput& step) {
  tokens.clear();
  q_offsets.assign(1, 0);
  kv_lengths.clear();
  views.clear();
  logit_rows.clear();
  size_t next = 0;
  for (size_t s = 0; s < step.kv_lengths.size() && next < step.logit_rows.size(); ++s) {
    const int first = step.logit_rows[next], end = step.q_offsets[s + 1];
    if (first >= end) continue;
    for (int i = first; i < end; ++i) {
      if (next < step.logit_rows.size() && step.logit_rows[next] == i) {
        logit_rows.push_back(int32_t(tokens.size()));
        ++next;
      }
      tokens.push_back(i);
    }
    q_offsets.push_back(int32_t(tokens.size()));
    kv_lengths.push_back(step.kv_lengths[s]);
    views.push_back(step.views[s]);
  }
}

Work llama_work(const StepInput& step, const ModelConfig& c, Dtype weights, Dtype activations) {
  const int n = int(step.token_ids.size()), n_logits = int(step.logit_rows.size());
  Work total;
  auto matrix = [&](double outputs, double inputs, double m, int times) {
    if (m == 0) return;
    total.bytes += times * (outputs * inputs * double(dtype_bytes(weights)) +
                            m * (outputs + inputs) * double(dtype_bytes(activations)));
    total.flops += times * 2 * m * outputs * inputs;
  };
  auto attention = [&](std::span<const int32_t> q_offsets, std::span<const int32_t> kv_lengths,
                       std::span<const KvView> views, int layer, int times) {
    if (times <= 0) return;
    AttentionArgs args{.q_offsets = q_offsets,
                       .kv_lengths = kv_lengths,
                       .views = views,
                       .layer = layer,
                       .n_heads = c.n_heads,
                       .sliding_window = layer >= c.window_from_layer ? c.sliding_window : 0};
    const Work one = work(args);
    total.bytes += times * one.bytes;
    total.flops += times * one.flops;
  };
  WantedRows wanted;
  wanted.select(step);
  const int last = c.n_layers - 1, few = int(wanted.tokens.size());
  const double q = c.n_heads * c.head_dim, kv = c.n_kv_heads * c.head_dim;
  matrix(q + 2 * kv, c.hidden, n, c.n_layers);
  for (auto [m, times] : {std::pair(n, last), std::pair(few, 1)}) {
    matrix(c.hidden, q, m, times);
    matrix(2.0 * c.intermediate, c.hidden, m, times);
    matrix(c.hidden, c.intermediate, m, times);
  }
  const int full = c.sliding_window ? std::min(c.window_from_layer, last) : last;
  attention(step.q_offsets, step.kv_lengths, step.views, 0, full);
  attention(step.q_offsets, step.kv_lengths, step.views, last, last - full);
  attention(wanted.q_offsets, wanted.kv_lengths, wanted.views, last, 1);
  matrix(c.vocab, c.hidden, n_logits, 1);
  total.bytes += double(n) * c.hidden * double(dtype_bytes(weights));  // embedding rows
  for (size_t s = 0; s < step.views.size(); ++s)                       // KV appended; attention counts what it reads
    total.bytes += double(step.q_offsets[s + 1] - step.q_offsets[s]) *
                   double(step.views[s].layout->shape.token_bytes());
  return total;
}

}  // namespace xpyd
