#include "model/cost/cost_model.h"

#include <algorithm>

#include "model/llama/llama_step.h"

namespace xpyd::model {
namespace {

// Sum of the positions that the tokens [first, end) attend to, their own included: sum over p of min(p + 1, window).
double attended(int64_t first, int64_t end, int window) {
  auto triangle = [](double n) { return n * (n + 1) / 2; };
  if (window == 0) return triangle(double(end)) - triangle(double(first));
  const int64_t grows = std::clamp<int64_t>(window, first, end);  // from here on the window is full
  return triangle(double(grows)) - triangle(double(first)) + double(end - grows) * window;
}

}  // namespace

double CostModel::kv_token_bytes() const { return double(kv_shape(config, kv).token_bytes()); }

Work CostModel::step(int64_t batch, int64_t tokens, int64_t cached, int64_t n_logits) const {
  const StepRows rows{.all = double(batch * tokens),
                      .kept = double(n_logits),
                      .logits = double(n_logits),
                      .kv_token_bytes = kv_token_bytes()};
  return llama_work(config, weights, activations, rows, [&](bool kept, int layer) -> Work {
    const double n_seqs = double(kept ? n_logits : batch);
    if (n_seqs == 0) return {};
    const double q = double(config.n_heads) * config.head_dim;
    const int window = config.window(layer);
    const int64_t n_q = kept ? 1 : tokens, end = cached + tokens, first = end - n_q;
    const int64_t begin = window ? std::max<int64_t>(0, first - window + 1) : 0;
    // q and out count four bytes an element, as attention.h defines its work.
    return {.bytes = n_seqs * (2 * 4 * double(n_q) * q + double(end - begin) * kv_token_bytes() / config.n_layers),
            .flops = n_seqs * 4 * attended(first, end, window) * q};
  });
}

Work CostModel::prefill(int64_t tokens, int64_t cached, bool logits) const {
  return step(1, tokens, cached, logits ? 1 : 0);
}

Work CostModel::decode(int64_t batch, int64_t context) const { return step(batch, 1, context - 1, batch); }

double CostModel::break_even_bytes_per_s(int64_t prefix, double flops_per_s) const {
  return double(prefix) * kv_token_bytes() * flops_per_s / prefill(prefix, 0, false).flops;
}

double seconds(const Work& work, const Rates& rates) {
  return std::max(work.flops / rates.flops_per_s, work.bytes / rates.bytes_per_s);
}

}  // namespace xpyd::model
