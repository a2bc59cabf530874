#include "experiments/simulate/paced_model.h"

#include <algorithm>
#include <deque>
#include <vector>

namespace xpyd::disagg {
namespace {

StepShape shape_of(const StepInput& step) {
  StepShape shape{.steps = 0};
  for (size_t s = 0; s < step.views.size(); ++s) {
    const int n = step.q_offsets[s + 1] - step.q_offsets[s];
    shape.add_tokens(n, step.kv_lengths[s] - n);
  }
  return shape;
}

void clear(const StepInput& step, const ModelConfig& config, float* logits) {
  std::fill_n(logits, size_t(config.vocab) * step.logit_rows.size(), 0.0f);
}

double boundary(const PacedPipeline& pipeline, const StepInput& step) {
  return pipeline.boundary_s + pipeline.boundary_s_per_token * double(step.token_ids.size());
}

// A step that the caller waits for, on one stage or on stages one after the other.
class PacedStep final : public SynchronousModel {
 public:
  PacedStep(const StepCost::Terms& terms, const PacedPipeline& pipeline, int n_layers, NodeTime& time)
      : config_(small_shape(n_layers)), terms_(terms), pipeline_(pipeline), time_(time) {}
  int stages() const override { return pipeline_.stages; }
  const ModelConfig& config() const override { return config_; }
  Work work(const StepInput&) const override { return {}; }

 private:
  void forward(const StepInput& step, float* logits) override {
    time_.began_s = time_.clock.seconds;
    for (int s = 0; s < stages(); ++s)
      time_.clock.seconds += seconds(terms_, shape_of(step)) + (s > 0 ? boundary(pipeline_, step) : 0);
    for (int layer = 0; step.observer && layer < config_.n_layers; ++layer) step.observer->layer_done(layer);
    time_.last_began_s = time_.began_s, time_.last_ended_s = time_.clock.seconds;
    clear(step, config_, logits);
  }

  const ModelConfig config_;
  const StepCost::Terms terms_;
  const PacedPipeline pipeline_;
  NodeTime& time_;
};

class PacedWaves final : public Model {
 public:
  PacedWaves(const StepCost::Terms& terms, const PacedPipeline& pipeline, int n_layers, NodeTime& time)
      : config_(small_shape(n_layers)), terms_(terms), pipeline_(pipeline), time_(time), free_s_(size_t(stages())) {}
  const ModelConfig& config() const override { return config_; }
  int window() const override { return pipeline_.window; }
  int stages() const override { return pipeline_.stages; }
  void begin(const StepInput& step, std::span<const Draw>, float* logits) override {
    Wave wave{.t = seconds(terms_, shape_of(step)), .watched = step.watched, .ends_s = {}};
    double ready_s = time_.clock.seconds;
    for (double& free_s : free_s_) {
      free_s = std::max(free_s, ready_s) + wave.t;
      wave.ends_s.push_back(free_s);
      ready_s = free_s + boundary(pipeline_, step);
    }
    waves_.push_back(std::move(wave));
    clear(step, config_, logits);
  }
  bool ended() const override { return !waves_.empty() && waves_.front().ends_s.back() <= time_.clock.seconds; }
  // On false, time_.wave_s says when to call again; the node is woken then.
  bool wait() override {
    if (ended()) return true;
    for (const Wave& wave : waves_) {
      const auto next = std::ranges::upper_bound(wave.ends_s, time_.clock.seconds);
      if (wave.watched && next != wave.ends_s.end()) time_.wave_s = std::min(time_.wave_s, *next);
    }
    time_.wave_s = std::min(time_.wave_s, waves_.front().ends_s.back());
    return false;
  }
  int layers_written(int i) const override {
    const Wave& wave = waves_[size_t(i)];
    const auto ended = std::ranges::upper_bound(wave.ends_s, time_.clock.seconds) - wave.ends_s.begin();
    if (ended > 0)
      time_.last_ended_s = wave.ends_s[size_t(ended) - 1], time_.last_began_s = time_.last_ended_s - wave.t;
    return int(ended) * config_.n_layers / stages();
  }
  void end(Chosen*) override {
    stage_seconds_.assign(size_t(stages()), waves_.front().t);
    time_.last_ended_s = waves_.front().ends_s.back(), time_.last_began_s = time_.last_ended_s - waves_.front().t;
    waves_.pop_front();
  }
  std::span<const double> stage_seconds() const override { return stage_seconds_; }

  Work work(const StepInput&) const override { return {}; }

 private:
  struct Wave {
    double t;  // seconds on each stage
    bool watched;
    std::vector<double> ends_s;  // [stages]
  };

  const ModelConfig config_;
  const StepCost::Terms terms_;
  const PacedPipeline pipeline_;
  NodeTime& time_;
  std::vector<double> free_s_;  // [stages]
  std::deque<Wave> waves_;
  std::vector<double> stage_seconds_;  // [stages]
};

}  // namespace

ModelConfig small_shape(int n_layers) {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = n_layers;
  c.n_heads = c.n_kv_heads = c.head_dim = 1;
  c.hidden = c.intermediate = 8;
  c.vocab = 2;
  c.max_position = 1 << 30;
  return c;
}

std::unique_ptr<Model> make_paced_model(const StepCost::Terms& terms, const PacedPipeline& pipeline, int n_layers,
                                        NodeTime& time) {
  if (pipeline.stages > 1 && pipeline.window > 1) return std::make_unique<PacedWaves>(terms, pipeline, n_layers, time);
  return std::make_unique<PacedStep>(terms, pipeline, n_layers, time);
}

}  // namespace xpyd::disagg
