// The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3) on the CPU. model/README.md
// lists the operations with their shapes.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/status.h"
#include "model/gemm.h"
#include "model/llama_step.h"
#include "model/model.h"
#include "model/ops.h"
#include "model/weights.h"

namespace xpyd {
namespace {

// Below this many elements a row operation runs on the calling thread: it takes about as long as
// handing it to the team would.
constexpr long kSerialElements = 4096;
// Rows are also cut into columns, so that a single row is shared by the team.
constexpr int kColumnChunk = 1024;

// Tokens of a step, or of a part of it, as attention wants them.
struct Rows {
  int n = 0;
  std::span<const int32_t> q_offsets, kv_lengths;
  std::span<const KvView> views;
};

class Llama final : public Model {
 public:
  Llama(std::shared_ptr<const Weights> weights, ThreadTeam& team, int max_step_tokens,
        int max_logits, const Kernels& kernels)
      : weights_(std::move(weights)),
        c_(weights_->config),
        team_(team),
        max_step_tokens_(max_step_tokens),
        max_logits_(max_logits),
        q_width_(c_.n_heads * c_.head_dim),
        kv_width_(c_.n_kv_heads * c_.head_dim),
        gemm_(kernels.gemm ? *kernels.gemm : default_gemm()),
        attention_(kernels.attention ? *kernels.attention : default_attention()),
        gemm_scratch_(max_step_tokens, std::max({c_.hidden, q_width_, c_.intermediate}),
                      team.size()),
        positions_(size_t(max_step_tokens)) {
    XPYD_CHECK(max_step_tokens > 0 && max_logits >= 0);
    wanted_.reserve(size_t(max_step_tokens));
    size_t floats = 0;
    auto rows = [&](int width) {
      const size_t begin = floats;
      floats += size_t(max_step_tokens) * size_t(width);
      floats = (floats + 15) / 16 * 16;  // a cache line
      return begin;
    };
    const size_t x = rows(c_.hidden), normed = rows(c_.hidden), qkv = rows(qkv_width()),
                 q = rows(q_width_), attended = rows(q_width_), gate_up = rows(2 * c_.intermediate),
                 cos = rows(c_.head_dim / 2), sin = rows(c_.head_dim / 2);
    activations_ = Buffer(floats * sizeof(float));
    float* base = activations_.as<float>();
    x_ = base + x;
    normed_ = base + normed;
    qkv_ = base + qkv;
    q_ = base + q;
    attended_ = base + attended;
    gate_up_ = base + gate_up;
    cos_ = base + cos;
    sin_ = base + sin;
  }

  const ModelConfig& config() const override { return c_; }
  void forward(const StepInput& step, float* logits) override;
  Work work(const StepInput& step) const override;
  size_t weight_bytes() const override { return weights_->bytes(); }
  size_t scratch_bytes() const override {
    return activations_.size() + gemm_scratch_.bytes() + positions_.size() * sizeof(int);
  }

 private:
  int qkv_width() const { return q_width_ + 2 * kv_width_; }
  int window(int layer) const { return layer >= c_.window_from_layer ? c_.sliding_window : 0; }

  // body(row, begin, end) for all elements [0, width) of all rows, shared by the team.
  template <class Body>
  void for_elements(int n_rows, int width, Body body) {
    const int chunks = (width + kColumnChunk - 1) / kColumnChunk;
    auto part = [&](Range items) {
      for (int i = items.begin; i < items.end; ++i) {
        const int begin = i % chunks * kColumnChunk;
        body(i / chunks, begin, std::min(begin + kColumnChunk, width));
      }
    };
    if (long(n_rows) * width < kSerialElements) return part({0, n_rows * chunks});
    team_.run([&](int rank) { part(share(n_rows * chunks, rank, team_.size())); });
  }
  // body(row) for all rows; `width` is what a row costs, in elements.
  template <class Body>
  void for_rows(int n_rows, int width, Body body) {
    auto part = [&](Range rows) {
      for (int row = rows.begin; row < rows.end; ++row) body(row);
    };
    if (n_rows == 1 || long(n_rows) * width < kSerialElements) return part({0, n_rows});
    team_.run([&](int rank) { part(share(n_rows, rank, team_.size())); });
  }

