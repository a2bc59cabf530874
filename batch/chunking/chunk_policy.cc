#include "batch/chunking/chunk_policy.h"

#include <algorithm>
#include <climits>
#include <cmath>

#include "base/table.h"

namespace xpyd::batch {
namespace {

constexpr ChunkPolicy kChunkPolicies[] = {
    {"fixed", nullptr, "Mooncake (FAST '25) section 3.3; vLLM V1: the same number of tokens in every step"},
    {"equal_time", decide_equal_time, "the time of a wave that minimises sum t + (P-1) T; ATOM's cost of a chunk"},
};

// ---- Rules for all rows: prompts take the wave's tokens in order, and no piece is smaller than the minimum.

// The smallest piece, at most half of what a prompt may have, so that a longer prompt comes in two. It is a multiple of
// a block if it is at least one block, so that chunks end at block boundaries.
int least_piece(const ChunkView& view) {
  const int least = std::min(view.minimum, prompt_room(view) / 2);
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

int fill(const ChunkView& view, int wave_tokens, std::vector<int>& most) {
  const int room = prompt_room(view);
  const int tokens = wave_tokens > 0 ? std::min(std::max(wave_tokens, view.minimum), room) : 0;
  int used = 0;
  for (size_t i = 0; i < view.prompts.size() && used < tokens; ++i) {
    const int want = tokens - used;
    const bool full = want < view.prompts[i].left;
    most[i] = piece(view.prompts[i], want, room - used, view.minimum, view.block_tokens, used == 0);
    used += most[i];
    if (full || most[i] == 0) break;
  }
  return used;
}

}  // namespace

std::span<const ChunkPolicy> chunk_policies() { return kChunkPolicies; }

const ChunkPolicy* find_chunk_policy(std::string_view name) { return find_row(kChunkPolicies, name); }

int chunk_minimum(int budget, int block_tokens) {
  return (budget / 4 + block_tokens - 1) / block_tokens * block_tokens;
}

void choose_chunks(const ChunkPolicy& policy, const ChunkView& view, const ChunkState& state, ChunkChoice& choice) {
  ChunkView seen = view;
  seen.minimum = least_piece(view);
  int wave_tokens = 0;
  choice.state = policy.decide(seen, state, wave_tokens);
  choice.most.assign(view.prompts.size(), 0);
  const int used = fill(seen, wave_tokens, choice.most);
  choice.step_tokens = std::clamp(view.decodes + std::max(wave_tokens, used), 1, view.budget);
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

}  // namespace xpyd::batch
