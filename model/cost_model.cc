#include "model/cost_model.h"

#include <algorithm>

#include "model/model.h"

namespace xpyd {
namespace {

// Positions that the tokens [first, end) look at, themselves included, together: the sum over p of
// min(p + 1, window).
double attended(int64_t first, int64_t end, int window) {
  auto triangle = [](double n) { return n * (n + 1) / 2; };
  if (window == 0) return triangle(double(end)) - triangle(double(first));
  const int64_t grows = std::clamp<int64_t>(window, first, end);  // from here on the window is full
  return triangle(double(grows)) - triangle(double(first)) + double(end - grows) * window;
}

}  // namespace

double CostModel::kv_token_bytes() const { return double(kv_shape(config, kv).token_bytes()); }

Work CostModel::step(int64_t batch, int64_t tokens, int64_t cached, int64_t n_logits) const {
  const ModelConfig& c = config;
  const double q = double(c.n_heads) * c.head_dim, kv_width = double(c.n_kv_heads) * c.head_dim;
  Work total;
  auto matrix = [&](double outputs, double inputs, double m, double times) {
    if (m == 0) return;
    total.bytes += times * (outputs * inputs * double(dtype_bytes(weights)) +
                            m * (outputs + inputs) * double(dtype_bytes(activations)));
    total.flops += times * 2 * m * outputs * inputs;
  };
  // q and out count four bytes an element, as attention.h defines its work.
  auto attention = [&](int64_t n_seqs, int64_t n_q, int window, double times) {
    if (n_seqs == 0 || times <= 0) return;
    const int64_t end = cached + tokens, first = end - n_q;
    const int64_t begin = window ? std::max<int64_t>(0, first - window + 1) : 0;
    total.bytes += times * double(n_seqs) *
                   (2 * 4 * double(n_q) * q + double(end - begin) * kv_token_bytes() / c.n_layers);
    total.flops += times * double(n_seqs) * 4 * attended(first, end, window) * q;
  };
  // After the last layer's KV only the rows that give logits go on.
  const double all = double(batch * tokens), last = c.n_layers - 1, few = double(n_logits);
  matrix(q + 2 * kv_width, c.hidden, all, c.n_layers);
  for (auto [m, times] : {std::pair(all, last), std::pair(few, 1.0)}) {
    matrix(c.hidden, q, m, times);
    matrix(2.0 * c.intermediate, c.hidden, m, times);
    matrix(c.hidden, c.intermediate, m, times);
  }
  const double full = c.sliding_window ? std::min<double>(c.window_from_layer, last) : last;
  const bool last_slides = c.sliding_window && c.n_layers - 1 >= c.window_from_layer;
  attention(batch, tokens, 0, full);
  attention(batch, tokens, c.sliding_window, last - full);
  attention(n_logits, 1, last_slides ? c.sliding_window : 0, 1);
  matrix(c.vocab, c.hidden, few, 1);
  total.bytes += all * c.hidden * double(dtype_bytes(weights));  // embedding rows
  total.bytes += all * kv_token_bytes();                         // KV appended
  return total;
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

}  // namespace xpyd
