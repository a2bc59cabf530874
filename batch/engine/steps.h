// The steps of an engine that are under way. A step's entries are gathered into the flat arrays that the model reads;
// then the step is begun, computed and ended. Steps end in the order in which they began.
//
// Where the model samples, a token that is not known yet stands in its sequence as -1 - r, where r is the row that
// chooses it. The next step may already compute that token. The end of a sequence is therefore seen one step late, and
// that step's results for it are dropped. Where the CPU samples, a sequence whose token is being computed waits for it.
// The next chunk of a prompt does not wait for the chunk before.
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
  std::vector<SequencePtr> ended;  // sequences that ended during this step: it uses their KV until its end
  std::vector<float> logits;       // [n_logits, vocab], if the CPU samples
  std::vector<Chosen> chosen;      // [entries that want logits], if the model samples
  bool by_model = false;
  StepShape shape;
  int layers_told = 0;  // layers that the hooks have heard of
};

class Steps final : private LayerObserver {
 public:
  Steps(Model& model, KvMemory& memory, Clock& clock, EngineHooks* hooks, const EngineOptions& options,
        EngineStats& stats);

  // True: steps are waves of a pipeline, the CPU samples when a wave has ended, and the seconds are those of stages.
  bool in_waves() const { return in_waves_; }
  bool full() const { return int(under_way_.size()) == window_; }
  bool empty() const { return under_way_.empty(); }
  UnderWay under_way() const { return {!empty(), in_waves_, window_, in_waves_ ? model_.stages() : 1}; }

  EngineStep& next() { return *next_; }  // the step that is being put together
  // Begins the next step. True: a step has to end before another one is planned.
  bool begin();
  bool ended() const { return !empty() && model_.ended(); }  // the oldest step has ended
  ExpertLoad expert_load() const { return model_.expert_load(); }
  // Waits for the oldest step or, with waves, for other news. True: the oldest step has ended.
  bool wait();
  // Ends the oldest step and returns it with its chosen tokens or its logits.
  std::unique_ptr<EngineStep> end();
  void reuse(std::unique_ptr<EngineStep> step);

  // tell_layers() reports to the hooks the KV in layers below `layers` that is new to them. tell_written() does so for
  // all layers that stages have written.
  void tell_layers(EngineStep& step, int layers);
  void tell_written();
  // Keeps the hidden state of the last computed token for the multi-token head.
  void keep_hidden(const StepEntry& entry) const;
  // Keeps an ended sequence until the last step under way that contains it ends, and drops what those steps compute for
  // it. False: no step contains it, and it stays the caller's.
  bool hold(SequencePtr& sequence);

 private:
  void layer_done(int layer) override;
  bool chosen_by_model() const;
  StepInput gather();

  Model& model_;
  KvMemory& memory_;
  Clock& clock_;
  EngineHooks* const hooks_;
  const Tokenizer* const tokenizer_;
  EngineStats& stats_;
  const int window_;  // steps that may be under way
  const bool in_waves_;
  std::vector<float> hidden_;  // HiddenStates::rows of a model with a multi-token head
  std::unique_ptr<EngineStep> next_ = std::make_unique<EngineStep>();
  std::deque<std::unique_ptr<EngineStep>> under_way_;  // oldest first
  std::vector<std::unique_ptr<EngineStep>> spare_;     // ended steps, for reuse of their memory
  StepArrays arrays_;
  std::vector<Draw> draws_;
};

}  // namespace xpyd::batch
