#include "batch/policy.h"

#include <algorithm>

namespace xpyd {
namespace {

int blocks_for(const BatchView& view, int tokens) {
  return (tokens + view.block_tokens - 1) / view.block_tokens;
}

// Blocks that a running sequence must get before it computes its next `n` tokens.
int new_blocks(const BatchView& view, const SequenceView& s, int n) {
  return std::max(0, blocks_for(view, s.n_computed + n) - s.n_blocks) + (s.tail_shared ? 1 : 0);
}

// What a plan has spent so far.
class Room {
 public:
  Room(const BatchView& v, BatchPlan& p)
      : view(v), plan(p), blocks(v.available_blocks), tokens(v.step_tokens), preempted_(v.running.size()) {
    for (const SequenceView& s : v.running) sequences += s.choices;
  }

  const BatchView& view;
  BatchPlan& plan;
  int blocks;
  int tokens;
  int sequences = 0;

  // Schedules the next tokens of running[i], preempting from the back while blocks are missing. When that
  // does not help, running[i] itself is preempted.
  void run(int i, int n) {
    int need = new_blocks(view, view.running[size_t(i)], n);
    for (int victim = int(view.running.size()) - 1; need > blocks; --victim) {
      while (preempted(victim)) --victim;
      preempt(victim);
      if (victim == i) return;
    }
    blocks -= need;
    tokens -= n;
    plan.runs.push_back({i, n});
  }

  bool preempted(int i) const { return preempted_[size_t(i)]; }

  // Blocks that the prompts already started will still ask for.
  int promised() const {
    int sum = 0;
    for (int i = 0; i < int(view.running.size()); ++i) {
      const SequenceView& s = view.running[size_t(i)];
      if (!preempted(i) && s.pending() > 1) sum += new_blocks(view, s, s.pending());
    }
    for (const ScheduledRun& run : plan.runs) {
      const SequenceView& s = view.running[size_t(run.index)];
      if (s.pending() > 1) sum -= new_blocks(view, s, run.n_tokens);
    }
    return sum;
  }

 private:
  void preempt(int i) {
    const SequenceView& s = view.running[size_t(i)];
    preempted_[size_t(i)] = true;
    plan.preempts.push_back(i);
    sequences -= s.choices;
    blocks += s.n_blocks;
    std::erase_if(plan.runs, [&](const ScheduledRun& run) {  // scheduled a moment ago, by a younger claim
      if (run.index != i) return false;
      blocks += new_blocks(view, s, run.n_tokens);
      tokens += run.n_tokens;
      return true;
    });
  }

  std::vector<bool> preempted_;
};

// Admits waiting sequences in order while a place, tokens and blocks for `reach(s)` tokens are there, keeping
// 1 % of the blocks (vLLM's watermark) so that the first decode steps do not preempt at once.
template <class Reach>
void admit(Room& room, Reach reach) {
  if (!room.plan.preempts.empty()) return;
  const BatchView& view = room.view;
  int promised = room.promised();
  int watermark = view.capacity_blocks / 100;
  for (size_t i = 0; i < view.waiting.size(); ++i) {
    const SequenceView& s = view.waiting[i];
    if (room.tokens <= 0 || room.sequences + s.choices > view.max_batch) return;
    int here = std::max(s.n_blocks, s.n_computed / view.block_tokens);
    int wanted = std::max(blocks_for(view, s.n_tokens),
                          std::min(blocks_for(view, reach(s)), view.capacity_blocks));
    int need = std::max(0, wanted - here);
    int spare = room.sequences == 0 ? 0 : watermark;
    if (need + promised + spare > room.blocks) return;
    int n = std::min(s.pending(), room.tokens);
    room.plan.admits.push_back({int(i), n});
    room.blocks -= need;
    room.tokens -= n;
    room.sequences += s.choices;
  }
}

int whole_prompt(const SequenceView& s) { return s.n_tokens; }

void run_decodes(Room& room) {
  for (int i = 0; i < int(room.view.running.size()); ++i) {
    if (!room.preempted(i) && room.view.running[size_t(i)].pending() == 1) room.run(i, 1);
  }
}

void run_prefills(Room& room) {
  for (int i = 0; i < int(room.view.running.size()) && room.tokens > 0; ++i) {
    int pending = room.view.running[size_t(i)].pending();
    if (!room.preempted(i) && pending > 1) room.run(i, std::min(pending, room.tokens));
  }
}

bool prefilling(const BatchView& view) {
  return std::any_of(view.running.begin(), view.running.end(),
                     [](const SequenceView& s) { return s.pending() > 1; });
}

// A batch starts when the one before has ended, and holds memory for everyone's longest output.
void plan_static(const BatchView& view, BatchPlan& plan) {
  Room room(view, plan);
  if (view.running.empty()) {
    admit(room, [](const SequenceView& s) { return s.n_limit; });
  } else if (prefilling(view)) {
    run_prefills(room);
  } else {
    run_decodes(room);
  }
}

// Prompts go first, alone; decodes run when no prompt can.
void plan_prefill_first(const BatchView& view, BatchPlan& plan) {
  Room room(view, plan);
  run_prefills(room);
  admit(room, whole_prompt);
  if (plan.runs.empty() && plan.admits.empty() && plan.preempts.empty()) run_decodes(room);
}

// Every running sequence decodes; what is left of the step's tokens goes to prompts, in pieces.
void plan_chunked(const BatchView& view, BatchPlan& plan) {
  Room room(view, plan);
  run_decodes(room);
  run_prefills(room);
  admit(room, whole_prompt);
  std::sort(plan.runs.begin(), plan.runs.end(),
            [](const ScheduledRun& a, const ScheduledRun& b) { return a.index < b.index; });
}

constexpr BatchPolicy kPolicies[] = {
    {"chunked", plan_chunked, "Sarathi-Serve (OSDI '24) section 4.2; vLLM V1's scheduler"},
    {"prefill_first", plan_prefill_first, "vLLM V0's scheduler; Orca (OSDI '22) iteration-level batching"},
    {"static", plan_static, "request-level batching, the baseline of Orca (OSDI '22) section 3"},
};

}  // namespace

std::span<const BatchPolicy> batch_policies() { return kPolicies; }

const BatchPolicy* find_batch_policy(std::string_view name) {
  for (const BatchPolicy& policy : kPolicies) {
    if (name == policy.name) return &policy;
  }
  return nullptr;
}

}  // namespace xpyd
