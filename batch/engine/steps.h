// The steps of an engine that are under way. A step's entries are gathered into the flat arrays that the model reads,
// it is begun, and it ends; steps end in the order in which they are begun.
//
// Where the model chooses, a token that is not known yet is -1 - r in its sequence, r being the row that chooses it;
// the step after may compute it already. So a sequence's end is seen one step late, and that step's work on it is
// dropped. Where the CPU chooses, a sequence whose token is being computed waits for it; prompts do not, whose chunks
// follow each other.
//
// Thread safety: the engine's thread.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "batch/engine/engine_parts.h"
#include "batch/engine/scheduler.h"
#include "batch/step_arrays.h"
#include "model/model.h"

namespace xpyd::batch {

struct EngineStep {
  std::vector<StepEntry> entries;
  std::vector<SequencePtr> ended;  // those whose last step it is: their KV is in use until it ends
  std::vector<float> logits;       // [n_logits, vocab], where the CPU chooses
  std::vector<Chosen> chosen;      // [entries that want logits], where the model does
  bool by_model = false;
  StepShape shape;
  int layers_told = 0;  // to the hooks
};

class Steps final : private LayerObserver {
 public:
  Steps(Model& model, KvMemory& memory, Clock& clock, EngineHooks* hooks, const EngineOptions& options,
        EngineStats& stats);

  // The tokens of its steps are chosen by the CPU when a wave has ended, and its time is that of stages.
  bool in_waves() const { return in_waves_; }
  bool full() const { return int(under_way_.size()) == window_; }
  bool empty() const { return under_way_.empty(); }
  UnderWay under_way() const { return {!empty(), in_waves_, window_, in_waves_ ? model_.stages() : 1}; }

  EngineStep& next() { return *next_; }                // the step that is being put together
  void arrange() { arrays_.arrange(next_->entries); }  // in rows that sequences keep
  // Begins the next step. True: it has to end before another one is planned.
  bool begin();
  bool ended() const { return !empty() && model_.ended(); }  // the oldest one has
  // Waits for the oldest step, or, of waves, for other news. True: it has ended.
  bool wait();
  // Ends the oldest step: what the model has chosen, or its logits, are there.
  std::unique_ptr<EngineStep> end();
  void reuse(std::unique_ptr<EngineStep> step);

  // The hooks hear of KV in the layers below `layers`, as far as they have not yet; and of what stages have written.
  void tell_layers(EngineStep& step, int layers);
  void tell_written();
  // For the multi-token head: what the last computed token has become.
  void keep_hidden(const StepEntry& entry) const;
  // Drops what steps under way compute for a sequence that is over, and keeps it until the last of them ends. False: it
  // is in none of them.
  bool hold(SequencePtr& sequence);
  template <class F>
  void each_held(F&& f) const {
    for (const auto& step : under_way_)
      for (const SequencePtr& s : step->ended) f(s);
  }

 private:
  void layer_reads(int layer) override;
  void layer_done(int layer) override;
  bool chosen_by_model() const;
  StepInput gather();

  Model& model_;
  KvMemory& memory_;
  Clock& clock_;
  EngineHooks* const hooks_;
  const Tokenizer* const tokenizer_;
  EngineStats& stats_;
  const int window_;  // steps under way
  const bool in_waves_;
  std::vector<float> hidden_;  // HiddenStates::rows, of a model with a multi-token head
  std::unique_ptr<EngineStep> next_ = std::make_unique<EngineStep>();
  std::deque<std::unique_ptr<EngineStep>> under_way_;  // oldest first
  std::vector<std::unique_ptr<EngineStep>> spare_;     // their memory
  StepArrays arrays_;
  std::vector<Draw> draws_;
};

}  // namespace xpyd::batch
