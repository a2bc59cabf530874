// Chunk policies: how many tokens of each prompt the next step (a wave, where stages form a pipeline) computes, and how
// many tokens the step has. Pure functions from a snapshot, and from what the policy remembers, in a table: no clock,
// no I/O. The batching policy (batch/policies/policy.h) then plans within that.
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
  uint64_t id = 0;  // of its request
  int done = 0;     // tokens computed or under way
  int left = 0;     // tokens that no step has yet, more than one
};

struct ChunkView {
  std::span<const ChunkPrompt> prompts;       // running ones, oldest first, then waiting ones in order
  int decodes = 0;                            // sequences that have one token to compute
  double decode_context = 0;                  // KV tokens that they look at
  int budget = 0;                             // of a step: prompts' tokens and decodes
  int base = 0;                               // of one prompt in a step; at most `budget`
  int minimum = 0;                            // of a prompt in a step, unless it has fewer; 0: whatever is left
  int block_tokens = 1;                       // a chunk ends at a multiple, unless the prompt ends
  int stages = 1;                             // P
  StepCost::Terms cost = {};                  // of a wave in a stage: t(L, x) and the decodes beside it
  double steps_seen = 0;                      // … that it was fitted to
  int longest_prefix = 0, longest_chunk = 0;  // … in them
};

// What a policy remembers. A new engine's is ChunkState{}.
struct ChunkState {
  uint64_t head = 0;  // equal_time: the prompt for which
  double wave_s = 0;  // … a wave's seconds were chosen; 0: none
  bool operator==(const ChunkState&) const = default;
};

struct ChunkChoice {
  int step_tokens = 0;        // of the step
  std::vector<int> most;      // [prompt]: tokens of it in this step
  bool extrapolates = false;  // the cost says what it has seen nothing like
  ChunkState state;           // what the policy remembers then
};

// What a row decides: all rows fill their waves with prompts in order, by the same rules (chunk_policy.cc).
struct ChunkWave {
  int tokens = 0;  // of prompts
  bool extrapolates = false;
};

struct ChunkPolicy {
  const char* name;
  ChunkState (*decide)(const ChunkView& view, ChunkState state, ChunkWave& wave);
  bool shapes;  // minds a minimum also where none is given
  const char* source;
};

std::span<const ChunkPolicy> chunk_policies();
const ChunkPolicy* find_chunk_policy(std::string_view name);  // null: no such policy

// ChunkView::minimum, of what is asked for (0: the policy's own).
int chunk_minimum(const ChunkPolicy& policy, int asked, int base, int block_tokens);
// There are prompts, and `state` is what it said last.
void choose_chunks(const ChunkPolicy& policy, const ChunkView& view, const ChunkState& state, ChunkChoice& choice);

// ---- of all rows

// Tokens that a step has for prompts.
inline int prompt_room(const ChunkView& view) { return view.budget > view.decodes ? view.budget - view.decodes : 0; }
// t(0, 0): a wave without prompts.
double empty_wave_s(const ChunkView& view);
// Tokens after L that take so long, beside what takes no longer by them: -1: L alone takes longer.
double tokens_in(const StepCost::Terms& cost, double L, double seconds);
// The cost was fitted to fewer than kKnownSteps, or to nothing half as far or half as long.
bool extrapolates(const ChunkView& view, int L, int x);
constexpr int kKnownSteps = 8;       // as many lengths as SGLang profiles at least
constexpr double kGivenSteps = 1e9;  // ChunkView::steps_seen of a cost that is known beforehand

ChunkState decide_equal_time(const ChunkView& view, ChunkState state, ChunkWave& wave);

}  // namespace xpyd::batch
