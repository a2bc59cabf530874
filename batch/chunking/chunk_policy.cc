#include "batch/chunking/chunk_policy.h"

#include <algorithm>
#include <climits>
#include <cmath>

#include "base/table.h"

namespace xpyd::batch {
namespace {

ChunkState decide_fixed(const ChunkView& view, ChunkState state, ChunkWave& wave) {
  wave.tokens = prompt_room(view);
  return state;
}

constexpr ChunkPolicy kChunkPolicies[] = {
    {"fixed", decide_fixed, false, "Mooncake (FAST '25) section 3.3; vLLM V1: the same number of tokens in every step"},
    {"equal_time", decide_equal_time, true,
     "the time of a wave that minimises sum t + (P-1) T; ATOM's cost of a chunk"},
};

// ---- Rules for all rows: prompts take the wave's tokens in order, and no piece is smaller than the minimum.

// The smallest piece, at most half of what a prompt may have, so that a longer prompt comes in two. It is a multiple of
// a block if it is at least one block, so that chunks end at block boundaries.
int least_piece(const ChunkView& view) {
  const int least = std::min(view.minimum, std::min(prompt_room(view), view.base) / 2);
  return least >= view.block_tokens ? least / view.block_tokens * view.block_tokens : least;
}

// Returns the tokens of a prompt in this wave: `want` if it has more, but up to `most` if a few more tokens finish it.
int piece(const ChunkPrompt& p, int want, int most, int least, int page, bool first) {
  if (p.left <= want || (p.left <= most && p.left - want < least)) return p.left;
  int n = want;
  if (p.left - n < least) n = std::min(n, p.left / 2);  // the last two pieces get equal sizes
  const int aligned = (p.done + n) / page * page - p.done;
  if (aligned >= std::max(least, 1)) n = aligned;
  return n >= least || first ? n : 0;  // a later prompt waits for a wave with more room
}

int fill(const ChunkView& view, const ChunkWave& wave, std::vector<int>& most) {
  const int room = prompt_room(view);
  const int tokens = wave.tokens > 0 ? std::min(std::max(wave.tokens, view.minimum), room) : 0;
  int used = 0;
  for (size_t i = 0; i < view.prompts.size() && used < tokens; ++i) {
    const int want = std::min(tokens - used, view.base), at_most = std::min(room - used, view.base);
    const bool full = want < view.base && want < view.prompts[i].left;  // the wave limits it, not its own limit
    most[i] = piece(view.prompts[i], want, at_most, view.minimum, view.block_tokens, used == 0);
    used += most[i];
    if (full || most[i] == 0) break;
  }
  return used;
}

}  // namespace

std::span<const ChunkPolicy> chunk_policies() { return kChunkPolicies; }

const ChunkPolicy* find_chunk_policy(std::string_view name) { return find_row(kChunkPolicies, name); }

int chunk_minimum(const ChunkPolicy& policy, int asked, int base, int block_tokens) {
  const int least = asked > 0 ? asked : policy.shapes ? base / 4 : 0;  // SGLang's share of the base
  return (least + block_tokens - 1) / block_tokens * block_tokens;
}

void choose_chunks(const ChunkPolicy& policy, const ChunkView& view, const ChunkState& state, ChunkChoice& choice) {
  ChunkView seen = view;
  seen.minimum = least_piece(view);
  ChunkWave wave;
  choice.state = policy.decide(seen, state, wave);
  choice.extrapolates = wave.extrapolates;
  if (!policy.shapes && view.minimum == 0) {
    choice.step_tokens = view.budget;
    choice.most.assign(view.prompts.size(), view.base < view.budget ? view.base : INT_MAX);
    return;
  }
  choice.most.assign(view.prompts.size(), 0);
  const int used = fill(seen, wave, choice.most);
  choice.step_tokens = std::clamp(view.decodes + std::max(wave.tokens, used), 1, view.budget);
}

double empty_wave_s(const ChunkView& view) {
  return view.cost[0] + view.cost[4] * view.decodes + view.cost[5] * view.decode_context;
}

// The root of a x^2 + (b + 2 a L) x = seconds - gamma L, in a form that also holds for a = 0.
double tokens_in(const StepCost::Terms& cost, double L, double seconds) {
  const double left = seconds - cost[2] * L, linear = cost[1] + 2 * cost[3] * L;
  if (left < 0) return -1;
  const double by = linear + std::sqrt(linear * linear + 4 * cost[3] * left);
  return by > 0 ? 2 * left / by : INT_MAX;
}

bool extrapolates(const ChunkView& view, int L, int x) {
  if (view.steps_seen >= kGivenSteps) return false;
  return view.steps_seen < kKnownSteps || x > 2.0 * view.longest_chunk ||
         L > 2.0 * view.longest_prefix + 2.0 * view.longest_chunk;
}

}  // namespace xpyd::batch
