// The forward pass of the Llama family on CUDA: the operations of llama_rank.cc in the same order. The host turns a
// step into a Plan; the enqueued work depends only on the Plan's addresses and sizes. A step of one token per sequence
// is padded to the next captured batch size and replayed as a graph.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "base/log.h"
#include "base/status.h"
#include "model/cuda/experts_cuda.h"
#include "model/cuda/gemm_cuda.h"
#include "model/cuda/model_cuda.h"
#include "model/cuda/ops_cuda.h"
#include "model/cuda/plan_cuda.h"
#include "model/cuda/sampler_cuda.h"
#include "model/llama/llama_step.h"

namespace xpyd::model {
namespace {

constexpr size_t kChosenBytes = sizeof(uint64_t) + 2 * sizeof(int32_t);  // of one row

int rounded(int n, int to) { return (n + to - 1) / to * to; }

const CudaAttentionVariant* find_variant(const std::string& name, CudaAttentionVariant::Phase phase) {
  for (const CudaAttentionVariant& variant : cuda_attention_variants())
    if (variant.phase == phase && variant.name == name) return &variant;
  return nullptr;
}

// Arguments that are equal in all of a model's calls; refuses() looks at nothing else.
CudaAttentionArgs attention_args(const ModelConfig& config, Dtype activations, const KvLayout& layout,
                                 bool contiguous) {
  CudaAttentionArgs args;
  args.dtype = activations;
  args.layout = layout;
  args.step.contiguous = contiguous;
  args.n_heads = config.n_heads;
  args.sliding_window = config.sliding_window;
  args.scale = float(1 / std::sqrt(double(config.head_dim)));
  return args;
}

// Returns the row of cuda_attention_variants() with this name, or the default for "auto". A prefill row may also
// decode.
Result<const CudaAttentionVariant*> attention_row(CudaAttentionVariant::Phase phase, const std::string& name,
                                                  const CudaAttentionArgs& args, const cuda::Card& card) {
  if (name == "auto") return &default_cuda_attention(phase, args, card);
  const bool decode = phase == CudaAttentionVariant::decode;
  const CudaAttentionVariant* found = find_variant(name, phase);
  if (!found && decode) found = find_variant(name, CudaAttentionVariant::prefill);
  const std::string option = decode ? "--cuda-decode-attention: " : "--cuda-prefill-attention: ";
  if (!found) {
    std::string names = "auto";
    for (const CudaAttentionVariant& v : cuda_attention_variants())
      if (v.phase == phase) names += std::string(", ") + v.name;
    return invalid(option + "there is no variant \"" + name + "\"; expected one of " + names);
  }
  if (const char* why = found->refuses(args, card)) return invalid(option + name + " " + why);
  return found;
}

class CudaLlama final : public CudaModel {
 public:
  CudaLlama(std::shared_ptr<const CudaWeights> weights, const cuda::Card& card, cuda::Stream& stream,
            const CudaModelOptions& options)
      : weights_(std::move(weights)),
        c_(weights_->config),
        dtype_(weights_->dtype),
        card_(card),
        stream_(stream),
        options_(options),
        q_width_(c_.n_heads * c_.head_dim),
        kv_width_(c_.n_kv_heads * c_.head_dim),
        hidden_stride_(rounded(c_.hidden, 8)),
        qkv_stride_(rounded(q_width_ + 2 * kv_width_, 8)),
        gate_up_stride_(c_.sparse_layers() == c_.n_layers ? 0 : rounded(2 * c_.intermediate, 8)),
        gemm_(stream),
        experts_(c_, dtype_, options_.max_step_tokens) {
    XPYD_CHECK(options_.max_step_tokens > 0 && options_.max_seqs > 0 && options_.max_logits >= 0);
    if (options_.max_kv_length == 0) options_.max_kv_length = c_.max_position;
    if (options_.max_table_entries == 0) options_.max_table_entries = options_.max_kv_length;
  }
  Status allocate();

  const ModelConfig& config() const override { return c_; }
  void begin(const StepInput& step, std::span<const Draw> draws, float* logits) override;
  bool wait() override;
  void end(Chosen* chosen) override;
  bool chooses() const override { return true; }
  int window() const override { return 2; }
  Work work(const StepInput& step) const override { return llama_work(step, c_, dtype_, dtype_); }
  Counts counts() const override { return counts_; }

