// Steps that are alike, at once: a simulation, whose model knows beforehand what a step takes, plays what lies between
// two events in closed form. What is planned, by whom, and what becomes of it stays the policy's and the memory's.
#include <algorithm>

#include "base/status.h"
#include "batch/engine.h"

namespace xpyd::batch {
namespace {

bool decodes(const SequenceView& view) { return view.n_output > 0 && view.pending() == 1; }

}  // namespace

StepShape StepRun::shape(int step) const {
  StepShape s = first;
  s.prefix += step * s.tokens;
  s.attended += 2 * step * squares;
  s.decode_context += step * s.decodes;
  return s;
}

// The policy is asked for the first of them and the last: what it gives nobody in between would have been given.
StepRun Engine::alike(int most) {
  StepRun run;
  if (under_way_.begun || loading_ > 0) return run;
  make_plan();
  if (plan_.runs.empty() || !plan_.admits.empty() || !plan_.preempts.empty()) return run;
  for (const ScheduledRun& r : plan_.runs) {
    const Sequence& s = *running_[size_t(runnable_[size_t(r.index)])];
    const SequenceView& view = running_views_[size_t(r.index)];
    const Request& request = *s.request;
    const bool plain = !s.leaves && s.stands_for == 1 && request.ignore_eos && request.stop.empty() &&
                       request.stop_token_ids.empty() && !s.wants_prompt_logprobs() && request.deadline_s == 0;
    if (!plain) return run;
    if (decodes(view)) {
      most = std::min(most, request.max_tokens - s.n_output() - 1);
      run.first.add_decodes(1, view.n_computed + 1);
    } else {
      most = std::min(most, (view.pending() - 1) / r.n_tokens);
      run.first.add_prompt(r.n_tokens, view.n_computed);
      run.squares += double(r.n_tokens) * r.n_tokens;
    }
  }
  while (most > 0 && !planned_alike(most)) most /= 2;
  run.steps = std::max(0, most);
  return run;
}

bool Engine::planned_alike(int steps) {
  const KvStats kv = memory_.stats();
  later_views_ = running_views_;
  int more_blocks = 0, last_blocks = 0;
  for (const ScheduledRun& r : plan_.runs) {
    SequenceView& view = later_views_[size_t(r.index)];
    const auto blocks = [&](int n) {
      return std::max(0, (view.n_computed + n * r.n_tokens + kv.block_tokens - 1) / kv.block_tokens - view.n_blocks);
    };
    last_blocks += blocks(steps);
    const int more = blocks(steps - 1);
    if (decodes(view)) view.n_tokens += steps - 1, view.n_output += steps - 1;
    view.n_computed += (steps - 1) * r.n_tokens;
    view.n_blocks += more;
    more_blocks += more;
  }
  if (last_blocks > kv.available()) return false;
  const BatchView view{.running = later_views_,
                       .waiting = waiting_views_,
                       .available_blocks = kv.available() - more_blocks,
                       .capacity_blocks = kv.capacity,
                       .block_tokens = kv.block_tokens,
                       .max_batch = options_.max_batch,
                       .step_tokens = options_.step_tokens,
                       .admission = admission_};
  later_plan_.clear();
  options_.policy->plan(view, later_plan_);
  return later_plan_.runs == plan_.runs && later_plan_.admits.empty() && later_plan_.preempts.empty();
}

int Engine::blocks_taken(int steps) const {
  const int block_tokens = memory_.stats().block_tokens;
  int taken = 0;
  for (const ScheduledRun& r : plan_.runs) {
    const SequenceView& view = running_views_[size_t(r.index)];
    const int end = (view.n_computed + steps * r.n_tokens + block_tokens - 1) / block_tokens;
    taken += std::max(0, end - view.n_blocks);
  }
  return taken;
}

void Engine::repeat(const StepRun& run, double began_s, std::span<const double> ends_s) {
  const auto steps = int(ends_s.size());
  XPYD_CHECK(steps <= run.steps);
  for (const ScheduledRun& r : plan_.runs) {
    Sequence& s = *running_[size_t(runnable_[size_t(r.index)])];
    const int first = s.computed, n = steps * r.n_tokens;
    const bool decoding = decodes(running_views_[size_t(r.index)]);
    if (decoding) s.tokens.resize(s.tokens.size() + size_t(steps), s.tokens.back());
    XPYD_CHECK(append(s, n));
    s.computed += n;
    memory_.written(s.kv, std::span(s.tokens).subspan(size_t(first), size_t(n)));
    if (!decoding) continue;
    stats_.generated_tokens += steps;
    s.sink->on_run(event_of(s, s.choice, ends_s.back()), std::span(s.tokens).last(size_t(steps)), ends_s);
  }
  stats_.steps += steps;
  stats_.step_seconds += ends_s.back() - began_s;
  for (int j = 0; j < steps; ++j) stats_.work.add(run.shape(j));
}

}  // namespace xpyd::batch
