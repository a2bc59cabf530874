// A device that computes beside the CPU, on the CPU. A step is computed when it is waited for, so whatever the engine
// frees, reuses or forgets too early shows in its tokens. The model chooses tokens itself, or is a pipeline whose waves
// end as late as they may.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "base/row_hash.h"
#include "model/model.h"
#include "tests/catch.h"

namespace xpyd::testing {

class LateModel final : public Model {
 public:
  // `waves`: those of a pipeline with half as many stages; 0: the model chooses tokens.
  explicit LateModel(std::unique_ptr<Model> model, int waves = 0) : model_(std::move(model)), waves_(waves) {}

  const ModelConfig& config() const override { return model_->config(); }
  bool chooses() const override { return waves_ == 0; }
  int window() const override { return waves_ == 0 ? 2 : waves_; }
  int stages() const override { return std::max(1, waves_ / 2); }
  // Every other call ends for other news.
  bool wait() override { return waves_ == 0 || ++looks_ % 2 == 0; }
  void begin(const StepInput& step, std::span<const Draw> draws, float* logits) override {
    REQUIRE(steps_.size() < size_t(window()));
    REQUIRE((!chooses() || !logits || steps_.empty()));
    REQUIRE(draws.size() == (chooses() && !logits ? step.logit_rows.size() : 0));
    for (const Draw& draw : draws) REQUIRE(draw.temperature == 0);
    auto copy = [](auto span) { return std::vector<int32_t>(span.begin(), span.end()); };
    Step mine{copy(step.token_ids),
              copy(step.q_offsets),
              copy(step.kv_lengths),
              copy(step.logit_rows),
              {},
              {step.views.begin(), step.views.end()},
              logits};
    for (size_t s = 0; s < mine.views.size(); ++s) {
      KvView& view = mine.views[s];
      if (view.contiguous()) continue;
      const int n = (mine.lengths[s] + view.layout->block_tokens - 1) / view.layout->block_tokens;
      mine.tables.push_back({view.block_table, view.block_table + n});
      view.block_table = mine.tables.back().data();
    }
    for (int32_t token : mine.ids)
      if (token < 0) {
        REQUIRE((chooses() && !logits));
        REQUIRE(steps_.size() == 1);  // otherwise the token is known
        REQUIRE(size_t(-token) <= steps_[0].rows.size());
      }
    steps_.push_back(std::move(mine));
    begun += !chooses() || !logits;
    overlapped += steps_.size() > 1;
  }
  void end(Chosen* chosen) override {
    REQUIRE(!steps_.empty());
    Step& step = steps_.front();
    const size_t vocab = size_t(config().vocab);
    std::vector<float> own(step.rows.size() * vocab);
    float* logits = step.logits ? step.logits : own.data();
    for (int32_t& token : step.ids)
      if (token < 0) token = previous_[size_t(-1 - token)];
    compute_step(*model_,
                 {.token_ids = step.ids,
                  .q_offsets = step.offsets,
                  .kv_lengths = step.lengths,
                  .views = step.views,
                  .logit_rows = step.rows},
                 logits);
    if (step.logits || !chooses()) return steps_.pop_front();
    previous_.clear();
    SamplerState state;
    for (size_t r = 0; r < step.rows.size(); ++r) {
      const std::span<const float> row{logits + r * vocab, vocab};
      previous_.push_back(sample(row, {.temperature = 0}, state, scratch_).chosen.token);
      chosen[r] = {previous_.back(), 0, row_hash(row.data(), vocab)};
    }
    steps_.pop_front();
  }
  Work work(const StepInput& step) const override { return model_->work(step); }

  static inline long begun = 0, overlapped = 0;  // steps of all models that may overlap another one, and those that did

 private:
  struct Step {
    std::vector<int32_t> ids, offsets, lengths, rows;
    std::deque<std::vector<int32_t>> tables;
    std::vector<KvView> views;
    float* logits;
  };
  std::unique_ptr<Model> model_;
  const int waves_;
  int looks_ = 0;
  std::deque<Step> steps_;
  std::vector<int32_t> previous_;
  SamplerScratch scratch_;
};

}  // namespace xpyd::testing
