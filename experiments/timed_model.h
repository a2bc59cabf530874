// A model that computes nothing and takes the time that the cost model predicts for a real one, usually in virtual
// time. The engine, policy and KV memory above it are the real ones.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "experiments/null_model.h"
#include "model/cost/cost_model.h"
#include "model/model.h"

namespace xpyd::experiments {

// The shape that the engine sees: one layer, one head, few bytes per token.
inline ModelConfig shape_of_nothing() {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = c.n_heads = c.n_kv_heads = c.head_dim = 1;
  c.hidden = c.intermediate = 8;
  c.vocab = 64;
  c.max_position = 4096;
  return c;
}

// Seconds of a step of a real model. A step reads the weights once, whatever it computes.
struct StepCost {
  CostModel cost;
  Rates rates;
  Work weights = {cost.prefill(1, 0).bytes, 0};
  double seconds(const StepInput& step) const {
    Work work = weights;
    for (size_t s = 0; s < step.views.size(); ++s) {
      const int n = step.q_offsets[s + 1] - step.q_offsets[s];
      const Work mine = cost.prefill(n, step.kv_lengths[s] - n);
      work.flops += mine.flops;
      work.bytes += mine.bytes - weights.bytes;
    }
    return model::seconds(work, rates);
  }
};

class TimedModel : public SynchronousModel {
 public:
  TimedModel(CostModel cost, Rates rates, VirtualClock& clock)
      : TimedModel(
            shape_of_nothing(),
            [of = StepCost{std::move(cost), rates}](const StepInput& step) { return of.seconds(step); },
            [&clock](double seconds) { clock.seconds += seconds; }) {}
  // seconds() is called when a step begins, and sleep() takes that long.
  TimedModel(const ModelConfig& shape, std::function<double(const StepInput&)> seconds,
             std::function<void(double)> sleep)
      : null_(make_null_model(shape)), seconds_(std::move(seconds)), sleep_(std::move(sleep)) {}

  const ModelConfig& config() const override { return null_->config(); }
  void forward(const StepInput& step, float* logits) override {
    last_s = seconds_(step);
    compute_step(*null_, step, logits);
    sleep_(last_s);
    ++steps;
    tokens += double(step.token_ids.size());
    sequences += double(step.views.size());
  }
  Work work(const StepInput&) const override { return {}; }

  double tokens = 0, steps = 0, sequences = 0;  // sums over the steps
  double last_s = 0;                            // of the last step

 private:
  const std::unique_ptr<Model> null_;
  const std::function<double(const StepInput&)> seconds_;
  const std::function<void(double)> sleep_;
};

}  // namespace xpyd::experiments