 private:
  void check(const StepInput& step, int n_previous) const;
  void choose_attention(const StepInput& step);
  // Enqueues everything up to the logits on the device, and returns the device address of `rows`. The previous step
  // chose `n_previous` tokens.
  const Draw* start(const StepInput& step, int n_previous, std::span<const Draw> rows);
  size_t logits_bytes(int rows) const { return size_t(rows) * size_t(c_.vocab) * sizeof(float); }
  int graph_batch(const StepInput& step) const;
  void run_graph(const Plan& plan);
  void enqueue(const Plan& plan, LayerObserver* observer);
  void attend(int layer, const Plan& plan, const AttentionParts& parts, const void* q);
  void gemm(const CudaMatrix& w, const void* x, int x_stride, void* y, int y_stride, int m, Dtype y_dtype);
  void add_norm(float* x, const std::byte* delta, const float* bias, const float* norm, int n);
  void mlp(const CudaLayerWeights& layer, float* x, const float* norm, int n);
  CudaGemmArgs product(const CudaMatrix& w, const void* x, int x_stride, void* y, int y_stride, Dtype y_dtype) const {
    return {.x = x, .y = y, .w = w, .x_dtype = dtype_, .y_dtype = y_dtype, .x_stride = x_stride, .y_stride = y_stride};
  }

