// The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3) on the CPU: tensor ranks and
// pipeline stages on a thread each (llama_rank.h); one rank, whose thread is the caller's, is the
// plain model. model/README.md lists the operations with their shapes.
#include <algorithm>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/wait_word.h"
#include "model/llama_rank.h"
#include "model/llama_step.h"
#include "model/model.h"
#include "model/weights.h"

namespace xpyd::model {
namespace {

// Of a step, what passes from stage to stage at once: some tokens, while the next ones are computed
// by the stage before.
struct Piece {
  StepInput step;  // without views
  std::vector<int32_t> q_offsets, kv_lengths, logit_rows;
  std::vector<KvView> views;  // [n_ranks, n_seqs of this piece]
  int first_token = 0, first_logit = 0;
};

// Tokens of a piece are worth cutting off from here on: fewer would read all weights for little.
constexpr int kLeastPieceTokens = 64;
constexpr int kPiecesPerStage = 4;

class Llama final : public Model {
 public:
  // `team`: the one rank's, which its owner has; null: every rank has one of its own.
  Llama(std::shared_ptr<const Weights> weights, const ShardOptions& o, ThreadTeam* team, int max_step_tokens,
        int max_logits, const Kernels& kernels)
      : weights_(std::move(weights)),
        c_(weights_->config),
        max_step_tokens_(max_step_tokens),
        max_logits_(max_logits),
        shards_(o.shards),
        piece_tokens_(o.piece_tokens),
        crowded_(shards_.n_ranks() * o.threads_per_rank > allowed_cpus()),
        done_(std::make_unique<WaitWord[]>(size_t(shards_.n_ranks()))),
        written_(std::make_unique<Written[]>(size_t(shards_.pp))) {
    XPYD_CHECK(max_step_tokens > 0 && max_logits >= 0);
    std::vector<int> first_cpus;  // of each rank
    for (int rank = 0; rank < shards_.n_ranks(); ++rank) {
      if (rank % shards_.tp == 0)
        stages_.push_back(
            std::make_unique<StageExchange>(*weights_, shards_, shards_.stage_of(rank), max_step_tokens, crowded_));
      const auto mine = o.cpus.begin() + (o.cpus.empty() ? 0 : rank * o.threads_per_rank);
      std::vector<int> cpus(mine, o.cpus.empty() ? mine : mine + o.threads_per_rank);
      if (!cpus.empty()) first_cpus.push_back(cpus[0]);
      if (!team) teams_.push_back(std::make_unique<ThreadTeam>(o.threads_per_rank, std::move(cpus)));
      ranks_.push_back(std::make_unique<LlamaRank>(weights_, shards_, rank, *stages_.back(),
                                                   team ? *team : *teams_.back(), max_step_tokens, kernels));
    }
    team_ = std::make_unique<ThreadTeam>(shards_.n_ranks(), std::move(first_cpus));
  }

  const ModelConfig& config() const override { return c_; }
  void forward(const StepInput& step, float* logits) override;
  Work work(const StepInput& step) const override;
  size_t weight_bytes() const override { return weights_->bytes(); }
  size_t scratch_bytes() const override {
    size_t total = 0;
    for (const auto& rank : ranks_) total += rank->scratch_bytes();
    for (const auto& stage : stages_) total += stage->bytes();
    return total;
  }

 private:
  // Layers of a later stage whose KV all its ranks have written, on its first rank's thread.
  struct Written final : LayerObserver {
    WaitWord layers;
    void layer_done(int) override { layers.add(1); }
  };
  void cut(const StepInput& step);
  void run_rank(int rank, LayerObserver* observer, float* logits);

