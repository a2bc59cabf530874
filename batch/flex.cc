// Batch jobs in spare memory (Mooncake's author's notes): flex sequences run in the memory and the step tokens that no
// other sequence wants, and yield their blocks when one does.
//
// A policy is asked twice. First for all others, as if what flex sequences hold were free: if the plan needs more than
// is free, flex sequences give their blocks up, in the same plan; the last ones first, those that wait before those
// that run. Then for the flex sequences, with what is left: places in the batch, blocks, and of a step in which others
// take part flex_tokens at most, as each token more makes the others' gaps longer. None of them starts while another
// request waits. What yields is computed again, or found in the prefix cache, so its text is the same.
//
// Layered prefill is planned as one: its groups of layers share the rows in which prompts are kept. There, flex
// sequences are only the last to start.
#include <algorithm>

#include "batch/admission.h"
#include "batch/policy.h"

namespace xpyd::batch {
namespace {

// The flex sequences of a view, or all others, and where they stand in it.
struct Part {
  Part(const BatchView& view, bool flex) {
    const auto pick = [flex](std::span<const SequenceView> all, std::vector<SequenceView>& of, std::vector<int>& at) {
      for (int i = 0; i < int(all.size()); ++i)
        if (all[size_t(i)].flex == flex) of.push_back(all[size_t(i)]), at.push_back(i);
    };
    pick(view.running, running, running_at);
    pick(view.waiting, waiting, waiting_at);
  }

  void plan(const BatchPolicy& policy, BatchView view) {
    view.running = running, view.waiting = waiting;
    policy.plan(view, planned);
  }
  void add_to(BatchPlan& plan) const {
    for (ScheduledRun run : planned.runs) run.index = running_at[size_t(run.index)], plan.runs.push_back(run);
    for (ScheduledRun run : planned.admits) run.index = waiting_at[size_t(run.index)], plan.admits.push_back(run);
    for (int i : planned.preempts) plan.preempts.push_back(running_at[size_t(i)]);
  }
  int held_blocks() const {
    int blocks = 0;
    for (const auto* of : {&running, &waiting})
      for (const SequenceView& s : *of) blocks += s.n_blocks;
    return blocks;
  }

  std::vector<SequenceView> running, waiting;
  std::vector<int> running_at, waiting_at;
  BatchPlan planned;
};

// What a plan of this part takes: prefix hits leave what is available, too.
struct Taken {
  Taken(const Part& part, int block_tokens) {
    for (const SequenceView& s : part.running) sequences += s.choices;
    for (int i : part.planned.preempts)
      blocks -= part.running[size_t(i)].n_blocks, sequences -= part.running[size_t(i)].choices;
    for (const ScheduledRun& run : part.planned.runs)
      blocks += new_blocks(part.running[size_t(run.index)], run.n_tokens, block_tokens), tokens += run.n_tokens;
    for (const ScheduledRun& run : part.planned.admits) {
      const SequenceView& s = part.waiting[size_t(run.index)];
      blocks += new_blocks(s, run.n_tokens, block_tokens), tokens += run.n_tokens, sequences += s.choices;
    }
  }
  int blocks = 0, tokens = 0, sequences = 0;
};

bool is_flex(const SequenceView& s) { return s.flex; }

}  // namespace

void plan_batch(const BatchPolicy& policy, const BatchView& view, BatchPlan& plan) {
  if (policy.layered || (std::ranges::none_of(view.running, is_flex) && std::ranges::none_of(view.waiting, is_flex)))
    return policy.plan(view, plan);
  Part others(view, false), flex(view, true);
  BatchView all = view;
  all.available_blocks += flex.held_blocks();
  others.plan(policy, all);
  others.add_to(plan);
  const Taken taken(others, view.block_tokens);

  int left = view.available_blocks - taken.blocks;
  for (; left < 0 && !flex.waiting.empty(); flex.waiting.pop_back(), flex.waiting_at.pop_back()) {
    if (flex.waiting.back().n_blocks > 0) plan.yields.push_back(flex.waiting_at.back());
    left += flex.waiting.back().n_blocks;
  }
  for (; left < 0 && !flex.running.empty(); flex.running.pop_back(), flex.running_at.pop_back()) {
    plan.preempts.push_back(flex.running_at.back());
    left += flex.running.back().n_blocks;
  }

  const bool beside = !others.running.empty() || !others.planned.admits.empty();
  BatchView rest = view;
  rest.available_blocks = std::max(0, left);
  rest.max_batch = view.max_batch - taken.sequences;
  rest.step_tokens = view.step_tokens - taken.tokens;
  if (beside) rest.step_tokens = std::min(rest.step_tokens, view.flex_tokens);
  // Policies let all decode who run: of these, only as many run here as there are places and tokens for.
  int places = rest.max_batch, tokens = rest.step_tokens;
  const auto fits = [&](const SequenceView& s) {
    return (places -= s.choices) >= 0 && (s.pending() > 1 || --tokens >= 0);
  };
  const auto out = std::ranges::find_if_not(flex.running, fits);
  const bool all_run = out == flex.running.end();
  flex.running.erase(out, flex.running.end());
  if (!all_run || !plan.preempts.empty() || !plan.yields.empty() ||
      others.planned.admits.size() < others.waiting.size())
    flex.waiting.clear();
  if (rest.step_tokens > 0 && rest.max_batch > 0) {
    flex.plan(policy, rest);
    flex.add_to(plan);
  }
  std::ranges::sort(plan.runs, {}, &ScheduledRun::index);
  std::ranges::sort(plan.admits, {}, &ScheduledRun::index);
}

}  // namespace xpyd::batch
