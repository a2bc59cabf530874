// equal_time and its oracle: waves of a pipeline that take equally long in every stage, because its slowest wave is
// paid for P times: sum t_i + (P - 1) max t_i.
//
// The prompts that wait stand one behind the other; a wave is a stretch of them, from one stop to another. In prefix
// sums over the stops any wave's seconds come in constant time.
#include <algorithm>
#include <cmath>
#include <limits>

#include "batch/chunk_policy.h"

namespace xpyd::batch {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr size_t kStops = 2048;  // of one search: further apart where there is more to compute, and no more
constexpr double kFinest = 128, kCoarsest = 16;  // … in a prompt's longest piece
constexpr size_t kWaveTimes = 128;               // that the oracle tries, besides equal_time's own

struct Stop {
  int tokens = 0;       // before it
  int prompt = 0;       // it lies in that one, or at its beginning
  int offset = 0;       // tokens of that one before it
  double attended = 0;  // sum of 2 L x + x^2 before it
  double prefix = 0;    // sum of L, of prompts that begin before it
};

class Stretch {
 public:
  explicit Stretch(const ChunkView& view) : view_(view), empty_s_(empty_wave_s(view)), room_(prompt_room(view)) {
    double total = 0;
    for (const ChunkPrompt& p : view.prompts) total += p.left;
    const int block = view.block_tokens, least = std::max(1, view.minimum);
    const double fits = std::ceil(total / double(kStops) / block);  // blocks from one to the next
    const int step = block * int(std::clamp(fits, std::max(1.0, std::floor(view.base / kFinest / block)),
                                            std::max(1.0, std::floor(view.base / kCoarsest / block))));
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
  int tokens(size_t stop) const { return stops_[stop].tokens; }

  double seconds(size_t from, size_t to) const {
    const Stop &i = stops_[from], &j = stops_[to];
    const double cut = i.offset > 0 ? view_.prompts[size_t(i.prompt)].done + i.offset : 0;
    return empty_s_ + view_.cost[1] * (j.tokens - i.tokens) + view_.cost[2] * (cut + j.prefix - i.prefix) +
           view_.cost[3] * (j.attended - i.attended);
  }

  // f(to, seconds) of every wave that may begin there, the shortest first, until it says false. One there is in any
  // case: the shortest, though it be too long.
  template <class F>
  void each_wave(size_t from, F&& f) const {
    const Stop& i = stops_[from];
    bool any = false;
    for (size_t to = from + 1; to < stops_.size(); ++to) {
      const Stop& j = stops_[to];
      const int last = j.offset > 0 ? j.prompt : j.prompt - 1;  // whose piece ends the wave
      const int piece = last == i.prompt ? j.tokens - i.tokens
                                         : (j.offset > 0 ? j.offset : view_.prompts[size_t(last)].left);
      if (any && (piece > view_.base || j.tokens - i.tokens > room_)) return;
      if (j.offset > 0 && last == i.prompt && piece < view_.minimum) continue;
      any = true;
      if (!f(to, seconds(from, to))) return;
    }
    if (!any && from < end()) f(end(), seconds(from, end()));  // where the stops end, not the prompts
  }

 private:
  const ChunkView& view_;
  const double empty_s_;
  const int room_;
  std::vector<Stop> stops_;
};

// What the pipeline takes when each wave takes all that fits in `most_s`; and its longest wave.
struct Makespan {
  double seconds = kInf, longest_s = 0;
};

Makespan filled(const Stretch& stretch, int stages, double most_s) {
  Makespan all{.seconds = 0};
  for (size_t at = 0; at < stretch.end();) {
    size_t next = at;
    double took = 0;
    stretch.each_wave(at, [&](size_t to, double s) {
      if (next != at && s > most_s) return false;
      next = to, took = s;
      return true;
    });
    all.seconds += took, all.longest_s = std::max(all.longest_s, took);
    at = next;
  }
  all.seconds += (stages - 1) * all.longest_s;
  return all;
}

struct Search {
  double wave_s = 0;
  Makespan best;
};

// By the first wave: those after it take as long.
Search best_equal_time(const Stretch& stretch, int stages) {
  Search search;
  stretch.each_wave(0, [&](size_t, double s) {
    const Makespan tried = filled(stretch, stages, s);
    if (tried.seconds < search.best.seconds) search = {s, tried};
    return true;
  });
  return search;
}

// Least sum of seconds from the beginning to the end in waves of at most `most_s`, and where the first one ends.
struct Schedule {
  double seconds = kInf;
  size_t first = 0;
};

Schedule best_schedule(const Stretch& stretch, double most_s) {
  std::vector<Schedule> from(stretch.end() + 1);
  from[stretch.end()] = {0, stretch.end()};
  for (size_t at = stretch.end(); at-- > 0;)
    stretch.each_wave(at, [&](size_t to, double s) {
      if (s > most_s) return false;
      if (s + from[to].seconds < from[at].seconds) from[at] = {s + from[to].seconds, to};
      return true;
    });
  return from[0];
}

double best_wave_s(const Stretch& stretch, int stages) {
  const Search equal = best_equal_time(stretch, stages);
  std::vector<double> tries;
  for (size_t at = 0; at < stretch.end(); ++at)
    stretch.each_wave(at, [&](size_t, double s) {
      tries.push_back(s);
      return true;
    });
  std::ranges::sort(tries);
  tries.erase(std::unique(tries.begin(), tries.end()), tries.end());
  if (tries.size() > kWaveTimes) {  // TeraPipe leaves out those that are nearly alike, too
    for (size_t i = 0; i < kWaveTimes; ++i) tries[i] = tries[(i + 1) * tries.size() / kWaveTimes - 1];
    tries.resize(kWaveTimes);
  }
  double best_s = kInf, wave_s = equal.best.longest_s;
  const auto attempt = [&](double most_s) {
    const double s = best_schedule(stretch, most_s).seconds + (stages - 1) * most_s;
    if (s < best_s) best_s = s, wave_s = most_s;
  };
  attempt(equal.best.longest_s);
  const double least_sum_s = best_schedule(stretch, kInf).seconds;
  for (double most_s : tries) {
    if (least_sum_s + (stages - 1) * most_s >= best_s) break;  // and longer ones only add to it
    attempt(most_s);
  }
  return wave_s;
}

int farthest(const ChunkView& view) {
  int end = 0;
  for (const ChunkPrompt& p : view.prompts) end = std::max(end, p.done + p.left);
  return end;
}

// Chosen once for a prompt, when its turn comes, so that what is left of it does not change its waves.
template <class Choose>
bool choose_wave(const ChunkView& view, ChunkState& state, Choose&& choose) {
  const uint64_t head = view.prompts[0].id;
  if (state.wave_s > 0 && state.head == head) return false;
  state.head = head;
  state.wave_s = choose(Stretch(view), view.stages);
  return true;
}

}  // namespace

ChunkState decide_equal_time(const ChunkView& view, ChunkState state, ChunkWave& wave) {
  if (prompt_room(view) == 0) return state;
  const bool searched = choose_wave(
      view, state, [](const Stretch& stretch, int stages) { return best_equal_time(stretch, stages).wave_s; });
  double left_s = state.wave_s * (1 + 1e-9) - empty_wave_s(view);  // rounding is no reason to leave a block out
  for (const ChunkPrompt& p : view.prompts) {
    const bool first = wave.tokens == 0;
    int x = int(std::min({tokens_in(view.cost, p.done, left_s), double(p.left), double(view.base)}));
    if (x < p.left) {  // neither this piece nor the rest is too small; who is first has one in any case
      x = std::min(x, p.left - view.minimum);
      if (x < view.minimum) x = !first ? 0 : p.left < 2 * view.minimum ? p.left : view.minimum;
    }
    wave.tokens += std::max(x, first ? 1 : 0);
    if (x < p.left || wave.tokens >= prompt_room(view)) break;
    left_s -= view.cost[1] * x + view.cost[2] * p.done + view.cost[3] * (2.0 * p.done * x + double(x) * x);
  }
  wave.extrapolates = extrapolates(view, searched ? farthest(view) : view.prompts[0].done, wave.tokens);
  return state;
}

ChunkState decide_dp_oracle(const ChunkView& view, ChunkState state, ChunkWave& wave) {
  if (prompt_room(view) == 0) return state;
  const bool searched = choose_wave(view, state, best_wave_s);
  const Stretch stretch(view);
  Schedule schedule = best_schedule(stretch, state.wave_s * (1 + 1e-9));
  if (schedule.seconds == kInf)  // somebody has come since whom such waves have no place for
    stretch.each_wave(0, [&](size_t to, double s) {
      if (schedule.first > 0 && s > state.wave_s) return false;
      schedule.first = to;
      return true;
    });
  wave.tokens = stretch.tokens(schedule.first);
  wave.extrapolates = extrapolates(view, searched ? farthest(view) : view.prompts[0].done, wave.tokens);
  return state;
}

}  // namespace xpyd::batch
