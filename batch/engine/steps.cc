#include "batch/engine/steps.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace xpyd::batch {

Steps::Steps(Model& model, KvMemory& memory, Clock& clock, EngineHooks* hooks, const EngineOptions& options,
             EngineStats& stats)
    : model_(model),
      memory_(memory),
      clock_(clock),
      hooks_(hooks),
      tokenizer_(options.tokenizer),
      stats_(stats),
      // With speculation the CPU must check drafts before the next step, so a model that samples does not run ahead.
      window_(options.ahead && !(options.speculation.on() && model.chooses()) ? model.window() : 1),
      in_waves_(window_ > 1 && !model.chooses()) {
  const ModelConfig& c = model.config();
  if (c.n_predict) hidden_.resize(size_t(std::max(options.step_tokens, options.max_batch)) * size_t(c.hidden));
}

// The next step as the model reads it. Its spans point into this object's arrays.
StepInput Steps::gather() {
  StepInput input = arrays_.gather(next_->entries, memory_, hooks_ && hooks_->layerwise() ? this : nullptr,
                                   hidden_.empty() ? nullptr : hidden_.data(), size_t(model_.config().hidden));
  if (!in_waves_) return input;
  input.watched = hooks_ && std::ranges::any_of(next_->entries, [](const StepEntry& e) { return e.sequence->leaves; });
  if (!input.watched) input.observer = nullptr;
  return input;
}

bool Steps::chosen_by_model() const {
  return window_ > 1 && model_.chooses() && std::ranges::none_of(next_->entries, [](const StepEntry& entry) {
           const Sequence& s = *entry.sequence;
           return entry.n_prompt_rows > 0 ||
                  (entry.wants_logits && (s.stands_for > 1 || more_than_a_draw(s.request->sampling)));
         });
}

bool Steps::begin() {
  EngineStep& step = *next_;
  step.by_model = chosen_by_model();
  XPYD_CHECK(in_waves_ || step.by_model || empty());
  const StepInput input = gather();
  const size_t n_logits = input.logit_rows.size() * size_t(model_.config().vocab);
  draws_.clear();
  if (step.by_model) {
    for (const StepEntry& entry : step.entries) {
      if (!entry.wants_logits) continue;
      Sequence& s = *entry.sequence;
      open_choice(s, s.choice, tokenizer_);
      draws_.push_back(next_draw(s.request->sampling, s.sampler));
      s.tokens.push_back(-int32_t(draws_.size()));
    }
  } else if (step.logits.size() < n_logits) {
    step.logits.resize(n_logits);
  }
  step.layers_told = 0;
  const double start = clock_.now();
  model_.begin(input, draws_, step.by_model ? nullptr : step.logits.data());
  if (!in_waves_ && model_.ended()) stats_.wait_seconds += clock_.now() - start;
  stats_.flops += model_.work(input).flops;
  for (const StepEntry& entry : step.entries) entry.sequence->computed = entry.end();
  under_way_.push_back(std::move(next_));
  if (spare_.empty()) spare_.push_back(std::make_unique<EngineStep>());
  next_ = std::move(spare_.back());
  spare_.pop_back();
  return full() || !(in_waves_ || step.by_model);
}

bool Steps::wait() {
  const double start = clock_.now();
  bool over = model_.wait();
  for (; !over && !in_waves_; over = model_.wait()) tell_written();
  stats_.wait_seconds += clock_.now() - start;
  return over;
}

std::unique_ptr<EngineStep> Steps::end() {
  std::unique_ptr<EngineStep> step = std::move(under_way_.front());
  under_way_.pop_front();
  step->chosen.resize(step->by_model ? step->entries.size() : 0);
  model_.end(step->chosen.data());
  const float* hidden = hidden_.data();
  for (StepEntry& entry : step->entries) {
    if (entry.n_drafts > 0) entry.sequence->computed = entry.first + entry.n_known();
    if (hidden_.empty()) continue;
    entry.hidden = hidden;
    keep_hidden(entry);
    hidden += size_t(entry.n_tokens) * size_t(model_.config().hidden);
  }
  if (in_waves_) {
    stats_.work.add(step->shape);
    ++stats_.steps;
    const auto stages = model_.stage_seconds();
    if (!stages.empty()) stats_.step_seconds += *std::max_element(stages.begin(), stages.end());
  }
  return step;
}

void Steps::reuse(std::unique_ptr<EngineStep> step) {
  step->ended.clear();
  step->entries.clear();
  spare_.push_back(std::move(step));
}

void Steps::keep_hidden(const StepEntry& entry) const {
  if (hidden_.empty()) return;
  Sequence& s = *entry.sequence;
  const size_t width = size_t(model_.config().hidden);
  const float* row = entry.hidden + size_t(s.computed - 1 - entry.first) * width;
  s.hidden.assign(row, row + width);
  s.hidden_tokens = s.computed;
}

void Steps::tell_layers(EngineStep& step, int layers) {
  const int told = std::exchange(step.layers_told, std::max(layers, step.layers_told));
  if (!hooks_ || layers <= told) return;
  hooks_->layer_ended();
  for (const StepEntry& entry : step.entries)
    if (Sequence& s = *entry.sequence; !entry.ended && s.leaves)
      hooks_->kv_written(s, told, layers, entry.first, entry.end());
}

void Steps::tell_written() {
  for (size_t i = 0; i < under_way_.size(); ++i) tell_layers(*under_way_[i], model_.layers_written(int(i)));
}

bool Steps::hold(SequencePtr& s) {
  EngineStep* last = nullptr;
  for (const auto& step : under_way_)
    for (StepEntry& entry : step->entries)
      if (entry.sequence == s.get()) entry.ended = true, last = step.get();
  if (last) last->ended.push_back(std::move(s));
  return last;
}

void Steps::layer_done(int layer) { tell_layers(*next_, layer + 1); }

}  // namespace xpyd::batch
