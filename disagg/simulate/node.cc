#include "disagg/simulate/node.h"

#include <algorithm>
#include <utility>

namespace xpyd::disagg {
namespace {

// Copies nothing, at once.
class NullQueue final : public DeviceQueue {
 public:
  void copy(std::span<const Copy>, bool) override {}
  int64_t mark() override { return 0; }
  bool reached(int64_t) override { return true; }
  void wait() override {}
};

class PacedModel final : public Model {
 public:
  PacedModel(const StepCost& cost, NodeTime& time) : cost_(cost), time_(time) {}
  const ModelConfig& config() const override { return config_; }
  void forward(const StepInput& step, float* logits) override {
    StepShape shape;
    for (size_t s = 0; s < step.views.size(); ++s) {
      const int n = step.q_offsets[s + 1] - step.q_offsets[s], before = step.kv_lengths[s] - n;
      if (n == 1 && before > 0)
        shape.add_decodes(1, before + 1);
      else
        shape.add_prompt(n, before);
    }
    time_.began_s = time_.clock.seconds;
    time_.clock.seconds += cost_.seconds(shape);
    if (step.observer) step.observer->layer_done(0);
    std::fill_n(logits, size_t(config_.vocab) * step.logit_rows.size(), 0.0f);
  }
  Work work(const StepInput&) const override { return {}; }
  size_t weight_bytes() const override { return 0; }
  size_t scratch_bytes() const override { return 0; }

 private:
  const ModelConfig config_ = small_shape();
  const StepCost cost_;
  NodeTime& time_;
};

}  // namespace

ModelConfig small_shape() {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = c.n_heads = c.n_kv_heads = c.head_dim = 1;
  c.hidden = c.intermediate = 8;
  c.vocab = 2;
  c.max_position = 1 << 30;
  return c;
}

std::unique_ptr<DeviceQueue> Node::make_null_queue() { return std::make_unique<NullQueue>(); }
std::unique_ptr<Model> Node::make_model() { return std::make_unique<PacedModel>(cost_, time_); }

void Node::wake() {
  if (run_.steps > 0) {  // the step that is under way ends, and no other begins
    const double now = timeline_.now();
    if (now <= time_.clock.seconds) {
      run_ = {};
      ++runs_;
    } else {
      const auto under_way = size_t(std::lower_bound(ends_s_.begin(), ends_s_.end(), now) - ends_s_.begin());
      if (under_way + 1 >= ends_s_.size()) return;
      ends_s_.resize(under_way + 1);
      return plan_end();
    }
  }
  if (std::exchange(planned_, true)) return;
  timeline_.at(time_.clock.seconds, [this] { turn(); });
}

void Node::turn() {
  planned_ = false;
  time_.clock.seconds = time_.began_s = timeline_.now();
  in_turn_ = true;
  const bool moved = instance_->turn();
  in_turn_ = false;
  if (!moved) return;
  if (!each_step_) begin_run();
  if (run_.steps == 0) wake();
}

void Node::begin_run() {
  constexpr int kMost = 1 << 16;
  // Of whoever computes prompts others must know in time what its cache has lost.
  run_ = instance_->alike(kMost, instance_->options().role == Role::decode);
  if (run_.steps < 2) run_ = {};
  if (run_.steps == 0) return;
  ends_s_.resize(size_t(run_.steps));
  double at = time_.clock.seconds;
  for (int j = 0; j < run_.steps; ++j) ends_s_[size_t(j)] = at += cost_.seconds(run_.shape(j));
  plan_end();
}

void Node::plan_end() {
  timeline_.at(ends_s_.back(), [this, number = ++runs_] { end_run(number); });
}

void Node::end_run(uint64_t number) {
  if (number != runs_) return;
  const double began_s = std::exchange(time_.clock.seconds, ends_s_.back());
  in_turn_ = true;
  instance_->repeat(run_, began_s, ends_s_);
  in_turn_ = false;
  while (!said_.empty() && said_.front().ends_s.back() + message_s_ < timeline_.now()) said_.pop_front();
  said_.push_back({std::move(ends_s_), int(run_.first.decodes)});
  run_ = {};
  wake();
}

Unsaid Node::unsaid(double now) const {
  Unsaid all;
  const auto ended = [&](const std::vector<double>& ends_s) {
    return int(std::upper_bound(ends_s.begin(), ends_s.end(), now - message_s_) - ends_s.begin());
  };
  for (const Said& said : said_) {
    if (said.ends_s.back() + message_s_ <= now) continue;  // it has been heard
    const int steps = ended(said.ends_s);
    all.steps += steps;
    all.tokens += int64_t(steps) * said.decodes;
  }
  if (run_.steps == 0) return all;
  const int steps = ended(ends_s_);
  all.steps += steps;
  all.tokens += int64_t(steps * run_.first.decodes);
  // What the step that is under way needs is taken already.
  const auto begun = std::lower_bound(ends_s_.begin(), ends_s_.end(), now) - ends_s_.begin();
  if (now > time_.clock.seconds) all.blocks = instance_->blocks_taken(int(begun) + 1);
  return all;
}

}  // namespace xpyd::disagg
