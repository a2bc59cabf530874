// EngineChunks connects an engine with its chunk policy (batch/chunking/chunk_policy.h). It builds the snapshot that
// the policy sees and keeps the state that the policy remembers.
//
// Thread safety: the engine's thread.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "batch/chunking/chunk_policy.h"
#include "batch/policies/policy.h"

namespace xpyd::batch {

struct EngineStats;
struct StepEntry;

struct ChunkOptions {
  const ChunkPolicy* policy = nullptr;  // null: fixed
  int request_tokens = 0;               // most tokens of one prompt in a step; 0: as many as the step has
  int minimum = 0;  // least tokens of a prompt in a step, unless fewer are left; 0: the policy's own
};

// Called with a decision. `before` is the state that the policy remembered. The view is valid during the call.
using ChunkWatcher = std::function<void(const ChunkView& view, const ChunkState& before, const ChunkChoice& choice)>;

class EngineChunks {
 public:
  explicit EngineChunks(const ChunkOptions& options);
  // Sets a watcher that is called with every decision when its step begins.
  void watch(ChunkWatcher watcher) { watcher_ = std::move(watcher); }
  // Sets the cost model of steps and the number of steps to which it was fitted.
  void know_cost(const StepCost::Terms& cost, double steps_seen) { cost_ = cost, steps_seen_ = steps_seen; }
  const StepCost::Terms& cost() const { return cost_; }

  bool decides() const { return options_.policy->shapes || options_.request_tokens > 0 || options_.minimum > 0; }
  // A sequence that may run in the next step. decide() sets n_held of its view: tokens that the step must not compute.
  struct Candidate {
    uint64_t request;
    SequenceView* view;
  };
  // Returns the tokens of the next step, at most `step_tokens`. Requires: decides().
  int decide(std::span<const Candidate> candidates, int step_tokens, int block_tokens, int stages);
  // Records the decision of a step that runs. A decision whose plan runs nothing is not counted.
  void keep(std::span<const StepEntry> entries);

 private:
  void say_once() const;

  ChunkOptions options_;
  ChunkWatcher watcher_;
  StepCost::Terms cost_ = StepCost().terms();
  double steps_seen_ = 0;
  int longest_prefix_ = 0, longest_chunk_ = 0;  // in the steps so far
  bool told_ = false;                           // the log has said that it extrapolates

  // The decision for the plan in progress, and its inputs. Unset if no prompt needs one.
  bool decided_ = false;
  std::vector<ChunkPrompt> prompts_;
  ChunkView view_;
  ChunkChoice choice_;
  ChunkState state_;  // of the last step that ran
};

}  // namespace xpyd::batch
