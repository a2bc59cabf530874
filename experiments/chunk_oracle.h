// The best way to cut one prompt into waves of a pipeline: dynamic programming finds the pieces with the least sum t +
// (P - 1) max t (TeraPipe, ICML '21, section 3.3). It has the interface of a chunk policy, and chunk policies are
// measured against it.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "batch/chunking/chunk_policy.h"

namespace xpyd::experiments {

// The first prompt of a view, alone. Its pieces end at multiples of the block and have at least `minimum` tokens.
class OnePrompt {
 public:
  explicit OnePrompt(const batch::ChunkView& view) : view_(view) {
    const batch::ChunkPrompt& p = view.prompts[0];
    const int block = view.block_tokens, least = std::max(1, view.minimum);
    for (int end = (p.done + least + block - 1) / block * block; end <= p.done + p.left - least; end += block)
      stops_.push_back(end - p.done);
    stops_.push_back(p.left);
  }

  struct Schedule {
    double sum_s = std::numeric_limits<double>::infinity(), longest_s = 0;
    int first = 0;  // tokens of the first wave
    double makespan(int stages) const { return sum_s + (stages - 1) * longest_s; }
  };

  // The schedule with the least sum of seconds in which no wave takes longer than most_s.
  Schedule best_of(double most_s) const {
    std::vector<Schedule> from(stops_.size());
    from.back().sum_s = 0;
    for (size_t at = stops_.size() - 1; at-- > 0;)
      each_wave(at, [&](size_t to, double s) {
        if (s > most_s) return false;
        if (s + from[to].sum_s < from[at].sum_s)
          from[at] = {s + from[to].sum_s, std::max(s, from[to].longest_s), stops_[to] - stops_[at]};
        return true;
      });
    return from[0];
  }

  // The longest wave of the schedule with the least makespan, within a ten-thousandth. Between two limits the sum is at
  // least that at the longer limit, so most limits need not be tried.
  double best_wave_s() const {
    std::vector<double> limits;
    for (size_t at = 0; at + 1 < stops_.size(); ++at)
      each_wave(at, [&](size_t, double s) { return limits.push_back(s), true; });
    std::ranges::sort(limits);
    limits.erase(std::unique(limits.begin(), limits.end()), limits.end());
    double best_s = std::numeric_limits<double>::infinity(), wave_s = limits.back();
    const auto attempt = [&](size_t at) {
      const Schedule schedule = best_of(limits[at]);
      if (const double s = schedule.makespan(view_.stages); s < best_s) best_s = s, wave_s = schedule.longest_s;
      return schedule.sum_s;
    };
    struct Between {
      size_t begin, end;  // limits not tried yet, except the one at `end`
      double sum_s;       // the sum at `end`
    };
    std::vector<Between> open = {{0, limits.size() - 1, attempt(limits.size() - 1)}};
    while (!open.empty()) {
      const auto [begin, end, sum_s] = open.back();
      open.pop_back();
      if (begin == end || sum_s + (view_.stages - 1) * limits[begin] >= best_s * (1 - 1e-4)) continue;
      const size_t middle = (begin + end) / 2;
      open.push_back({middle + 1, end, sum_s});
      open.push_back({begin, middle, attempt(middle)});
    }
    return wave_s;
  }

 private:
  // Calls f(to, seconds) for every wave that may begin at `from`, the shortest first, until f returns false. The
  // shortest wave is always offered, even if it is too long.
  template <class F>
  void each_wave(size_t from, F&& f) const {
    const int most = batch::prompt_room(view_);
    bool any = false;
    for (size_t to = from + 1; to < stops_.size(); ++to) {
      const int n = stops_[to] - stops_[from];
      if (any && n > most) return;
      if (n < view_.minimum && to + 1 < stops_.size()) continue;
      any = true;
      StepShape shape;
      shape.add_decodes(view_.decodes, view_.decode_context);
      shape.add_prompt(n, view_.prompts[0].done + stops_[from]);
      if (!f(to, seconds(view_.cost, shape))) return;
    }
  }

  const batch::ChunkView& view_;
  std::vector<int> stops_ = {0};  // tokens of the prompt before each stop
};

// The length of a wave is chosen once for a prompt, so the rest of the prompt is cut by the same limit.
inline batch::ChunkState decide_oracle(const batch::ChunkView& view, batch::ChunkState state, int& wave_tokens) {
  if (batch::prompt_room(view) == 0) return state;
  const OnePrompt prompt(view);
  if (state.wave_s == 0 || state.head != view.prompts[0].id)
    state = {.head = view.prompts[0].id, .wave_s = prompt.best_wave_s()};
  wave_tokens = prompt.best_of(state.wave_s * (1 + 1e-9)).first;
  return state;
}

inline constexpr batch::ChunkPolicy kChunkOracle = {"dp_oracle", decide_oracle, "TeraPipe (ICML '21) section 3.3"};

}  // namespace xpyd::experiments