  void gemm(const PackedMatrix& w, const std::vector<float>& bias, const float* x, int x_stride,
            float* y, int y_stride, int m) {
    GemmArgs args{.x = x,
                  .y = y,
                  .w = &w,
                  .bias = bias.empty() ? nullptr : bias.data(),
                  .m = m,
                  .x_stride = x_stride,
                  .y_stride = y_stride};
    gemm_.run(args, gemm_scratch_, team_);
  }
  const float* row(const float* base, int row, int width) const {
    return base + size_t(row) * size_t(width);
  }
  float* row(float* base, int row, int width) const { return base + size_t(row) * size_t(width); }

  void embed(const StepInput& step, const LayerWeights& first);
  void turn(const LayerWeights& layer, int n);
  void keep_wanted();
  void attend(int layer, const Rows& rows);
  void mlp(const LayerWeights& layer, int n);
  void add_and_norm(const float* delta, const std::vector<float>* norm, int n);

  std::shared_ptr<const Weights> weights_;
  const ModelConfig& c_;
  ThreadTeam& team_;
  const int max_step_tokens_, max_logits_;
  const int q_width_, kv_width_;  // floats of one token's q, and of its k or v
  const Ops& ops_ = default_ops();
  const GemmVariant& gemm_;
  const AttentionVariant& attention_;
  GemmScratch gemm_scratch_;
  std::vector<int> positions_;
  WantedRows wanted_;
  Buffer activations_;
  // Into activations_, [max_step_tokens, width] each:
  float* x_;         // hidden: the residual stream
  float* normed_;    // hidden: also the output of o_proj and down_proj before it is added
  float* qkv_;       // q_width + 2 kv_width
  float* q_;         // q_width: after RoPE
  float* attended_;  // q_width
  float* gate_up_;   // 2 intermediate: SwiGLU's result takes the gate's place
  float* cos_;       // head_dim / 2
  float* sin_;       // head_dim / 2
};

// x = embedding rows, normed for the first layer; and the angles of every token's position.
void Llama::embed(const StepInput& step, const LayerWeights& first) {
  for (size_t s = 0; s < step.kv_lengths.size(); ++s) {
    int position = step.kv_lengths[s] - (step.q_offsets[s + 1] - step.q_offsets[s]);
    for (int i = step.q_offsets[s]; i < step.q_offsets[s + 1]; ++i)
      positions_[size_t(i)] = position++;
  }
  const int half = c_.head_dim / 2;
  for_rows(int(step.token_ids.size()), c_.hidden, [&](int i) {
    const size_t from = size_t(step.token_ids[size_t(i)]) * size_t(c_.hidden);
    float* x = row(x_, i, c_.hidden);
    if (weights_->dtype == Dtype::f32) {
      std::copy_n(weights_->embedding.as<float>() + from, c_.hidden, x);
    } else {
      const bf16* table = weights_->embedding.as<bf16>() + from;
      for (int j = 0; j < c_.hidden; ++j) x[j] = to_f32(table[j]);
    }
    ops_.rms_norm(x, first.attention_norm.data(), c_.rms_eps, c_.hidden,
                  row(normed_, i, c_.hidden));
    // In double: at position 100,000 an f32 angle would be off by 0.004 radians.
    for (int j = 0; j < half; ++j) {
      const double angle = positions_[size_t(i)] * weights_->rope_freqs[size_t(j)];
      row(cos_, i, half)[j] = float(std::cos(angle));
      row(sin_, i, half)[j] = float(std::sin(angle));
    }
  });
}

// Per head: norm (Qwen3), then RoPE. q goes to its own array, k stays in qkv.
void Llama::turn(const LayerWeights& layer, int n) {
  const int d = c_.head_dim, half = d / 2;
  for_rows(n, q_width_ + kv_width_, [&](int i) {
    const float *cos = row(cos_, i, half), *sin = row(sin_, i, half);
    float* heads = row(qkv_, i, qkv_width());
    for (int h = 0; h < c_.n_heads + c_.n_kv_heads; ++h) {
      const bool is_q = h < c_.n_heads;
      float* head = heads + h * d;
      if (c_.qk_norm)
        ops_.rms_norm(head, (is_q ? layer.q_norm : layer.k_norm).data(), c_.rms_eps, d, head);
      ops_.rope(head, cos, sin, d, is_q ? row(q_, i, q_width_) + h * d : head);
    }
  });
}

void Llama::attend(int layer, const Rows& rows) {
  AttentionArgs args{.q = q_,
                     .out = attended_,
                     .q_offsets = rows.q_offsets,
                     .kv_lengths = rows.kv_lengths,
                     .views = rows.views,
                     .layer = layer,
                     .n_heads = c_.n_heads,
                     .sliding_window = window(layer),
                     .scale = float(1 / std::sqrt(double(c_.head_dim)))};
  attention_.run(args, team_);
}

// x += delta; then normed = norm(x), unless norm is null. delta may be normed.
void Llama::add_and_norm(const float* delta, const std::vector<float>* norm, int n) {
  for_rows(n, 2 * c_.hidden, [&](int i) {
    float* x = row(x_, i, c_.hidden);
    ops_.add(row(delta, i, c_.hidden), c_.hidden, x);
    if (norm) ops_.rms_norm(x, norm->data(), c_.rms_eps, c_.hidden, row(normed_, i, c_.hidden));
  });
}

// normed = down(silu(gate(normed)) * up(normed))
void Llama::mlp(const LayerWeights& layer, int n) {
  const int width = 2 * c_.intermediate;
  gemm(layer.gate_up, layer.gate_up_bias, normed_, c_.hidden, gate_up_, width, n);
  for_elements(n, c_.intermediate, [&](int i, int begin, int end) {
    float* gate = row(gate_up_, i, width);
    ops_.swiglu(gate + begin, gate + c_.intermediate + begin, end - begin, gate + begin);
  });
  gemm(layer.down, layer.down_bias, gate_up_, width, normed_, c_.hidden, n);
}

void Llama::forward(const StepInput& step, float* logits) {
  check_step(step, c_, max_step_tokens_, max_logits_);
  wanted_.select(step);
  Rows rows{int(step.token_ids.size()), step.q_offsets, step.kv_lengths, step.views};
  const auto& layers = weights_->layers;
  embed(step, layers[0]);
  for (int i = 0; i < c_.n_layers; ++i) {
    const LayerWeights& layer = layers[size_t(i)];
    const bool last = i + 1 == c_.n_layers;
    gemm(layer.qkv, layer.qkv_bias, normed_, c_.hidden, qkv_, qkv_width(), rows.n);
    turn(layer, rows.n);
    append_kv({.k = qkv_ + q_width_,
               .v = qkv_ + q_width_ + kv_width_,
               .stride = qkv_width(),
               .q_offsets = step.q_offsets,
               .kv_lengths = step.kv_lengths,
               .views = step.views,
               .layer = i},
              team_);
    if (step.observer) step.observer->layer_done(i);
    if (last) {
      if (step.logit_rows.empty()) return;
      keep_wanted();
      rows = {int(wanted_.tokens.size()), wanted_.q_offsets, wanted_.kv_lengths, wanted_.views};
    }
    attend(i, rows);
    gemm(layer.o, layer.o_bias, attended_, q_width_, normed_, c_.hidden, rows.n);
    add_and_norm(normed_, &layer.mlp_norm, rows.n);
    mlp(layer, rows.n);
    add_and_norm(normed_, last ? nullptr : &layers[size_t(i) + 1].attention_norm, rows.n);
  }
  const int n_logits = int(wanted_.logit_rows.size());
  for_rows(n_logits, c_.hidden, [&](int i) {
    ops_.rms_norm(row(x_, wanted_.logit_rows[size_t(i)], c_.hidden), weights_->final_norm.data(),
                  c_.rms_eps, c_.hidden, row(normed_, i, c_.hidden));
  });
  gemm(weights_->lm_head, {}, normed_, c_.hidden, logits, c_.vocab, n_logits);
}

// Moves the wanted tokens' rows of x and q to the front.
void Llama::keep_wanted() {
  for (int to = 0; to < int(wanted_.tokens.size()); ++to) {
    const int from = wanted_.tokens[size_t(to)];
    if (from == to) continue;
    std::copy_n(row(x_, from, c_.hidden), c_.hidden, row(x_, to, c_.hidden));
    std::copy_n(row(q_, from, q_width_), q_width_, row(q_, to, q_width_));
  }
}

Work Llama::work(const StepInput& step) const {
  return llama_work(step, c_, weights_->dtype, Dtype::f32);
}

}  // namespace

std::unique_ptr<Model> make_llama(std::shared_ptr<const Weights> weights, ThreadTeam& team,
                                  int max_step_tokens, int max_logits, const Kernels& kernels) {
  return std::make_unique<Llama>(std::move(weights), team, max_step_tokens, max_logits, kernels);
}

}  // namespace xpyd
