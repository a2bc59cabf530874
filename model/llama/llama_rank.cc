#include "model/llama/llama_rank.h"

#include <algorithm>
#include <cmath>

#include "base/status.h"

namespace xpyd::model {
namespace {

// Elements that the ranks' sums are added in at a time.
constexpr int kSumChunk = 1024;

Range range(KvRange r) { return {r.begin, r.end}; }
int width(Range r) { return r.end - r.begin; }

// Most elements that one packed row of activations has, over all products of the rank.
int most_stored(const Weights& weights, const RankSlice& slice) {
  int most = std::max(weights.lm_head.stored({0, 1}), weights.config.n_predict ? weights.head.join.stored({0, 1}) : 0);
  for (int i = slice.layers.begin; i < slice.layers.end; ++i) {
    const LayerWeights& layer = weights.layers[size_t(i)];
    most = std::max({most, layer.qkv.stored({0, 1}), layer.gate_up.stored({0, 1}), layer.o.stored(slice.groups),
                     layer.down.stored(slice.groups)});
    if (layer.experts.empty()) continue;
    most = std::max(most, layer.router.stored({0, 1}));
    for (const ExpertWeights& expert : layer.experts)
      most = std::max({most, expert.gate_up.stored({0, 1}), expert.down.stored(slice.experts.groups)});
  }
  return most;
}

// Floats of the widest dense gate among the rank's layers.
int dense_width(const ModelConfig& c, const RankSlice& slice) {
  for (int i = slice.layers.begin; i < slice.layers.end; ++i)
    if (!c.sparse(i)) return width(group_range(c.intermediate, kRowParallelGroups, slice.groups));
  return 0;
}

}  // namespace

RankSlice rank_slice(const ModelConfig& c, const ShardOptions& options, int rank) {
  const KvShards& shards = options.shards;
  const int r = shards.tensor_rank_of(rank), tp = shards.tp;
  const KvRect rect = shards.rect(rank);
  RankSlice slice;
  slice.layers = range(rect.layers);
  slice.q_heads = {c.n_heads / tp * r, c.n_heads / tp * (r + 1)};
  slice.kv_heads = range(rect.heads);
  slice.groups = {r * kRowParallelGroups / tp, (r + 1) * kRowParallelGroups / tp};
  slice.experts = {{0, c.experts.count}, slice.groups};
  if (options.whole_experts) slice.experts = {rank_experts(c.experts.count, r, tp), {0, kRowParallelGroups}};
  slice.vocab = share(c.vocab, r, tp, 16);  // whole panels
  return slice;
}

StageExchange::StageExchange(int tp, const ModelConfig& c, int max_step_tokens, bool crowded)
    : tp_(tp), barrier_(tp, crowded) {
  for (Set& set : sets_) {
    const bool mlp = &set == &sets_[1];
    if (tp == 1 && !(mlp && c.experts.count > 0)) continue;
    set.rank_floats = size_t(max_step_tokens) * size_t(c.hidden) * size_t(mlp ? std::max(1, c.experts.used) : 1);
    set.sums = Buffer(size_t(tp) * set.rank_floats * sizeof(float));
  }
}

void StageExchange::add_up(const Ops& ops, int set, size_t at, int n, float* out) const {
  for (int begin = 0; begin < n; begin += kSumChunk)
    add_up(ops, sets_[size_t(set)], {0, tp_}, at + size_t(begin), std::min(kSumChunk, n - begin), out + begin);
}

void StageExchange::add_up(const Ops& ops, const Set& set, Range ranks, size_t at, int n, float* out) {
  if (width(ranks) == 1) {
    std::copy_n(set.sums.as<const float>() + set.begin(ranks.begin) + at, n, out);
    return;
  }
  const int middle = (ranks.begin + ranks.end) / 2;
  float right[kSumChunk];
  add_up(ops, set, {ranks.begin, middle}, at, n, out);
  add_up(ops, set, {middle, ranks.end}, at, n, right);
  ops.add(right, n, out);
}

LlamaRank::LlamaRank(std::shared_ptr<const Weights> weights, const ShardOptions& o, int rank, StageExchange& stage,
                     ThreadTeam& team, int max_step_tokens, int places, const Kernels& kernels)
    : weights_(std::move(weights)),
      c_(weights_->config),
      slice_(rank_slice(c_, o, rank)),
      tensor_rank_(o.shards.tensor_rank_of(rank)),
      whole_experts_(o.whole_experts),
      stage_(stage),
      team_(team, kernels.gemm ? *kernels.gemm : default_gemm(), max_step_tokens, most_stored(*weights_, slice_)),
      q_width_(width(slice_.q_heads) * c_.head_dim),
      kv_width_(width(slice_.kv_heads) * c_.head_dim),
      mlp_width_(dense_width(c_, slice_)),
      attention_(kernels.attention ? *kernels.attention : default_attention()),
      positions_(size_t(max_step_tokens)),
      place_floats_((size_t(max_step_tokens) * size_t(c_.hidden) + 15) / 16 * 16) {
  wanted_.reserve(size_t(max_step_tokens));
  for (int i = slice_.layers.begin; i < slice_.layers.end && !moe_; ++i)
    if (c_.sparse(i)) moe_ = std::make_unique<MoeBlock>(c_, slice_.experts, max_step_tokens, team_);
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
  team_.for_rows(int(step.token_ids.size()), c_.hidden, [&](int i) {
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
  if (stage_.tp() == 1) return team_.gemm(layer.qkv, layer.qkv_bias, normed_, c_.hidden, qkv_, qkv_width(), n);
  float* y = qkv_;
  const int d = c_.head_dim;
  for (auto [first, heads] :
       {std::pair(0, slice_.q_heads), {c_.n_heads, slice_.kv_heads}, {c_.n_heads + c_.n_kv_heads, slice_.kv_heads}}) {
    const Range columns{(first + heads.begin) * d, (first + heads.end) * d};
    team_.gemm(layer.qkv, layer.qkv_bias, normed_, c_.hidden, y, qkv_width(), n, columns);
    y += width(columns);
  }
}

// Applies the head norm (Qwen3) and RoPE to each head. q goes to q_, k stays in qkv_.
void LlamaRank::apply_rope(const LayerWeights& layer, int n) {
  const int d = c_.head_dim, half = d / 2, n_q = q_width_ / d, n_kv = kv_width_ / d;
  team_.for_rows(n, q_width_ + kv_width_, [&](int i) {
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
            team_.team());
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
  attention_.run(args, team_.team());
}

// Computes this rank's groups of x W^T, to normed_ or to the exchange.
void LlamaRank::row_parallel(const PackedMatrix& w, const std::vector<float>& bias, const float* x, int x_stride,
                             int set, int n) {
  if (stage_.tp() == 1) return team_.gemm(w, bias, x, x_stride, normed_, c_.hidden, n);
  team_.gemm(w, {}, x, x_stride, stage_.sums(set, tensor_rank_), c_.hidden, n, {0, 0}, slice_.groups);
  stage_.barrier();
}

// Elements [at, at + n) of the experts' rows, from the rank that has the expert or from all that share it.
void LlamaRank::read_row(int expert, size_t at, int n, float* out) {
  if (!whole_experts_) return stage_.add_up(ops_, 1, at, n, out);
  std::copy_n(stage_.sums(1, expert_rank(expert, c_.experts.count, stage_.tp())) + at, n, out);
}

// x += the product of row_parallel() or the block of experts; then normed_ = norm(x), unless norm is null.
void LlamaRank::add_and_norm(float* x0, const LayerWeights& layer, int set, const std::vector<float>* norm, int n) {
  const std::vector<float>& bias = set == 0 ? layer.o_bias : layer.down_bias;
  const bool sparse = set == 1 && !layer.experts.empty();
  team_.for_rows(n, 2 * c_.hidden, [&](int i) {
    float *x = row(x0, i, c_.hidden), *delta = row(normed_, i, c_.hidden);
    if (sparse) {
      moe_->combine(
          i, [&](int expert, size_t at, int length, float* out) { read_row(expert, at, length, out); }, delta);
    } else if (stage_.tp() > 1) {
      stage_.add_up(ops_, set, size_t(i) * size_t(c_.hidden), c_.hidden, delta);
      if (!bias.empty()) ops_.add(bias.data(), c_.hidden, delta);
    }
    ops_.add(delta, c_.hidden, x);
    if (norm) ops_.rms_norm(x, norm->data(), c_.rms_eps, c_.hidden, delta);
  });
}

// down(silu(gate(normed)) * up(normed)), to normed_ or to the exchange. A block of experts writes to the exchange.
void LlamaRank::mlp(const LayerWeights& layer, int n) {
  if (!layer.experts.empty()) {
    moe_->run(layer, normed_, n, stage_.sums(1, tensor_rank_));
    if (tensor_rank_ == 0) stage_.meter.add(moe_->rows(), c_, stage_.tp(), whole_experts_);
    return stage_.barrier();
  }
  team_.gated(layer.gate_up, layer.gate_up_bias, layer.down.k_range(slice_.groups), normed_, gate_up_, n);
  row_parallel(layer.down, layer.down_bias, gate_up_, 2 * mlp_width_, 1, n);
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
    add_and_norm(x, layer, 0, &layer.mlp_norm, rows.n);
    mlp(layer, rows.n);
    const bool leaves = i + 1 == end;
    add_and_norm(x, layer, 1, leaves ? nullptr : &layers[size_t(i) + 1].attention_norm, rows.n);
  }
  if (slice_.layers.end < c_.n_layers) return;
  const std::span<const int32_t> wanted = c_.n_predict ? step.logit_rows : wanted_.logit_rows;
  const int n_logits = step.logit_rows.empty() ? 0 : int(wanted.size());
  team_.for_rows(n_logits, c_.hidden, [&](int i) {
    ops_.rms_norm(row(x, wanted[size_t(i)], c_.hidden), weights_->final_norm.data(), c_.rms_eps, c_.hidden,
                  row(normed_, i, c_.hidden));
  });
  if (width(slice_.vocab) > 0 && n_logits > 0)
    team_.gemm(weights_->lm_head, {}, normed_, c_.hidden, logits + slice_.vocab.begin, c_.vocab, n_logits,
               slice_.vocab);
  if (!c_.n_predict) return;
  if (tensor_rank_ == 0)
    team_.for_rows(rows.n, c_.hidden, [&](int i) {
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
  team_.for_rows(n, 2 * c_.hidden, [&](int i) {
    float *embedding = row(joined_, i, 2 * c_.hidden), *state = embedding + c_.hidden;
    embed(step.token_ids[size_t(i)], embedding);
    ops_.rms_norm(embedding, head.embedding_norm.data(), c_.rms_eps, c_.hidden, embedding);
    if (const float* before = before_[size_t(i)]) {
      ops_.rms_norm(before, head.hidden_norm.data(), c_.rms_eps, c_.hidden, state);
    } else {
      std::fill_n(state, c_.hidden, 0.0f);
    }
  });
  team_.gemm(head.join, {}, joined_, 2 * c_.hidden, x, c_.hidden, n);
  team_.for_rows(n, c_.hidden, [&](int i) {
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
  add_and_norm(x, layer, 0, &layer.mlp_norm, n);
  mlp(layer, n);
  add_and_norm(x, layer, 1, &weights_->head.norm, n);
  if (tensor_rank_ == 0) std::copy_n(x, size_t(n) * size_t(c_.hidden), step.hidden.rows);
  if (width(slice_.vocab) > 0)
    team_.gemm(weights_->lm_head, {}, normed_, c_.hidden, logits + slice_.vocab.begin, c_.vocab, n, slice_.vocab);
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
    : exchange_(o.shards.tp, weights->config, max_step_tokens, crowded) {
  for (int rank = stage * o.shards.tp; rank < (stage + 1) * o.shards.tp; ++rank) {
    if (!team) teams_.push_back(std::make_unique<ThreadTeam>(o.threads_per_rank));
    ranks_.push_back(std::make_unique<LlamaRank>(weights, o, rank, exchange_, team ? *team : *teams_.back(),
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
