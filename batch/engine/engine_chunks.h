// What an engine knows and remembers for its chunk policy (batch/chunking/chunk_policy.h), and what a policy is told.
//
// Thread safety: none; the engine's.
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
  int request_tokens = 0;               // of one prompt in a step at most; 0: as the step's
  int minimum = 0;                      // of a prompt in a step, unless it has fewer; 0: the policy's own
};

// A decision: `before` is what the policy remembered. The view lasts as long as the call.
using ChunkWatcher = std::function<void(const ChunkView& view, const ChunkState& before, const ChunkChoice& choice)>;

class EngineChunks {
 public:
  explicit EngineChunks(const ChunkOptions& options);
  // Called with every decision, when its step begins.
  void watch(ChunkWatcher watcher) { watcher_ = std::move(watcher); }
  // What steps take, as its owner has fitted it to so many.
  void know_cost(const StepCost::Terms& cost, double steps_seen) { cost_ = cost, steps_seen_ = steps_seen; }
  const StepCost::Terms& cost() const { return cost_; }

  bool decides() const { return options_.policy->shapes || options_.request_tokens > 0 || options_.minimum > 0; }
  // A sequence that may run in the next step, and its view, which is told what it may not compute in it (n_held).
  struct Candidate {
    uint64_t request;
    SequenceView* view;
  };
  // Gives the tokens of the next step, of at most `step_tokens`. Before: it decides().
  int decide(std::span<const Candidate> candidates, int step_tokens, int block_tokens, int stages);
  // The step runs: what was decided for it counts. (A plan that runs nothing is no decision.)
  void keep(std::span<const StepEntry> entries, EngineStats& stats);

 private:
  void say_once() const;

  ChunkOptions options_;
  ChunkWatcher watcher_;
  StepCost::Terms cost_ = StepCost().terms();
  double steps_seen_ = 0;
  int longest_prefix_ = 0, longest_chunk_ = 0;  // of the steps so far
  bool told_ = false;                           // that it extrapolates

  // The decision of the plan that is being made, and what it was made from. None: nobody has to decide.
  bool decided_ = false;
  std::vector<ChunkPrompt> prompts_;
  ChunkView view_;
  ChunkChoice choice_;
  ChunkState state_;  // of the last step that ran
};

}  // namespace xpyd::batch
