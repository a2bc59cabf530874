#include "model/llama/llama_step.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "attention/attention.h"
#include "base/status.h"
#include "model/weights/weights.h"

namespace xpyd::model {

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

WeightBits::WeightBits(const Weights& weights) : WeightBits(weights.dtype) {
  const auto bits = [](const PackedMatrix& m) { return 8.0 * double(m.bytes()) / (double(m.n) * m.k); };
  if (!weights.layers.empty() && weights.layers[0].qkv.n > 0) matrices = bits(weights.layers[0].qkv);
  if (weights.lm_head.n > 0) head = bits(weights.lm_head);
}

Work llama_work(const ModelConfig& c, const WeightBits& bits, Dtype activations, const StepRows& rows,
                const std::function<Work(bool kept, int layer)>& attention) {
  Work total;
  auto add = [&](const Work& one, int times) {
    total.bytes += times * one.bytes;
    total.flops += times * one.flops;
  };
  // m rows meet one of `matrices` each.
  auto matrix = [&](double outputs, double inputs, double m, int times, double weight_bits, double matrices = 1) {
    if (m == 0) return;
    add({.bytes = matrices * outputs * inputs * weight_bits / 8.0 +
                  m * (outputs + inputs) * double(dtype_bytes(activations)),
         .flops = 2 * m * outputs * inputs},
        times);
  };
  const int last = c.n_predict ? c.trunk_layers() : c.n_layers - 1;  // number of layers that take all rows
  const double q = double(c.n_heads) * c.head_dim, kv = double(c.n_kv_heads) * c.head_dim;
  matrix(q + 2 * kv, c.hidden, rows.all, c.n_layers, bits.matrices);
  const int sparse_last = c.sparse(last), sparse = c.sparse_layers() - sparse_last;
  for (auto [m, times, n_sparse] :
       {std::tuple(rows.all, last, sparse), std::tuple(rows.kept, 1 - c.n_predict, sparse_last)}) {
    matrix(c.hidden, q, m, times, bits.matrices);
    matrix(2.0 * c.intermediate, c.hidden, m, times - n_sparse, bits.matrices);
    matrix(c.hidden, c.intermediate, m, times - n_sparse, bits.matrices);
    if (n_sparse == 0) continue;
    const Experts& e = c.experts;
    matrix(e.count, c.hidden, m, n_sparse, stored_bits(Dtype::f32));  // the router
    matrix(2.0 * e.intermediate, c.hidden, m * e.used, n_sparse, bits.matrices, e.touched(m));
    matrix(c.hidden, e.intermediate, m * e.used, n_sparse, bits.matrices, e.touched(m));
  }
  matrix(c.hidden, 2.0 * c.hidden, rows.all, c.n_predict, bits.matrices);
  matrix(c.vocab, c.hidden, rows.logits, 1, bits.head);
  const int full = c.sliding_window ? std::min(c.window_from_layer, last) : last;
  if (full > 0) add(attention(false, 0), full);
  if (full < last) add(attention(false, last), last - full);
  if (!c.n_predict) add(attention(true, last), 1);
  total.bytes += rows.all * c.hidden * bits.table / 8;  // embedding rows
  total.bytes += rows.all * rows.kv_token_bytes;        // appended KV; attention counts its reads
  return total;
}

Work llama_work(const StepInput& step, const ModelConfig& c, const WeightBits& bits, Dtype activations) {
  if (step.views.empty()) return {};
  WantedRows wanted;
  wanted.select(step);
  const StepRows rows{.all = double(step.token_ids.size()),
                      .kept = double(wanted.tokens.size()),
                      .logits = double(step.logit_rows.size()),
                      .kv_token_bytes = double(step.views[0].layout->shape.token_bytes())};
  return llama_work(c, bits, activations, rows, [&](bool kept, int layer) {
    AttentionArgs args{.q_offsets = step.q_offsets,
                       .kv_lengths = step.kv_lengths,
                       .views = step.views,
                       .layer = layer,
                       .n_heads = c.n_heads,
                       .sliding_window = c.window(layer)};
    if (kept) args.q_offsets = wanted.q_offsets, args.kv_lengths = wanted.kv_lengths, args.views = wanted.views;
    return work(args);
  });
}

}  // namespace xpyd::model