  std::shared_ptr<const CudaWeights> weights_;
  const ModelConfig& c_;
  const Dtype dtype_;  // of activations and weights
  const cuda::Card card_;
  cuda::Stream& stream_;
  CudaModelOptions options_;
  const int q_width_, kv_width_;                           // elements of one token's q; of its k or v
  const int hidden_stride_, qkv_stride_, gate_up_stride_;  // elements; rows begin at 16 bytes
  CudaGemm gemm_;
  CudaExperts experts_;
  const CudaAttentionVariant *prefill_ = nullptr,
                             *decode_ = nullptr;  // chosen at the first KV
  StepPlanner planner_;
  cuda::Memory scratch_;
  // Parts of scratch_, [max_step_tokens, width] each:
  float *x_ = nullptr,
        *x_wanted_ = nullptr;      // width hidden, f32: the residual stream; its wanted rows in the last layer
  std::byte* normed_ = nullptr;    // hidden_stride; also outputs of o_proj and down_proj
  std::byte* qkv_ = nullptr;       // qkv_stride; after the last append, the wanted rows of q
  std::byte* q_ = nullptr;         // q_width: q after RoPE
  std::byte* attended_ = nullptr;  // q_width
  std::byte* gate_up_ = nullptr;   // gate_up_stride, of dense layers; SwiGLU's result overwrites gate
  float* logits_ = nullptr;        // [max_logits, vocab]
  float* workspace_ = nullptr;     // workspace of attention
  // Choices of the last step, [max_logits] each: row hashes, tokens, NaN counts.
  uint64_t* hashes_ = nullptr;
  int32_t *sampled_ = nullptr, *nans_ = nullptr;
  void* sampling_ = nullptr;  // the sampler's workspace
  cuda::Memory pinned_logits_;
  // A step between begin() and end(); step i uses place i % 2.
  struct Begun {
    cuda::Memory pinned;  // hashes_, sampled_ and nans_
    cuda::Event done;
    int n = 0;                // wanted rows
    float* logits = nullptr;  // destination of the logits; null: the device chooses
  };
  // Enqueues the choice of tokens from a step's wanted rows, and its copy to `begun`.
  void choose(std::span<const Draw> draws, const Draw* on_card, Begun& begun);
  std::array<Begun, 2> steps_;
  long begun_ = 0, ended_ = 0;
  int n_previous_ = 0;  // wanted rows of the latest step
  // A graph fits steps of this batch, splits, KV bound, table entries, pool and layout (blocks, their tokens, order).
  // It is null until the second such step.
  using GraphKey = std::tuple<int, int, int, int, const std::byte*, bool, int, int, KvOrder>;
  std::map<GraphKey, cuda::Graph> graphs_;
  Counts counts_;
};

Status CudaLlama::allocate() {
  if (options_.max_logits > 0 && c_.vocab >= 1 << 23)  // bound of cuda_sample()'s sums
    return Error{ErrorCode::invalid_argument, "vocab_size: expected less than 2^23 with --device cuda"};
  const size_t rows = size_t(options_.max_step_tokens), element = dtype_bytes(dtype_);
  const size_t n_logits = size_t(options_.max_logits);
  const size_t max_ints = StepPlanner::max_ints(options_);
  const size_t splits = cuda_attention_workspace(StepPlanner::max_splits(options_), c_.n_heads, c_.head_dim);
  int32_t* arrays = nullptr;
  // Places the parts of one allocation. With a null base it only adds up their sizes.
  auto place = [&](std::byte* base) {
    size_t used = 0;
    auto part = [&](auto*& to, size_t bytes) {
      if (base) to = reinterpret_cast<std::decay_t<decltype(to)>>(base + used);
      used += (bytes + 255) / 256 * 256;
    };
    part(x_, rows * size_t(c_.hidden) * sizeof(float));
    part(x_wanted_, rows * size_t(c_.hidden) * sizeof(float));
    part(normed_, std::max(rows, n_logits) * size_t(hidden_stride_) * element);
    part(qkv_, rows * size_t(qkv_stride_) * element);
    part(q_, rows * size_t(q_width_) * element);
    part(attended_, rows * size_t(q_width_) * element);
    part(gate_up_, rows * size_t(gate_up_stride_) * element);
    part(logits_, n_logits * size_t(c_.vocab) * sizeof(float));
    part(workspace_, splits * sizeof(float));
    part(hashes_, n_logits * kChosenBytes);
    part(sampling_, cuda_sample_workspace(options_.max_logits));
    part(arrays, max_ints * sizeof(int32_t));
    return used + experts_.place(base ? base + used : nullptr);
  };
  const size_t total = place(nullptr);
  Result<cuda::Memory> scratch = cuda::Memory::device(total);
  if (!scratch)
    return Error{ErrorCode::unavailable, "model " + c_.name + ": the card has no room for " +
                                             std::to_string(total / 1000000) + " MB of activations (steps of " +
                                             std::to_string(rows) + " tokens): " + scratch.error().message};
  scratch_ = std::move(scratch).value();
  // Rows that pad a batch are computed like others, so they must start as numbers.
  cuda::fill(scratch_.data(), 0, scratch_.size(), stream_);
  place(scratch_.data());
  sampled_ = reinterpret_cast<int32_t*>(hashes_ + n_logits);
  nans_ = sampled_ + n_logits;
  planner_.allocate(options_, c_.window(0), arrays, max_ints);
  if (n_logits > 0) {
    pinned_logits_ = cuda::Memory::pinned(n_logits * size_t(c_.vocab) * sizeof(float));
    for (Begun& step : steps_) step.pinned = cuda::Memory::pinned(n_logits * kChosenBytes);
  }
  const CudaLayerWeights& l = weights_->layers[0];
  CudaLayerWeights dense;  // a dense layer, if there is one
  for (const CudaLayerWeights& layer : weights_->layers)
    if (!layer.router.data) dense = layer;
  for (const auto& [like, m] :
       {std::pair(product(l.qkv, normed_, hidden_stride_, qkv_, qkv_stride_, dtype_), options_.max_step_tokens),
        std::pair(product(l.o, attended_, q_width_, normed_, hidden_stride_, dtype_), options_.max_step_tokens),
        std::pair(product(dense.gate_up, normed_, hidden_stride_, gate_up_, gate_up_stride_, dtype_),
                  options_.max_step_tokens),
        std::pair(product(dense.down, gate_up_, gate_up_stride_, normed_, hidden_stride_, dtype_),
                  options_.max_step_tokens),
        std::pair(product(weights_->lm_head, normed_, hidden_stride_, logits_, c_.vocab, Dtype::f32),
                  options_.max_logits)})
    if (m > 0 && like.w.data)
      if (Status status = gemm_.prepare(like, m); !status) return status;
  stream_.wait();
  return ok();
}

void CudaLlama::check(const StepInput& step, int n_previous) const {
  check_step(step, c_, options_.max_step_tokens, options_.max_logits, n_previous);
  XPYD_CHECK(int(step.views.size()) <= options_.max_seqs, std::to_string(step.views.size()));
  for (size_t s = 0; s < step.views.size(); ++s) {
    const KvView &view = step.views[s], &first = step.views[0];
    XPYD_CHECK(view.pool == first.pool && *view.layout == *first.layout && view.contiguous() == first.contiguous(),
               "one step, one pool");
    XPYD_CHECK(step.kv_lengths[s] <= options_.max_kv_length, std::to_string(step.kv_lengths[s]));
    XPYD_CHECK(table_entries(view, step.kv_lengths[s]) <= options_.max_table_entries,
               std::to_string(table_entries(view, step.kv_lengths[s])));
  }
}

void CudaLlama::choose_attention(const StepInput& step) {
  if (prefill_) return;
  const CudaAttentionArgs args = attention_args(c_, dtype_, *step.views[0].layout, step.views[0].contiguous());
  auto chosen = [&](CudaAttentionVariant::Phase phase, const std::string& name) {
    Result<const CudaAttentionVariant*> row = attention_row(phase, name, args, card_);
    XPYD_CHECK(row.ok(), row.ok() ? "" : row.error().message);
    return row.value();
  };
  prefill_ = chosen(CudaAttentionVariant::prefill, options_.prefill_attention);
  decode_ = chosen(CudaAttentionVariant::decode, options_.decode_attention);
}

// Returns the batch size of the graph for this step; 0: no graph.
int CudaLlama::graph_batch(const StepInput& step) const {
  const size_t n = step.kv_lengths.size();
  if (!options_.graphs || step.observer || step.token_ids.size() != n || step.logit_rows.size() != n) return 0;
  for (size_t s = 0; s < n; ++s)
    if (step.q_offsets[s + 1] - step.q_offsets[s] != 1) return 0;
  return std::min({int(std::bit_ceil(unsigned(n))), options_.max_seqs, options_.max_step_tokens, options_.max_logits});
}

void CudaLlama::gemm(const CudaMatrix& w, const void* x, int x_stride, void* y, int y_stride, int m, Dtype y_dtype) {
  CudaGemmArgs args = product(w, x, x_stride, y, y_stride, y_dtype);
  args.m = m;
  gemm_.run(args);
}

// x += delta + bias, unless delta is null; normed_ = RMSNorm(x), unless norm is null.
void CudaLlama::add_norm(float* x, const std::byte* delta, const float* bias, const float* norm, int n) {
  cuda_add_norm({.x = x,
                 .delta = delta,
                 .bias = bias,
                 .norm = norm,
                 .normed = normed_,
                 .dtype = dtype_,
                 .eps = float(c_.rms_eps),
                 .n = n,
                 .width = c_.hidden,
                 .stride = hidden_stride_},
                stream_);
}

// x += the layer's MLP or block of experts, of normed_; normed_ = RMSNorm(x), unless norm is null.
void CudaLlama::mlp(const CudaLayerWeights& layer, float* x, const float* norm, int n) {
  if (layer.router.data) {
    experts_.run(layer, normed_, hidden_stride_, x, n, stream_);
    if (norm) add_norm(x, nullptr, nullptr, norm, n);
    return;
  }
  gemm(layer.gate_up, normed_, hidden_stride_, gate_up_, gate_up_stride_, n, dtype_);
  cuda_swiglu({.gate_up = gate_up_,
               .bias = layer.gate_up_bias,
               .dtype = dtype_,
               .n = n,
               .width = c_.intermediate,
               .stride = gate_up_stride_},
              stream_);
  gemm(layer.down, gate_up_, gate_up_stride_, normed_, hidden_stride_, n, dtype_);
  add_norm(x, normed_, layer.down_bias, norm, n);
}

void CudaLlama::attend(int layer, const Plan& plan, const AttentionParts& parts, const void* q) {
  CudaAttentionArgs args = attention_args(c_, dtype_, plan.layout, plan.all.contiguous);
  args.pool = plan.pool;
  args.layer = layer;
  args.sliding_window = c_.window(layer);
  args.workspace = workspace_;
  const size_t row_bytes = size_t(q_width_) * dtype_bytes(dtype_);
  auto run = [&](const CudaAttentionVariant& variant, const CudaStep& step, int first_row) {
    if (step.n_seqs == 0) return;
    args.step = step;
    args.q = static_cast<const std::byte*>(q) + size_t(first_row) * row_bytes;
    args.out = attended_ + size_t(first_row) * row_bytes;
    variant.run(args, stream_);
  };
  int first = 0;
  for (const CudaStep& part : parts.decode) {
    run(*decode_, part, first);
    first += part.n_tokens;
  }
  run(*prefill_, parts.prefill, first);
}

void CudaLlama::enqueue(const Plan& plan, LayerObserver* observer) {
  const auto& layers = weights_->layers;
  const float eps = float(c_.rms_eps);
  cuda_embed({.token_ids = plan.token_ids,
              .previous = sampled_,
              .table = weights_->embedding,
              .norm = layers[0].attention_norm,
              .x = x_,
              .normed = normed_,
              .dtype = dtype_,
              .eps = eps,
              .n = plan.n,
              .stride = hidden_stride_},
             stream_);
  float* x = x_;
  const void* q = q_;
  int n = plan.n;
  for (int i = 0; i < c_.n_layers; ++i) {
    const CudaLayerWeights& layer = layers[size_t(i)];
    const bool last = i + 1 == c_.n_layers;
    gemm(layer.qkv, normed_, hidden_stride_, qkv_, qkv_stride_, n, dtype_);
    cuda_rope_append({.qkv = qkv_,
                      .stride = qkv_stride_,
                      .bias = layer.qkv_bias,
                      .q_norm = layer.q_norm,
                      .k_norm = layer.k_norm,
                      .eps = eps,
                      .rope = weights_->rope,
                      .q = q_,
                      .dtype = dtype_,
                      .n_heads = c_.n_heads,
                      .pool = plan.pool,
                      .layout = plan.layout,
                      .step = plan.all,
                      .layer = i},
                     stream_);
    if (observer) observer->layer_done(i);
    if (last && plan.n_logits == 0) return;
    if (last && plan.wanted) {
      n = plan.n_wanted;
      cuda_gather_rows(x_, plan.wanted, n, size_t(c_.hidden) * sizeof(float), x_wanted_, stream_);
      cuda_gather_rows(q_, plan.wanted, n, size_t(q_width_) * dtype_bytes(dtype_), qkv_, stream_);
      x = x_wanted_;
      q = qkv_;
    }
    attend(i, plan, last ? plan.wanted_parts : plan.parts, q);
    gemm(layer.o, attended_, q_width_, normed_, hidden_stride_, n, dtype_);
    add_norm(x, normed_, layer.o_bias, layer.mlp_norm, n);
    mlp(layer, x, last ? nullptr : layers[size_t(i) + 1].attention_norm, n);
  }
  cuda_add_norm({.x = x,
                 .norm = weights_->final_norm,
                 .rows = plan.logit_rows,
                 .normed = normed_,
                 .dtype = dtype_,
                 .eps = eps,
                 .n = plan.n_logits,
                 .width = c_.hidden,
                 .stride = hidden_stride_},
                stream_);
  gemm(weights_->lm_head, normed_, hidden_stride_, logits_, c_.vocab, plan.n_logits, Dtype::f32);
}

// The first step of a kind runs without a graph, which loads its kernels before anything is captured.
void CudaLlama::run_graph(const Plan& plan) {
  const KvLayout& layout = plan.layout;
  const auto [entry, fresh] = graphs_.try_emplace(GraphKey{plan.n, plan.all.n_splits, plan.all.max_kv_length,
                                                           plan.table_entries, plan.pool, plan.all.contiguous,
                                                           layout.n_blocks, layout.block_tokens, layout.order});
  cuda::Graph& graph = entry->second;
  if (fresh) return enqueue(plan, nullptr);
  if (!graph) {
    graph = cuda::Graph::capture(stream_, [&] { enqueue(plan, nullptr); });
    if (!graph) {
      log_line(LogLevel::warning, "xpyd: no device memory for a CUDA graph; steps run without graphs from now on");
      options_.graphs = false;
      return enqueue(plan, nullptr);
    }
    ++counts_.captures;
  }
  graph.launch(stream_);
  ++counts_.replays;
}

const Draw* CudaLlama::start(const StepInput& step, int n_previous, std::span<const Draw> rows) {
  check(step, n_previous);
  choose_attention(step);
  const int batch = graph_batch(step);
  planner_.begin();
  const bool split = decode_->run != prefill_->run;  // false: one kernel takes all sequences at once
  const std::optional<Plan> padded = batch > 0 ? planner_.plan_padded(step, batch) : std::nullopt;
  const Plan plan = padded ? *padded : planner_.plan(step, split);
  const Draw* sampling = planner_.add(rows);
  planner_.copy(stream_);
  if (padded)
    run_graph(plan);
  else
    enqueue(plan, step.observer);
  return sampling;
}

void CudaLlama::begin(const StepInput& step, std::span<const Draw> draws, float* logits) {
  XPYD_CHECK(begun_ - ended_ < long(steps_.size()), "two steps are under way");
  XPYD_CHECK(!logits || begun_ == ended_, "logits are wanted while steps are under way");
  XPYD_CHECK(draws.empty() || draws.size() == step.logit_rows.size(), std::to_string(draws.size()));
  const Draw* on_card = start(step, logits ? 0 : n_previous_, draws);
  Begun& begun = steps_[size_t(begun_++) % steps_.size()];
  begun.n = n_previous_ = int(step.logit_rows.size());
  begun.logits = logits;
  if (begun.n > 0) {
    if (logits) {
      cuda::copy(pinned_logits_.data(), logits_, logits_bytes(begun.n), stream_);
    } else {
      choose(draws, on_card, begun);
    }
  }
  begun.done.record(stream_);
}

void CudaLlama::choose(std::span<const Draw> draws, const Draw* on_card, Begun& begun) {
  const bool greedy = std::all_of(draws.begin(), draws.end(), [](const Draw& d) { return d.temperature <= 0; });
  cuda_sample({.logits = logits_,
               .rows = greedy ? nullptr : on_card,
               .workspace = sampling_,
               .tokens = sampled_,
               .nans = nans_,
               .n = begun.n,
               .vocab = c_.vocab},
              stream_);
  hash_rows(logits_, begun.n, c_.vocab, hashes_, stream_);
  cuda::copy(begun.pinned.data(), hashes_, size_t(options_.max_logits) * kChosenBytes, stream_);
}

bool CudaLlama::wait() {
  XPYD_CHECK(ended_ < begun_, "no step is under way");
  steps_[size_t(ended_) % steps_.size()].done.wait();
  return true;
}

void CudaLlama::end(Chosen* chosen) {
  wait();
  Begun& begun = steps_[size_t(ended_++) % steps_.size()];
  if (begun.logits) {
    std::memcpy(begun.logits, pinned_logits_.data(), logits_bytes(begun.n));
    return;
  }
  const uint64_t* hashes = begun.pinned.as<uint64_t>();
  const int32_t* tokens = reinterpret_cast<const int32_t*>(hashes + options_.max_logits);
  const int32_t* nans = tokens + options_.max_logits;
  for (int r = 0; r < begun.n; ++r) chosen[r] = {tokens[r], nans[r], hashes[r]};
}

}  // namespace

Status check_cuda_attention(const CudaModelOptions& options, const ModelConfig& config, Dtype activations,
                            const KvLayout& layout, bool contiguous, const cuda::Card& card) {
  const CudaAttentionArgs args = attention_args(config, activations, layout, contiguous);
  auto prefill = attention_row(CudaAttentionVariant::prefill, options.prefill_attention, args, card);
  if (!prefill) return prefill.error();
  auto decode = attention_row(CudaAttentionVariant::decode, options.decode_attention, args, card);
  if (!decode) return decode.error();
  return ok();
}

Result<std::unique_ptr<CudaModel>> make_cuda_llama(std::shared_ptr<const CudaWeights> weights, const cuda::Card& card,
                                                   cuda::Stream& stream, const CudaModelOptions& options) {
  auto model = std::make_unique<CudaLlama>(std::move(weights), card, stream, options);
  if (Status status = model->allocate(); !status) return status.error();
  return std::unique_ptr<CudaModel>(std::move(model));
}

}  // namespace xpyd::model
