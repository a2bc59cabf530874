// A model that computes nothing, layer by layer, for benchmarks and tests of what a step waits for.
#pragma once

#include <atomic>
#include <memory>

#include "base/clock.h"
#include "experiments/null_model.h"

namespace xpyd::experiments {

// Each layer takes a fixed time, which starts when the observer admits the layer. So a step waits for KV at the same
// places as in a real model.
class PacedLayers final : public SynchronousModel {
 public:
  PacedLayers(const ModelConfig& config, double layer_s, Clock& clock)
      : null_(make_null_model(config)), layer_s_(layer_s), clock_(clock) {}

  const ModelConfig& config() const override { return null_->config(); }
  void forward(const StepInput& step, float* logits) override {
    began_s = clock_.now();
    for (int layer = 0; layer < config().n_layers; ++layer) {
      if (step.observer) step.observer->layer_done(layer);
      clock_.sleep(layer_s_);
    }
    StepInput unobserved = step;
    unobserved.observer = nullptr;
    compute_step(*null_, unobserved, logits);
    ended_s = clock_.now();
  }
  Work work(const StepInput&) const override { return {}; }

  std::atomic<double> began_s = 0, ended_s = 0;  // of the last step, on the Clock

 private:
  const std::unique_ptr<Model> null_;
  const double layer_s_;
  Clock& clock_;
};

}  // namespace xpyd::experiments
