// Drafts of an engine's steps (batch/drafter.h): how many each sequence gets.
//
// Thread safety: the engine's thread.
#pragma once

#include <memory>
#include <vector>

#include "batch/drafter.h"
#include "batch/engine/engine_parts.h"
#include "batch/step_arrays.h"

namespace xpyd::batch {

class Drafts {
 public:
  // Requires: options.speculation is on.
  Drafts(const EngineOptions& options, const DrafterParts& parts)
      : options_(options), memory_(parts.memory), drafter_(options.speculation.drafter->make(parts)) {}

  // Adds drafts to sequences that decode, as far as the step has spare tokens, rows of logits and free blocks. No
  // sequence is preempted and no cached prefix evicted for a draft. `cost`: seconds of steps.
  void add(std::vector<StepEntry>& entries, const StepCost::Terms& cost);

 private:
  int most_for(const StepEntry& entry, int spare_tokens, int spare_rows, int room) const;

  const EngineOptions& options_;
  KvMemory& memory_;
  const std::unique_ptr<Drafter> drafter_;
  // Buffers, reused from step to step.
  std::vector<DraftWish> wishes_;
  std::vector<StepEntry*> drafted_;  // [wish]
};

}  // namespace xpyd::batch
