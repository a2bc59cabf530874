// equal_time chooses waves of equal duration, because a pipeline of P stages pays for its slowest wave P times: sum t_i
// + (P - 1) max t_i.
//
// The waiting prompts are laid end to end. A wave is a stretch of them between two stops, the places where a chunk may
// end. Prefix sums over the stops give the seconds of any wave in constant time.
#include <algorithm>
#include <cmath>
#include <limits>

#include "batch/chunking/chunk_policy.h"

namespace xpyd::batch {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr size_t kStops = 2048;  // stops of one search; with more to compute they lie further apart, up to kCoarsest
constexpr double kFinest = 128, kCoarsest = 16;  // stops per longest piece of a prompt

struct Stop {
  int tokens = 0;       // before it
  int prompt = 0;       // the prompt that contains it or starts at it
  int offset = 0;       // tokens of that prompt before it
  double attended = 0;  // sum of 2 L x + x^2 before it
  double prefix = 0;    // sum of L over prompts that start before it
};

class Stretch {
 public:
  explicit Stretch(const ChunkView& view) : view_(view), empty_s_(empty_wave_s(view)), room_(prompt_room(view)) {
    double total = 0;
    for (const ChunkPrompt& p : view.prompts) total += p.left;
    const int block = view.block_tokens, least = std::max(1, view.minimum);
    const double fits = std::ceil(total / double(kStops) / block);  // blocks between two stops
    const int step = block * int(std::clamp(fits, std::max(1.0, std::floor(view.budget / kFinest / block)),
                                            std::max(1.0, std::floor(view.budget / kCoarsest / block))));
    Stop at;
    stops_.push_back(at);
    for (size_t i = 0; i < view.prompts.size() && stops_.size() < kStops; ++i) {
      const ChunkPrompt& p = view.prompts[i];
      const auto squares = [L = double(p.done)](double x) { return 2 * L * x + x * x; };
      const int first = (p.done + least + block - 1) / block * block, last = p.done + p.left - least;
      for (int end = first; end <= last && stops_.size() < kStops; end += step) {
        const int offset = end - p.done;
        stops_.push_back({at.tokens + offset, int(i), offset, at.attended + squares(offset), at.prefix + p.done});
      }
      if (stops_.size() == kStops) break;
      at = {at.tokens + p.left, int(i) + 1, 0, at.attended + squares(p.left), at.prefix + p.done};
      stops_.push_back(at);
    }
  }

  size_t end() const { return stops_.size() - 1; }

  double seconds(size_t from, size_t to) const {
    const Stop &i = stops_[from], &j = stops_[to];
    const double cut = i.offset > 0 ? view_.prompts[size_t(i.prompt)].done + i.offset : 0;
    return empty_s_ + view_.cost[1] * (j.tokens - i.tokens) + view_.cost[2] * (cut + j.prefix - i.prefix) +
           view_.cost[3] * (j.attended - i.attended);
  }

  // Calls f(to, seconds) for every wave that may start at `from`, shortest first, until f returns false. There is
  // always at least one: the shortest, even if it is too long.
  template <class F>
  void each_wave(size_t from, F&& f) const {
    const Stop& i = stops_[from];
    bool any = false;
    for (size_t to = from + 1; to < stops_.size(); ++to) {
      const Stop& j = stops_[to];
      const int last = j.offset > 0 ? j.prompt : j.prompt - 1;  // the prompt whose piece ends the wave
      const int piece = last == i.prompt ? j.tokens - i.tokens
                                         : (j.offset > 0 ? j.offset : view_.prompts[size_t(last)].left);
      if (any && (piece > view_.budget || j.tokens - i.tokens > room_)) return;
      if (j.offset > 0 && last == i.prompt && piece < view_.minimum) continue;
      any = true;
      if (!f(to, seconds(from, to))) return;
    }
    if (!any && from < end()) f(end(), seconds(from, end()));  // the stops end before the prompts do
  }

 private:
  const ChunkView& view_;
  const double empty_s_;
  const int room_;
  std::vector<Stop> stops_;
};

// Returns the pipeline's seconds if each wave takes all that fits in `most_s`.
double filled(const Stretch& stretch, int stages, double most_s) {
  double sum_s = 0, longest_s = 0;
  for (size_t at = 0; at < stretch.end();) {
    size_t next = at;
    double took = 0;
    stretch.each_wave(at, [&](size_t to, double s) {
      if (next != at && s > most_s) return false;
      next = to, took = s;
      return true;
    });
    sum_s += took, longest_s = std::max(longest_s, took);
    at = next;
  }
  return sum_s + (stages - 1) * longest_s;
}

// Tries each duration of the first wave, with equally long waves after it, and returns the best.
double best_wave_s(const Stretch& stretch, int stages) {
  double best_s = kInf, wave_s = 0;
  stretch.each_wave(0, [&](size_t, double s) {
    if (const double tried = filled(stretch, stages, s); tried < best_s) best_s = tried, wave_s = s;
    return true;
  });
  return wave_s;
}

}  // namespace

ChunkState decide_equal_time(const ChunkView& view, ChunkState state, int& wave_tokens) {
  if (prompt_room(view) == 0) return state;
  // The time is chosen once per prompt, when it becomes the first, so that its later waves do not change.
  if (state.wave_s == 0 || state.head != view.prompts[0].id)
    state = {.head = view.prompts[0].id, .wave_s = best_wave_s(Stretch(view), view.stages)};
  double left_s = state.wave_s * (1 + 1e-9) - empty_wave_s(view);  // rounding must not exclude a block
  for (const ChunkPrompt& p : view.prompts) {
    const bool first = wave_tokens == 0;
    int x = int(std::min({tokens_in(view.cost, p.done, left_s), double(p.left), double(view.budget)}));
    if (x < p.left) {  // neither this piece nor the rest is too small; the first prompt always gets a piece
      x = std::min(x, p.left - view.minimum);
      if (x < view.minimum) x = !first ? 0 : p.left < 2 * view.minimum ? p.left : view.minimum;
    }
    wave_tokens += std::max(x, first ? 1 : 0);
    if (x < p.left || wave_tokens >= prompt_room(view)) break;
    left_s -= view.cost[1] * x + view.cost[2] * p.done + view.cost[3] * (2.0 * p.done * x + double(x) * x);
  }
  return state;
}

}  // namespace xpyd::batch
