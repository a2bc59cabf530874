// Budgets that follow what waits: maximum pipeline utilisation (WavePP), and dynamic chunked prefill (Revisiting
// Pipeline Parallelism), greedy and predictive.
#include <algorithm>
#include <cmath>

#include "batch/chunk_policy.h"

namespace xpyd::batch {
namespace {

// ---- mpu

struct Backlog {
  double tokens = 0;  // W: of prompts that wait, and of chunks that are still in the ring
  std::vector<int> pieces;

  // N: pieces of which no two go into one wave.
  double larger(double than) const {
    return double(std::count_if(pieces.begin(), pieces.end(), [&](int n) { return n > than; }));
  }
  double waves(int budget) const { return std::max(tokens / budget, larger(budget / 2.0)); }
};

int level_budget(const ChunkView& view, int level) {
  if (level == 0) return view.budget;
  const int halved = int(unsigned(view.budget) >> unsigned(std::min(level, 30)));
  return std::max({view.minimum, halved / view.block_tokens * view.block_tokens, 1});
}

// The largest budget that still fills the ring; but where a larger one feeds every stage already, no more than an
// eighth of the tokens is cut anew for it.
int wanted_level(const ChunkView& view, const Backlog& backlog) {
  constexpr double kNewlySplit = 0.125;
  const int ring = 2 * view.stages, fill = view.stages <= 4 ? 2 : 1;
  const int waves = ring + (fill - 1) * view.stages;
  int level = 0;
  for (int budget = view.budget; backlog.waves(budget) < waves; ++level) {
    const int next = level_budget(view, level + 1);
    if (next >= budget) break;  // b_min
    double split = 0;
    for (const ChunkPrompt& p : view.prompts)
      if (p.left > next && p.left <= budget) split += p.left;
    if (backlog.waves(budget) >= view.stages && split > kNewlySplit * backlog.tokens) break;
    budget = next;
  }
  return level;
}

// ---- dcp

constexpr int kCandidates[] = {128, 256, 512, 1024, 2048};

// Those that the step's budget allows, the smallest first, each with an eighth at least for prompts, beside the
// decodes; at least one.
std::vector<int> candidates(const ChunkView& view) {
  std::vector<int> all;
  for (int tokens : kCandidates)
    if (tokens - view.decodes >= tokens / 8 && tokens <= view.budget) all.push_back(tokens);
  if (all.empty()) all.push_back(view.budget);
  return all;
}

// `choose` is asked in every P-th decision: a change takes P steps to arrive at the last stage. Sooner where those who
// decode have become so many that they fill the chunk.
template <class Choose>
ChunkState every_p(const ChunkView& view, ChunkState state, ChunkWave& wave, Choose&& choose) {
  const std::vector<int> all = candidates(view);
  if (state.chunk < all.front() || state.since >= view.stages) state.chunk = choose(all), state.since = 0;
  ++state.since;
  wave.tokens = std::max(0, std::min(state.chunk, view.budget) - view.decodes);
  wave.least = std::min(view.minimum, wave.tokens / 2);  // 128 is a chunk, whatever the base
  return state;
}

}  // namespace

ChunkState decide_mpu(const ChunkView& view, ChunkState state, ChunkWave& wave) {
  Backlog backlog;
  for (const ChunkPrompt& p : view.prompts) backlog.pieces.push_back(p.left);
  backlog.pieces.insert(backlog.pieces.end(), view.in_flight.begin(), view.in_flight.end());
  for (int n : backlog.pieces) backlog.tokens += n;
  const int wanted = wanted_level(view, backlog), ring = 2 * view.stages;
  state.more_for = wanted < state.level ? state.more_for + 1 : 0;
  state.less_for = wanted > state.level ? state.less_for + 1 : 0;
  if (state.level < 0 || wanted <= state.level - 2) {  // at first, and for a big burst
    state.level = wanted, state.more_for = state.less_for = 0;
  } else if (state.more_for >= ring / 2) {
    --state.level, state.more_for = 0;
  } else if (state.less_for >= ring) {
    ++state.level, state.less_for = 0;
  }
  const int budget = level_budget(view, state.level);
  const ChunkPrompt& head = view.prompts[0];
  const bool alone = view.prompts.size() == 1 && 2 * head.left < budget;
  // For one decision, which the next mail may bring; where no wave is under way, nobody gains by waiting.
  state.waited = alone && !state.waited && !view.in_flight.empty();
  wave.tokens = state.waited ? 0 : budget;
  wave.least = std::max(view.minimum, budget / 2);
  return state;
}

ChunkState decide_dcp_greedy(const ChunkView& view, ChunkState state, ChunkWave& wave) {
  constexpr double kWatermark = 0.1;             // of KV
  constexpr double kLarge = 0.5, kSmall = 0.25;  // slack, of the objective
  constexpr double kLoose = 0.8;                 // gap, of the objective
  return every_p(view, state, wave, [&](const std::vector<int>& all) {
    if (view.kv_free < kWatermark) return all.front();
    if (state.chunk == 0) return all.back();
    const auto at = std::ranges::lower_bound(all, state.chunk);
    const auto now = at == all.end() ? all.end() - 1 : at;
    // Without an objective a prompt has no time to give, and a gap is never too long.
    const double slack = view.ttft_s > 0 ? view.slack_s / view.ttft_s : 0;
    const double gap = view.tbt_s > 0 && view.decodes > 0 ? view.gap_s / view.tbt_s : 0;
    if (gap > 1 || slack > kLarge) return now == all.begin() ? *now : *(now - 1);
    if (slack < kSmall && gap < kLoose) return now + 1 == all.end() ? *now : *(now + 1);
    return *now;
  });
}

ChunkState decide_dcp_predictive(const ChunkView& view, ChunkState state, ChunkWave& wave) {
  int waiting = 0;
  for (const ChunkPrompt& p : view.prompts) waiting = std::min(waiting + p.left, view.budget);
  const ChunkState next = every_p(view, state, wave, [&](const std::vector<int>& all) {
    int keeps = all.front();  // the largest that keeps the time between tokens
    for (int tokens : all) {
      const double s = wave_s(view, tokens - view.decodes);
      if (view.tbt_s > 0 && view.decodes > 0 && s * view.window > view.tbt_s) break;
      keeps = tokens;
      // Tokens in a second that prompts need: as they come, and as the first one's time is running out.
      double needed = view.arrival_tokens_s;
      if (view.ttft_s > 0) {
        const double in_s = view.slack_s - (view.stages - 1) * s;
        needed = in_s > 0 ? std::max(needed, view.prompts[0].left / in_s) : INFINITY;
      }
      if (std::min(waiting, tokens - view.decodes) / s >= needed) return tokens;
    }
    return keeps;  // overloaded
  });
  wave.extrapolates = extrapolates(view, view.prompts[0].done, std::min(wave.tokens, waiting));
  return next;
}

}  // namespace xpyd::batch
