// Chunk policies decide how many tokens the next step has and how many of each prompt. Where pipeline stages compute, a
// step is a wave. A policy is a pure function of a snapshot and of its remembered state, in a table; it uses no clock
// and no I/O. The batching policy (batch/policies/policy.h) then plans within these limits.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "model/cost/step_cost.h"

namespace xpyd::batch {

struct ChunkPrompt {
  uint64_t id = 0;  // request id
  int done = 0;     // tokens computed or under way
  int left = 0;     // tokens in no step yet, more than one
};

struct ChunkView {
  std::span<const ChunkPrompt> prompts;  // running ones, oldest first, then waiting ones in order
  int decodes = 0;                       // sequences with one token to compute
  double decode_context = 0;             // KV tokens that they attend to
  int budget = 0;                        // tokens of a step: prompts and decodes
  int minimum = 0;                       // least tokens of a prompt in a step, unless fewer are left
  int block_tokens = 1;                  // a chunk ends at a multiple of this, or with its prompt
  int stages = 1;                        // pipeline stages, P
  StepCost::Terms cost = {};             // of a wave in one stage: t(L, x) and the decodes beside it
};

// The state that a policy remembers. A new engine starts with ChunkState{}.
struct ChunkState {
  uint64_t head = 0;  // equal_time: the prompt for which `wave_s` was chosen
  double wave_s = 0;  // equal_time: seconds of a wave; 0: none chosen
  bool operator==(const ChunkState&) const = default;
};

struct ChunkChoice {
  int step_tokens = 0;    // tokens of the step
  std::vector<int> most;  // [prompt]: most tokens of it in this step
  ChunkState state;       // state to remember if the step runs
};

struct ChunkPolicy {
  const char* name;
  // Sets the tokens of prompts in the next wave. All rows then fill the wave with prompts in order, by the same rules
  // (chunk_policy.cc). Null: the batching policy gives each prompt in order what the step has left.
  ChunkState (*decide)(const ChunkView& view, ChunkState state, int& wave_tokens);
  const char* source;
};

std::span<const ChunkPolicy> chunk_policies();
const ChunkPolicy* find_chunk_policy(std::string_view name);  // null: no such policy

// Returns ChunkView::minimum: a quarter of the budget (SGLang's share), rounded up to blocks.
int chunk_minimum(int budget, int block_tokens);
// Fills `choice`. Requires: the policy decides, the view has prompts, and `state` is what the policy returned last.
void choose_chunks(const ChunkPolicy& policy, const ChunkView& view, const ChunkState& state, ChunkChoice& choice);

// ---- Shared by all rows.

// Tokens that a step has for prompts.
inline int prompt_room(const ChunkView& view) { return view.budget > view.decodes ? view.budget - view.decodes : 0; }
// Seconds of a wave without prompts, t(0, 0).
double empty_wave_s(const ChunkView& view);
// Returns how many prompt tokens after L take `seconds`, beside the constant part of a wave. -1: L alone takes longer.
double tokens_in(const StepCost::Terms& cost, double L, double seconds);

ChunkState decide_equal_time(const ChunkView& view, ChunkState state, int& wave_tokens);

}  // namespace xpyd::batch