  const std::shared_ptr<const Weights> weights_;
  const ModelConfig& c_;
  const int max_step_tokens_, max_logits_;
  const KvShards shards_;
  const int piece_tokens_;
  const bool crowded_;
  std::vector<std::unique_ptr<StageExchange>> stages_;
  std::vector<std::unique_ptr<ThreadTeam>> teams_;  // of each rank's kernels; of one rank: none
  std::vector<std::unique_ptr<LlamaRank>> ranks_;
  std::unique_ptr<ThreadTeam> team_;    // the ranks: one thread each, the caller is rank 0
  std::unique_ptr<WaitWord[]> done_;    // [n_ranks]: pieces of this step
  std::unique_ptr<Written[]> written_;  // [pp]
  std::vector<Piece> pieces_;           // the first n_pieces_; the others keep their memory
  size_t n_pieces_ = 0;
};

void Llama::cut(const StepInput& step) {
  const int n = int(step.token_ids.size()), n_ranks = shards_.n_ranks();
  const int least = piece_tokens_ > 0 ? piece_tokens_ : kLeastPieceTokens;
  const int most = shards_.pp == 1 ? 1 : piece_tokens_ > 0 ? n : kPiecesPerStage * shards_.pp;
  n_pieces_ = size_t(std::clamp(n / least, 1, most));
  if (pieces_.size() < n_pieces_) pieces_.resize(n_pieces_);
  const size_t n_seqs = step.kv_lengths.size();
  size_t next_logit = 0;
  for (size_t p = 0; p < n_pieces_; ++p) {
    Piece& piece = pieces_[p];
    const Range tokens = share(n, int(p), int(n_pieces_));
    piece.first_token = tokens.begin;
    piece.first_logit = int(next_logit);
    piece.q_offsets.assign(1, 0);
    piece.kv_lengths.clear();
    piece.logit_rows.clear();
    piece.views.clear();
    size_t first = 0, end = 0;  // its sequences: those that have tokens in it
    for (size_t s = 0; s < n_seqs; ++s) {
      const int begin = std::max(step.q_offsets[s], tokens.begin), until = std::min(step.q_offsets[s + 1], tokens.end);
      if (begin >= until) continue;
      if (end == 0) first = s;
      // One without tokens among them stands for itself: it has none here either.
      for (size_t skipped = end == 0 ? s : end; skipped < s; ++skipped) {
        piece.q_offsets.push_back(piece.q_offsets.back());
        piece.kv_lengths.push_back(step.kv_lengths[skipped]);
      }
      end = s + 1;
      piece.q_offsets.push_back(until - tokens.begin);
      piece.kv_lengths.push_back(step.kv_lengths[s] - (step.q_offsets[s + 1] - until));
    }
    for (int rank = 0; rank < n_ranks; ++rank) {
      const auto views = step.views.subspan(size_t(rank) * n_seqs, n_seqs);
      piece.views.insert(piece.views.end(), views.begin() + ptrdiff_t(first), views.begin() + ptrdiff_t(end));
    }
    for (; next_logit < step.logit_rows.size() && step.logit_rows[next_logit] < tokens.end; ++next_logit)
      piece.logit_rows.push_back(step.logit_rows[next_logit] - tokens.begin);
    piece.step = {.token_ids = step.token_ids.subspan(size_t(tokens.begin), size_t(tokens.end - tokens.begin)),
                  .q_offsets = piece.q_offsets,
                  .kv_lengths = piece.kv_lengths,
                  .views = {},
                  .logit_rows = piece.logit_rows,
                  .observer = nullptr};
  }
}

void Llama::run_rank(int rank, LayerObserver* observer, float* logits) {
  const int stage = shards_.stage_of(rank);
  const bool first_of_stage = shards_.tensor_rank_of(rank) == 0;
  WaitWord* before = stage == 0 ? nullptr : &done_[size_t(rank - shards_.tp)];
  const float* x_in = stage == 0 ? nullptr : ranks_[size_t(rank - shards_.tp)]->x();
  for (size_t p = 0; p < n_pieces_; ++p) {
    const Piece& piece = pieces_[p];
    if (before) before->wait([p](uint32_t done) { return done > p; }, crowded_);
    StepInput step = piece.step;
    const size_t n_seqs = step.kv_lengths.size();
    step.views = std::span(piece.views).subspan(size_t(rank) * n_seqs, n_seqs);
    const bool observed = observer && p + 1 == n_pieces_;  // then every token's KV is there
    if (observed && first_of_stage) step.observer = stage == 0 ? observer : &written_[size_t(stage)];
    ranks_[size_t(rank)]->run(step, piece.first_token, x_in, observed,
                              logits + size_t(piece.first_logit) * size_t(c_.vocab));
    done_[size_t(rank)].add(1);
  }
  if (rank != 0 || !observer) return;
  for (int s = 1; s < shards_.pp; ++s) {
    const KvRange layers = shards_.layers(s);
    for (int l = layers.begin; l < layers.end; ++l) {
      written_[size_t(s)].layers.wait([n = uint32_t(l - layers.begin)](uint32_t written) { return written > n; },
                                      crowded_);
      observer->layer_done(l);
    }
  }
}

void Llama::forward(const StepInput& step, float* logits) {
  check_step(step, c_, max_step_tokens_, max_logits_, 0, shards_.n_ranks());
  cut(step);
  for (int rank = 0; rank < shards_.n_ranks(); ++rank) done_[size_t(rank)].value.store(0);
  for (int s = 0; s < shards_.pp; ++s) written_[size_t(s)].layers.value.store(0);
  team_->run([&](int rank) { run_rank(rank, step.observer, logits); });
}

// What the step must touch, as on one rank: copies of kv heads that ranks have besides are not counted.
Work Llama::work(const StepInput& step) const {
  const size_t n_seqs = step.kv_lengths.size();
  if (n_seqs == 0) return {};
  KvLayout whole = *step.views[0].layout;
  whole.shape = kv_shape(c_, whole.shape.dtype);
  std::vector<KvView> views(step.views.begin(), step.views.begin() + ptrdiff_t(n_seqs));
  for (KvView& view : views) view.layout = &whole;
  StepInput one = step;
  one.views = views;
  return llama_work(one, c_, weights_->dtype, Dtype::f32);
}

}  // namespace

std::unique_ptr<Model> make_llama(std::shared_ptr<const Weights> weights, ThreadTeam& team, int max_step_tokens,
                                  int max_logits, const Kernels& kernels) {
  const ModelConfig& c = weights->config;
  const ShardOptions one{.shards = {.n_layers = c.n_layers, .n_kv_heads = c.n_kv_heads}};
  return std::make_unique<Llama>(std::move(weights), one, &team, max_step_tokens, max_logits, kernels);
}

std::unique_ptr<Model> make_sharded_llama(std::shared_ptr<const Weights> weights, const ShardOptions& options,
                                          int max_step_tokens, int max_logits, const Kernels& kernels) {
  const Status status = check_model_shards(weights->config, options.shards);
  XPYD_CHECK(status.ok(), status ? "" : status.error().message);
  return std::make_unique<Llama>(std::move(weights), options, nullptr, max_step_tokens, max_logits, kernels);
}

Status check_model_shards(const ModelConfig& c, const KvShards& s, const std::string& tp_name,
                          const std::string& pp_name) {
  const std::string tp = tp_name + " " + std::to_string(s.tp);
  XPYD_CHECK(s.n_layers == c.n_layers && s.n_kv_heads == c.n_kv_heads);
  if (s.tp >= 1 && c.n_heads % s.tp != 0)
    return invalid(tp + " does not divide the model's " + std::to_string(c.n_heads) + " attention heads");
  if (Status status = check_shards(s, tp_name, pp_name); !status) return status;
  if (s.tp < s.n_kv_heads && s.n_kv_heads % s.tp != 0)
    return invalid(tp + " does not divide the model's " + std::to_string(s.n_kv_heads) + " kv heads");
  if (s.n_ranks() > kMaxRanks)
    return invalid(tp + " and " + pp_name + " " + std::to_string(s.pp) + " are " + std::to_string(s.n_ranks()) +
                   " ranks, a thread each: expected at most " + std::to_string(kMaxRanks));
  return ok();
}

}  // namespace xpyd::model
