// A model that computes nothing and takes, in virtual time, what the cost model says that a real
// one takes. Engine, policy and KV memory above it are the real ones.
#pragma once

#include <memory>
#include <utility>

#include "base/clock.h"
#include "experiments/null_model.h"
#include "model/cost_model.h"
#include "model/model.h"

namespace xpyd::experiments {

// What the engine moves: the same steps, a token of few bytes.
inline ModelConfig shape_of_nothing() {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = c.n_heads = c.n_kv_heads = c.head_dim = 1;
  c.hidden = c.intermediate = 8;
  c.vocab = 64;
  c.max_position = 4096;
  return c;
}

class TimedModel : public Model {
 public:
  TimedModel(CostModel cost, Rates rates, VirtualClock& clock) : cost_(std::move(cost)), rates_(rates), clock_(clock) {}

  const ModelConfig& config() const override { return null_->config(); }
  void forward(const StepInput& step, float* logits) override {
    null_->forward(step, logits);
    Work work = weights_;
    for (size_t s = 0; s < step.views.size(); ++s) {
      const int n = step.q_offsets[s + 1] - step.q_offsets[s];
      const Work mine = cost_.prefill(n, step.kv_lengths[s] - n);
      work.flops += mine.flops;
      work.bytes += mine.bytes - weights_.bytes;
      tokens += n;
    }
    clock_.seconds += xpyd::seconds(work, rates_);
    ++steps;
    sequences += double(step.views.size());
  }
  Work work(const StepInput&) const override { return {}; }
  size_t weight_bytes() const override { return 0; }
  size_t scratch_bytes() const override { return 0; }

  double tokens = 0, steps = 0, sequences = 0;  // sums over the steps

 private:
  const CostModel cost_;
  const Rates rates_;
  const Work weights_ = {cost_.prefill(1, 0).bytes, 0};  // read once a step
  const std::unique_ptr<Model> null_ = make_null_model(shape_of_nothing());
  VirtualClock& clock_;
};

}  // namespace xpyd::experiments
