// What an engine knows and remembers for its chunk policy (batch/chunking/chunk_policy.h), and what a policy is told.
//
// Thread safety: none; the engine's.
#pragma once

#include <functional>
#include <vector>

#include "batch/chunking/chunk_policy.h"

namespace xpyd::batch {

struct ChunkOptions {
  const ChunkPolicy* policy = nullptr;  // null: fixed
  int request_tokens = 0;               // of one prompt in a step at most; 0: as the step's
  int minimum = 0;                      // of a prompt in a step, unless it has fewer; 0: the policy's own
};

// A decision: `before` is what the policy remembered. The view lasts as long as the call.
using ChunkWatcher = std::function<void(const ChunkView& view, const ChunkState& before, const ChunkChoice& choice)>;

struct EngineChunks {
  ChunkOptions options;
  ChunkWatcher watcher;
  // What steps take, as its owner has fitted it; and the longest of them.
  StepCost::Terms cost = StepCost().terms();
  double steps_seen = 0;
  int longest_prefix = 0, longest_chunk = 0;
  bool told = false;  // that it extrapolates

  // The decision of the plan that is being made, and what it was made from. None: nobody has to decide.
  bool decided = false;
  std::vector<ChunkPrompt> prompts;
  ChunkView view;
  ChunkChoice choice;
  ChunkState state;  // of the last step that ran

  bool decides() const { return options.policy->shapes || options.request_tokens > 0 || options.minimum > 0; }
};

}  // namespace xpyd::batch
