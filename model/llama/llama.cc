// The Llama family (Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE) on the CPU, on one stage. Each tensor rank has a thread
// (llama_rank.h); a single rank uses the caller's. Several stages are in pipeline.h. README.md lists the operations
// with their shapes.
#include <string>
#include <vector>

#include "base/status.h"
#include "base/wait_word.h"
#include "model/llama/llama_rank.h"
#include "model/llama/llama_step.h"
#include "model/llama/pipeline.h"
#include "model/model.h"
#include "model/weights/weights.h"

namespace xpyd::model {
namespace {

class Llama final : public SynchronousModel {
 public:
  // `team`: the caller's, for a single rank; null: each rank makes its own.
  Llama(std::shared_ptr<const Weights> weights, const ShardOptions& o, ThreadTeam* team, int max_step_tokens,
        int max_logits, const Kernels& kernels)
      : weights_(std::move(weights)),
        max_step_tokens_(max_step_tokens),
        max_logits_(max_logits),
        tp_(o.shards.tp),
        ranks_(weights_, o, 0, team, max_step_tokens, 1, kernels, tp_ * o.threads_per_rank > allowed_cpus()) {
    XPYD_CHECK(max_step_tokens > 0 && max_logits >= 0 && o.shards.pp == 1);
    team_ = std::make_unique<ThreadTeam>(tp_);
  }

  const ModelConfig& config() const override { return weights_->config; }
  void predict(const StepInput& step, float* logits) override {
    XPYD_CHECK(config().n_predict == 1 && step.token_ids.size() == step.kv_lengths.size());
    check_step(step, config(), max_step_tokens_, max_logits_, 0, tp_);
    on_ranks(step,
             [&](LlamaRank& rank, const StepInput& mine) { rank.predict(mine, rank.x(0), step.observer, logits); });
  }
  Work work(const StepInput& step) const override {
    return sharded_work(weights_->config, WeightBits(*weights_), step);
  }
  ExpertLoad expert_load() const override {
    ExpertLoad sum;
    ranks_.add_load(sum);
    return sum;
  }

 private:
  void forward(const StepInput& step, float* logits) override {
    check_step(step, config(), max_step_tokens_, max_logits_, 0, tp_);
    on_ranks(step, [&](LlamaRank& rank, const StepInput& mine) {
      rank.run(mine, nullptr, rank.x(0), step.observer, logits);
    });
  }
  template <class F>
  void on_ranks(const StepInput& step, F&& f) {
    const size_t n_seqs = step.kv_lengths.size();
    team_->run([&](int r) {
      StepInput mine = step;
      mine.views = step.views.subspan(size_t(r) * n_seqs, n_seqs);
      if (r > 0) mine.observer = nullptr;
      f(ranks_.rank(r), mine);
    });
  }

  const std::shared_ptr<const Weights> weights_;
  const int max_step_tokens_, max_logits_, tp_;
  StageRanks ranks_;
  std::unique_ptr<ThreadTeam> team_;  // one thread per rank; the caller is rank 0
};

}  // namespace

void compute_step(Model& model, const StepInput& step, float* logits) {
  model.begin(step, {}, logits);
  for (int told = 0;;) {
    const bool over = model.wait();
    const int layers = model.stages() == 1 ? 0 : over ? model.config().n_layers : model.layers_written(0);
    for (; step.observer && told < layers; ++told) step.observer->layer_done(told);
    if (over) break;
  }
  model.end(nullptr);
}

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
  if (options.shards.pp > 1)
    return std::make_unique<Pipeline>(std::move(weights), options, max_step_tokens, max_logits, kernels);
  return std::make_unique<Llama>(std::move(weights), options, nullptr, max_step_tokens, max_logits, kernels);
}

Status check_model_shards(const ModelConfig& c, const KvShards& s, const std::string& tp_name,
                          const std::string& pp_name) {
  const std::string tp = tp_name + " " + std::to_string(s.tp);
  XPYD_CHECK(s.n_layers == c.n_layers && s.n_kv_heads == c.n_kv_heads);
  if (s.tp >= 1 && c.n_heads % s.tp != 0)
    return invalid(tp + " does not divide the model's " + std::to_string(c.n_heads) + " attention heads");
  if (s.tp >= 1 && kRowParallelGroups % s.tp != 0)
    return invalid(tp + " is not supported (expected 1, 2, 4 or 8)");
  if (Status status = check_shards(s, tp_name, pp_name); !status) return status;
  if (s.tp < s.n_kv_heads && s.n_kv_heads % s.tp != 0)
    return invalid(tp + " does not divide the model's " + std::to_string(s.n_kv_heads) + " kv heads");
  if (s.n_ranks() > kMaxRanks)
    return invalid(tp + " and " + pp_name + " " + std::to_string(s.pp) + " are " + std::to_string(s.n_ranks()) +
                   " ranks, each a thread: expected at most " + std::to_string(kMaxRanks));
  return ok();
}

}  // namespace xpyd::model
