// Steps that are alike, at once: a simulation, whose model knows beforehand what a step takes, plays what lies between
// two events in closed form. What is planned, by whom, and what becomes of it stays the policy's and the memory's.
#include <algorithm>
#include <utility>

#include "base/status.h"
#include "batch/engine.h"

namespace xpyd::batch {
StepShape StepRun::shape(int step) const {
  StepShape s = first;
  s.decode_context += step * s.decodes;
  return s;
}

// The policy is asked for the first of them and the last: what it gives nobody in between would have been given.
StepRun Engine::alike(int most, bool evicts) {
  StepRun run;
  if (drafter_ || !under_way_.empty() || loading_ > 0 || memory_.copying()) return run;
  // Who has just come, or has lost its memory, is looked up in the next step.
  for (size_t i = 0, n = startable(); i < std::min(n, waiting_.size()); ++i)
    if (!waiting_[i]->probed) return run;
  make_plan();
  if (chunks_.decided) return run;  // prompts wait, and each step is decided anew
  if (plan_.runs.empty() || !plan_.keeps_batch()) return run;
  const int tier_block = memory_.tier_block_tokens();
  for (const ScheduledRun& r : plan_.runs) {
    const Sequence& s = *running_[size_t(runnable_[size_t(r.index)])];
    const Request& request = *s.request;
    if (s.n_output() == 0 || s.pending() != 1 || s.leaves || !request.ignore_eos || !request.stop.empty() ||
        !request.stop_token_ids.empty() || request.deadline_s > 0)
      return run;
    most = std::min(most, request.max_tokens - s.n_output() - 1);
    if (tier_block > 0) most = std::min(most, tier_block - 1 - s.computed % tier_block);  // a full one is copied
    run.first.add_decodes(1, s.computed + 1);
  }
  while (most > 0 && !planned_alike(most, evicts)) most /= 2;
  run.steps = std::max(0, most);
  return run;
}

bool Engine::planned_alike(int steps, bool evicts) {
  const KvStats kv = memory_.stats();
  if (blocks_taken(steps) > (evicts ? kv.available() : kv.free)) return false;
  const int before_last = blocks_taken(steps - 1);
  later_views_ = running_views_;
  for (const ScheduledRun& r : plan_.runs) {
    SequenceView& view = later_views_[size_t(r.index)];
    view.n_tokens += steps - 1, view.n_output += steps - 1, view.n_computed += steps - 1;
    view.n_blocks = std::max(view.n_blocks, (view.n_computed + kv.block_tokens - 1) / kv.block_tokens);
  }
  later_plan_.clear();
  options_.policy->plan(view_of(later_views_, kv.available() - before_last, kv, options_.step_tokens), later_plan_);
  return later_plan_.runs == plan_.runs && later_plan_.keeps_batch();
}

int Engine::blocks_taken(int steps) const {
  const int block_tokens = memory_.stats().block_tokens;
  int taken = 0;
  for (const ScheduledRun& r : plan_.runs) {
    const SequenceView& view = running_views_[size_t(r.index)];
    const int end = (view.n_computed + steps + block_tokens - 1) / block_tokens;
    taken += std::max(0, end - view.n_blocks);
  }
  return taken;
}

std::vector<int> Engine::blocks_by_step(int steps) const {
  const int block_tokens = memory_.stats().block_tokens;
  std::vector<int> taken(static_cast<size_t>(steps));
  for (const ScheduledRun& r : plan_.runs) {
    const SequenceView& view = running_views_[size_t(r.index)];
    const int room = std::max(view.n_blocks * block_tokens, view.n_computed) - view.n_computed;
    for (int step = room; step < steps; step += block_tokens) ++taken[size_t(step)];
  }
  return taken;
}

void Engine::repeat(const StepRun& run, double began_s, std::span<const double> ends_s) {
  const auto steps = int(ends_s.size());
  XPYD_CHECK(steps <= run.steps);
  charge(began_s);
  charge((began_s + ends_s.back()) / 2);  // half of the time with what is held before, half with what is held then
  for (const ScheduledRun& r : plan_.runs) {
    Sequence& s = *running_[size_t(runnable_[size_t(r.index)])];
    const auto first = size_t(s.computed), n = size_t(steps);
    s.tokens.resize(s.tokens.size() + n, s.tokens.back());
    XPYD_CHECK(append(s, steps));
    s.computed += steps;
    memory_.written(s.kv, std::span(s.tokens).subspan(first, n));
    s.sink->on_run(event_of(s, s.choice, ends_s.back()), std::span(s.tokens).last(n), ends_s);
  }
  charge(ends_s.back());
  stats_.generated_tokens += int64_t(steps) * int64_t(plan_.runs.size());
  stats_.steps += steps;
  for (double end_s : ends_s) stats_.step_seconds += end_s - std::exchange(began_s, end_s);
  StepShape work = run.first;  // counts: their sum is exact
  work.steps *= steps, work.tokens *= steps, work.decodes *= steps;
  work.decode_context = steps * run.first.decode_context + run.first.decodes * (double(steps) * (steps - 1) / 2);
  stats_.work.add(work);
}

}  // namespace xpyd::batch
