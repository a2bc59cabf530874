#include "model/llama/llama_rank.h"

#include <algorithm>
#include <cmath>

#include "base/status.h"

namespace xpyd::model {
namespace {

// Smaller row operations run on the calling thread: handing them to the team would take as long.
constexpr long kSerialElements = 4096;
// Rows are also cut into columns of this many elements, so that the team can share a single row.
constexpr int kColumnChunk = 1024;

Range range(KvRange r) { return {r.begin, r.end}; }
int width(Range r) { return r.end - r.begin; }

// Most elements that one packed row of activations has, over all products of the rank.
int most_stored(const Weights& weights, const RankSlice& slice) {
  int most = std::max(weights.lm_head.stored({0, 1}), weights.config.n_predict ? weights.head.join.stored({0, 1}) : 0);
  for (int i = slice.layers.begin; i < slice.layers.end; ++i) {
    const LayerWeights& layer = weights.layers[size_t(i)];
    most = std::max({most, layer.qkv.stored({0, 1}), layer.gate_up.stored({0, 1}), layer.o.stored(slice.groups),
                     layer.down.stored(slice.groups)});
  }
  return most;
}

}  // namespace

RankSlice rank_slice(const Weights& weights, const KvShards& shards, int rank) {
  const ModelConfig& c = weights.config;
  const int r = shards.tensor_rank_of(rank), tp = shards.tp;
  const KvRect rect = shards.rect(rank);
  RankSlice slice;
  slice.layers = range(rect.layers);
  slice.q_heads = {c.n_heads / tp * r, c.n_heads / tp * (r + 1)};
  slice.kv_heads = range(rect.heads);
  const PackedMatrix& down = weights.layers[size_t(rect.layers.begin)].down;
  slice.groups = {r * down.k_groups / tp, (r + 1) * down.k_groups / tp};
  slice.mlp = down.k_range(slice.groups);
  slice.vocab = share(c.vocab, r, tp, 16);  // whole panels
  return slice;
}

StageExchange::StageExchange(int tp, int hidden, int max_step_tokens, bool crowded)
    : tp_(tp), rank_floats_(size_t(max_step_tokens) * size_t(hidden)), barrier_(tp, crowded) {
  if (tp > 1) sums_ = Buffer(2 * size_t(tp) * rank_floats_ * sizeof(float));
}

void StageExchange::add_up(const Ops& ops, int set, size_t at, int n, float* out) const {
  for (int begin = 0; begin < n; begin += kColumnChunk)
    add_up(ops, sums_.as<const float>() + size_t(set * tp_) * rank_floats_, {0, tp_}, at + size_t(begin),
           std::min(kColumnChunk, n - begin), out + begin);
}

void StageExchange::add_up(const Ops& ops, const float* sums, Range ranks, size_t at, int n, float* out) const {
  if (width(ranks) == 1) {
    std::copy_n(sums + size_t(ranks.begin) * rank_floats_ + at, n, out);
    return;
  }
  const int middle = (ranks.begin + ranks.end) / 2;
  float right[kColumnChunk];
  add_up(ops, sums, {ranks.begin, middle}, at, n, out);
  add_up(ops, sums, {middle, ranks.end}, at, n, right);
  ops.add(right, n, out);
}

LlamaRank::LlamaRank(std::shared_ptr<const Weights> weights, const KvShards& shards, int rank, StageExchange& stage,
                     ThreadTeam& team, int max_step_tokens, int places, const Kernels& kernels)
    : weights_(std::move(weights)),
      c_(weights_->config),
      slice_(rank_slice(*weights_, shards, rank)),
      tensor_rank_(shards.tensor_rank_of(rank)),
      stage_(stage),
      team_(team),
      q_width_(width(slice_.q_heads) * c_.head_dim),
      kv_width_(width(slice_.kv_heads) * c_.head_dim),
      mlp_width_(width(slice_.mlp)),
      gemm_(kernels.gemm ? *kernels.gemm : default_gemm()),
      attention_(kernels.attention ? *kernels.attention : default_attention()),
      gemm_scratch_(max_step_tokens, most_stored(*weights_, slice_), team.size()),
      positions_(size_t(max_step_tokens)),
      place_floats_((size_t(max_step_tokens) * size_t(c_.hidden) + 15) / 16 * 16) {
  wanted_.reserve(size_t(max_step_tokens));
  const std::pair<float**, int> parts[] = {
      {&normed_, c_.hidden},         {&qkv_, qkv_width()},     {&q_, q_width_},           {&attended_, q_width_},
      {&gate_up_, 2 * mlp_width_},   {&cos_, c_.head_dim / 2}, {&sin_, c_.head_dim / 2},
      {&joined_, c_.n_predict * 2 * c_.hidden}};
  // whole cache lines
  auto floats = [&](int width) { return (size_t(max_step_tokens) * size_t(width) + 15) / 16 * 16; };
  size_t total = size_t(places) * place_floats_;
  for (const auto& [part, width] : parts) total += floats(width);
  activations_ = Buffer(total * sizeof(float));
  x_ = activations_.as<float>();
  float* next = x_ + size_t(places) * place_floats_;
  for (const auto& [part, width] : parts) {
    *part = next;
    next += floats(width);
  }
}

// Calls body(row, begin, end) over the elements [0, width) of all rows; the team shares the work.
template <class Body>
void LlamaRank::for_elements(int n_rows, int width, Body body) {
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
// Calls body(row) for all rows; `width` is a row's cost in elements.
template <class Body>
void LlamaRank::for_rows(int n_rows, int width, Body body) {
  auto part = [&](Range rows) {
    for (int row = rows.begin; row < rows.end; ++row) body(row);
  };
  if (n_rows == 1 || long(n_rows) * width < kSerialElements) return part({0, n_rows});
  team_.run([&](int rank) { part(share(n_rows, rank, team_.size())); });
}

void LlamaRank::gemm(const PackedMatrix& w, const std::vector<float>& bias, const float* x, int x_stride, float* y,
                     int y_stride, int m, Range columns, Range groups) {
  GemmArgs args{.x = x,
                .y = y,
                .w = &w,
                .bias = bias.empty() ? nullptr : bias.data(),
                .m = m,
                .x_stride = x_stride,
                .y_stride = y_stride,
                .columns = columns,
                .groups = groups};
  gemm_.run(args, gemm_scratch_, team_);
}

void LlamaRank::embed(int32_t token, float* x) const {
  const size_t from = size_t(token) * size_t(c_.hidden);
  if (weights_->dtype == Dtype::f32) {
    std::copy_n(weights_->embedding.as<float>() + from, c_.hidden, x);
  } else {
    const bf16* table = weights_->embedding.as<bf16>() + from;
    for (int j = 0; j < c_.hidden; ++j) x[j] = to_f32(table[j]);
  }
}

// Fills x with embedding rows or with x_in, normed_ with the norm of the next layer, and cos_ and sin_ with the angles
// of every token's position.
void LlamaRank::receive(const StepInput& step, const float* x_in, float* x0, const LayerWeights& next) {
  for (size_t s = 0; s < step.kv_lengths.size(); ++s) {
    int position = step.kv_lengths[s] - (step.q_offsets[s + 1] - step.q_offsets[s]);
    for (int i = step.q_offsets[s]; i < step.q_offsets[s + 1]; ++i) positions_[size_t(i)] = position++;
  }
  const int half = c_.head_dim / 2;
  for_rows(int(step.token_ids.size()), c_.hidden, [&](int i) {
    float* x = row(x0, i, c_.hidden);
    if (x_in) {
      std::copy_n(row(x_in, i, c_.hidden), c_.hidden, x);
    } else {
      embed(step.token_ids[size_t(i)], x);
    }
    ops_.rms_norm(x, next.attention_norm.data(), c_.rms_eps, c_.hidden, row(normed_, i, c_.hidden));
    // Angles are in double: at position 100,000 an f32 angle would be off by 0.004 radians.
    for (int j = 0; j < half; ++j) {
      const double angle = positions_[size_t(i)] * weights_->rope_freqs[size_t(j)];
      row(cos_, i, half)[j] = float(std::cos(angle));
      row(sin_, i, half)[j] = float(std::sin(angle));
    }
  });
}

// qkv_ = the columns of this rank's heads.
void LlamaRank::project(const LayerWeights& layer, int n) {
  if (stage_.tp() == 1) return gemm(layer.qkv, layer.qkv_bias, normed_, c_.hidden, qkv_, qkv_width(), n);
  float* y = qkv_;
  const int d = c_.head_dim;
  for (auto [first, heads] :
       {std::pair(0, slice_.q_heads), {c_.n_heads, slice_.kv_heads}, {c_.n_heads + c_.n_kv_heads, slice_.kv_heads}}) {
    const Range columns{(first + heads.begin) * d, (first + heads.end) * d};
    gemm(layer.qkv, layer.qkv_bias, normed_, c_.hidden, y, qkv_width(), n, columns);
    y += width(columns);
  }
}

// Applies the head norm (Qwen3) and RoPE to each head. q goes to q_, k stays in qkv_.
void LlamaRank::apply_rope(const LayerWeights& layer, int n) {
  const int d = c_.head_dim, half = d / 2, n_q = q_width_ / d, n_kv = kv_width_ / d;
  for_rows(n, q_width_ + kv_width_, [&](int i) {
    const float *cos = row(cos_, i, half), *sin = row(sin_, i, half);
    float* heads = row(qkv_, i, qkv_width());
    for (int h = 0; h < n_q + n_kv; ++h) {
      const bool is_q = h < n_q;
      float* head = heads + h * d;
      if (c_.qk_norm) ops_.rms_norm(head, (is_q ? layer.q_norm : layer.k_norm).data(), c_.rms_eps, d, head);
      ops_.rope(head, cos, sin, d, is_q ? row(q_, i, q_width_) + h * d : head);
    }
  });
}

// The rank's KV memory numbers its own layers and heads from 0.
void LlamaRank::append(int layer, const Rows& rows) {
  append_kv({.k = qkv_ + q_width_,
             .v = qkv_ + q_width_ + kv_width_,
             .stride = qkv_width(),
             .q_offsets = rows.q_offsets,
             .kv_lengths = rows.kv_lengths,
             .views = rows.views,
             .layer = layer - slice_.layers.begin},
            team_);
}

void LlamaRank::attend(int layer, const Rows& rows) {
  AttentionArgs args{.q = q_,
                     .out = attended_,
                     .q_offsets = rows.q_offsets,
                     .kv_lengths = rows.kv_lengths,
                     .views = rows.views,
                     .layer = layer - slice_.layers.begin,
                     .n_heads = width(slice_.q_heads),
                     .sliding_window = c_.window(layer),
                     .scale = float(1 / std::sqrt(double(c_.head_dim)))};
  attention_.run(args, team_);
}

// Computes this rank's groups of x W^T, to normed_ or to the exchange.
void LlamaRank::row_parallel(const PackedMatrix& w, const std::vector<float>& bias, const float* x, int x_stride,
                             int set, int n) {
  if (stage_.tp() == 1) return gemm(w, bias, x, x_stride, normed_, c_.hidden, n);
  gemm(w, {}, x, x_stride, stage_.sums(set, tensor_rank_), c_.hidden, n, {0, 0}, slice_.groups);
  stage_.barrier();
}

// x += the product of row_parallel(); then normed_ = norm(x), unless norm is null.
void LlamaRank::add_and_norm(float* x0, const std::vector<float>& bias, int set, const std::vector<float>* norm,
                             int n) {
  for_rows(n, 2 * c_.hidden, [&](int i) {
    float *x = row(x0, i, c_.hidden), *delta = row(normed_, i, c_.hidden);
    if (stage_.tp() > 1) {
      stage_.add_up(ops_, set, size_t(i) * size_t(c_.hidden), c_.hidden, delta);
      if (!bias.empty()) ops_.add(bias.data(), c_.hidden, delta);
    }
    ops_.add(delta, c_.hidden, x);
    if (norm) ops_.rms_norm(x, norm->data(), c_.rms_eps, c_.hidden, delta);
  });
}

// down(silu(gate(normed)) * up(normed)), to normed_ or to the exchange.
void LlamaRank::mlp(const LayerWeights& layer, int n) {
  const int stride = 2 * mlp_width_;
  if (stage_.tp() == 1) {
    gemm(layer.gate_up, layer.gate_up_bias, normed_, c_.hidden, gate_up_, stride, n);
  } else if (mlp_width_ > 0) {
    const Range up{slice_.mlp.begin + c_.intermediate, slice_.mlp.end + c_.intermediate};
    gemm(layer.gate_up, layer.gate_up_bias, normed_, c_.hidden, gate_up_, stride, n, slice_.mlp);
    gemm(layer.gate_up, layer.gate_up_bias, normed_, c_.hidden, gate_up_ + mlp_width_, stride, n, up);
  }
  for_elements(n, mlp_width_, [&](int i, int begin, int end) {
    float* gate = row(gate_up_, i, stride);
    ops_.swiglu(gate + begin, gate + mlp_width_ + begin, end - begin, gate + begin);
  });
  row_parallel(layer.down, layer.down_bias, gate_up_, stride, 1, n);
}

void LlamaRank::run(const StepInput& step, const float* x_in, float* x, bool observed, float* logits) {
  const auto& layers = weights_->layers;
  const int trunk = c_.trunk_layers(), end = std::min(slice_.layers.end, trunk);
  Rows rows{int(step.token_ids.size()), step.q_offsets, step.kv_lengths, step.views};
  receive(step, x_in, x, layers[size_t(slice_.layers.begin)]);
  for (int i = slice_.layers.begin; i < end; ++i) {
    const LayerWeights& layer = layers[size_t(i)];
    const bool last = i + 1 == c_.n_layers;  // a multi-token head needs the hidden states of all tokens
    project(layer, rows.n);
    apply_rope(layer, rows.n);
    append(i, rows);
    layer_written(step, i, observed);
    if (last) {
      if (step.logit_rows.empty()) return;
      wanted_.select(step);
      keep_wanted(x);
      rows = {int(wanted_.tokens.size()), wanted_.q_offsets, wanted_.kv_lengths, wanted_.views};
    }
    attend(i, rows);
    row_parallel(layer.o, layer.o_bias, attended_, q_width_, 0, rows.n);
    add_and_norm(x, layer.o_bias, 0, &layer.mlp_norm, rows.n);
    mlp(layer, rows.n);
    const bool leaves = i + 1 == end;
    add_and_norm(x, layer.down_bias, 1, leaves ? nullptr : &layers[size_t(i) + 1].attention_norm, rows.n);
  }
  if (slice_.layers.end < c_.n_layers) return;
  const std::span<const int32_t> wanted = c_.n_predict ? step.logit_rows : wanted_.logit_rows;
  const int n_logits = step.logit_rows.empty() ? 0 : int(wanted.size());
  for_rows(n_logits, c_.hidden, [&](int i) {
    ops_.rms_norm(row(x, wanted[size_t(i)], c_.hidden), weights_->final_norm.data(), c_.rms_eps, c_.hidden,
                  row(normed_, i, c_.hidden));
  });
  if (width(slice_.vocab) > 0 && n_logits > 0)
    gemm(weights_->lm_head, {}, normed_, c_.hidden, logits + slice_.vocab.begin, c_.vocab, n_logits, slice_.vocab);
  if (!c_.n_predict) return;
  if (tensor_rank_ == 0)
    for_rows(rows.n, c_.hidden, [&](int i) {
      ops_.rms_norm(row(x, i, c_.hidden), weights_->final_norm.data(), c_.rms_eps, c_.hidden,
                    row(step.hidden.rows, i, c_.hidden));
    });
  stage_.barrier();
  join(step, x);
  project(layers[size_t(trunk)], rows.n);
  apply_rope(layers[size_t(trunk)], rows.n);
  append(trunk, rows);
  layer_written(step, trunk, observed);
}

void LlamaRank::layer_written(const StepInput& step, int layer, bool observed) {
  if (!observed) return;
  stage_.barrier();
  if (step.observer) step.observer->layer_done(layer);
}

// x = the input of the multi-token head's layer, from each token's embedding and the state of the token before it.
// normed_ = its norm.
void LlamaRank::join(const StepInput& step, float* x) {
  const PredictHead& head = weights_->head;
  const int n = int(step.token_ids.size());
  const LayerWeights& layer = weights_->layers[size_t(c_.trunk_layers())];
  before_.resize(size_t(n));
  for (size_t s = 0; s < step.kv_lengths.size(); ++s)
    for (int i = step.q_offsets[s]; i < step.q_offsets[s + 1]; ++i)
      before_[size_t(i)] = i == step.q_offsets[s] ? step.hidden.before[s] : row(step.hidden.rows, i - 1, c_.hidden);
  for_rows(n, 2 * c_.hidden, [&](int i) {
    float *embedding = row(joined_, i, 2 * c_.hidden), *state = embedding + c_.hidden;
    embed(step.token_ids[size_t(i)], embedding);
    ops_.rms_norm(embedding, head.embedding_norm.data(), c_.rms_eps, c_.hidden, embedding);
    if (const float* before = before_[size_t(i)]) {
      ops_.rms_norm(before, head.hidden_norm.data(), c_.rms_eps, c_.hidden, state);
    } else {
      std::fill_n(state, c_.hidden, 0.0f);
    }
  });
  gemm(head.join, {}, joined_, 2 * c_.hidden, x, c_.hidden, n);
  for_rows(n, c_.hidden, [&](int i) {
    ops_.rms_norm(row(x, i, c_.hidden), layer.attention_norm.data(), c_.rms_eps, c_.hidden, row(normed_, i, c_.hidden));
  });
}

void LlamaRank::predict(const StepInput& step, float* x, bool observed, float* logits) {
  const int i = c_.trunk_layers(), n = int(step.token_ids.size());
  const LayerWeights& layer = weights_->layers[size_t(i)];
  const Rows rows{n, step.q_offsets, step.kv_lengths, step.views};
  receive(step, nullptr, x, layer);  // for the angles
  join(step, x);
  project(layer, n);
  apply_rope(layer, n);
  append(i, rows);
  layer_written(step, i, observed);
  attend(i, rows);
  row_parallel(layer.o, layer.o_bias, attended_, q_width_, 0, n);
  add_and_norm(x, layer.o_bias, 0, &layer.mlp_norm, n);
  mlp(layer, n);
  add_and_norm(x, layer.down_bias, 1, &weights_->head.norm, n);
  if (tensor_rank_ == 0) std::copy_n(x, size_t(n) * size_t(c_.hidden), step.hidden.rows);
  if (width(slice_.vocab) > 0)
    gemm(weights_->lm_head, {}, normed_, c_.hidden, logits + slice_.vocab.begin, c_.vocab, n, slice_.vocab);
}

// Moves the rows of wanted tokens in x and q_ to the front.
void LlamaRank::keep_wanted(float* x) {
  for (int to = 0; to < int(wanted_.tokens.size()); ++to) {
    const int from = wanted_.tokens[size_t(to)];
    if (from == to) continue;
    std::copy_n(row(x, from, c_.hidden), c_.hidden, row(x, to, c_.hidden));
    std::copy_n(row(q_, from, q_width_), q_width_, row(q_, to, q_width_));
  }
}

// ---- A stage.

StageRanks::StageRanks(const std::shared_ptr<const Weights>& weights, const ShardOptions& o, int stage,
                       ThreadTeam* team, int max_step_tokens, int places, const Kernels& kernels, bool crowded)
    : exchange_(o.shards.tp, weights->config.hidden, max_step_tokens, crowded) {
  for (int rank = stage * o.shards.tp; rank < (stage + 1) * o.shards.tp; ++rank) {
    if (!team) teams_.push_back(std::make_unique<ThreadTeam>(o.threads_per_rank));
    ranks_.push_back(std::make_unique<LlamaRank>(weights, o.shards, rank, exchange_, team ? *team : *teams_.back(),
                                                 max_step_tokens, places, kernels));
  }
}

Work sharded_work(const ModelConfig& config, const WeightBits& bits, const StepInput& step) {
  const size_t n_seqs = step.kv_lengths.size();
  if (n_seqs == 0) return {};
  KvLayout whole = *step.views[0].layout;
  whole.shape = kv_shape(config, whole.shape.dtype);
  std::vector<KvView> views(step.views.begin(), step.views.begin() + ptrdiff_t(n_seqs));
  for (KvView& view : views) view.layout = &whole;
  StepInput one = step;
  one.views = views;
  return llama_work(one, config, bits, Dtype::f32);
}

}  // namespace xpyd::model
