// EngineChunks connects an engine with its chunk policy (batch/chunking/chunk_policy.h). It builds the snapshot that
// the policy sees and keeps the state that the policy remembers.
//
// Thread safety: the engine's thread.
#pragma once

#include <span>
#include <vector>

#include "batch/chunking/chunk_policy.h"
#include "batch/policies/policy.h"

namespace xpyd::batch {

class EngineChunks {
 public:
  explicit EngineChunks(const ChunkPolicy* policy) : policy_(policy) {}  // null: no decisions
  void know_cost(const StepCost::Terms& cost) { cost_ = cost; }          // sets the cost model of steps
  const StepCost::Terms& cost() const { return cost_; }

  bool decides() const { return policy_ && policy_->decide; }
  // A sequence that may run in the next step. decide() sets n_held of its view: tokens that the step must not compute.
  struct Candidate {
    uint64_t request;
    SequenceView* view;
  };
  // Returns the tokens of the next step, at most `step_tokens`. Requires: decides().
  int decide(std::span<const Candidate> candidates, int step_tokens, int block_tokens, int stages);

 private:
  const ChunkPolicy* const policy_;
  StepCost::Terms cost_ = StepCost().terms();
  std::vector<ChunkPrompt> prompts_;
  ChunkChoice choice_;  // the last decision
};

}  // namespace xpyd::batch
