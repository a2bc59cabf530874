#include "batch/policies/policy.h"

#include <algorithm>

#include "base/table.h"
#include "batch/policies/admission.h"

namespace xpyd::batch {
namespace {

// What a plan has used so far. Admission comes last and keeps its own count.
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

  // Schedules the next n tokens of running[i] and preempts from the back while blocks are missing. If that is not
  // enough, running[i] itself is preempted.
  void run(int i, int n) {
    int need = new_blocks(view.running[size_t(i)], n, view.block_tokens);
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

 private:
  void preempt(int i) {
    const SequenceView& s = view.running[size_t(i)];
    preempted_[size_t(i)] = true;
    plan.preempts.push_back(i);
    sequences -= s.choices;
    blocks += s.n_blocks;
    std::erase_if(plan.runs,
                  [&](const ScheduledRun& run) {  // already scheduled in this plan: undo it
                    if (run.index != i) return false;
                    blocks += new_blocks(s, run.n_tokens, view.block_tokens);
                    tokens += run.n_tokens;
                    return true;
                  });
  }

  std::vector<bool> preempted_;
};

enum class Prompts { whole, pieces };

// Admits waiting sequences in order while the step has places and tokens and the rule finds memory.
void admit(Room& room, const AdmissionRule* own, Prompts prompts = Prompts::pieces) {
  const BatchView& view = room.view;
  if (!room.plan.preempts.empty() || view.waiting.empty()) return;
  std::vector<Scheduled> running, candidates;
  for (const SequenceView& s : view.running) running.push_back({&s, 0});
  for (const ScheduledRun& run : room.plan.runs) running[size_t(run.index)].n_tokens = run.n_tokens;
  int tokens = room.tokens, sequences = room.sequences;
  for (const SequenceView& s : view.waiting) {
    sequences += s.choices;
    if (tokens <= 0 || sequences > view.max_batch) break;
    if (s.most() <= 0) break;  // not in this step, and no later sequence overtakes it
    // A prompt longer than any step is computed in pieces under every policy.
    const bool cut = s.most() > tokens;
    if (prompts == Prompts::whole && cut && s.pending() <= view.step_tokens - view.max_batch) break;
    candidates.push_back({&s, std::min(s.most(), tokens)});
    tokens -= candidates.back().n_tokens;
  }
  const AdmissionRule& rule = view.admission ? *view.admission : *own;
  const int admitted = rule.admits({.running = running,
                                    .candidates = candidates,
                                    .available_blocks = view.available_blocks,
                                    .capacity_blocks = view.capacity_blocks,
                                    .block_tokens = view.block_tokens,
                                    .step_tokens = view.step_tokens});
  for (int i = 0; i < admitted; ++i) room.plan.admits.push_back({i, candidates[size_t(i)].n_tokens});
}

void run_decodes(Room& room) {
  for (int i = 0; i < int(room.view.running.size()); ++i) {
    const SequenceView& s = room.view.running[size_t(i)];
    if (!room.preempted(i) && s.pending() == 1 && s.most() > 0) room.run(i, 1);
  }
}

void run_prefills(Room& room) {
  for (int i = 0; i < int(room.view.running.size()) && room.tokens > 0; ++i) {
    const SequenceView& s = room.view.running[size_t(i)];
    if (!room.preempted(i) && s.pending() > 1 && s.most() > 0) room.run(i, std::min(s.most(), room.tokens));
  }
}

constexpr const char* kPrompt = "prompt";
constexpr const char* kLongest = "longest";

// A batch accepts sequences until one of them has decoded. It then runs until its last sequence has ended.
void plan_static(const BatchView& view, BatchPlan& plan) {
  Room room(view, plan);
  const bool forms = std::all_of(view.running.begin(), view.running.end(),
                                 [](const SequenceView& s) { return s.n_output <= 1; });
  run_prefills(room);
  if (forms) admit(room, find_admission_rule(kLongest));
  if (plan.empty()) run_decodes(room);
}

// Prompts run first and alone. Sequences decode when no prompt can run.
void plan_prefill_first(const BatchView& view, BatchPlan& plan) {
  Room room(view, plan);
  run_prefills(room);
  admit(room, find_admission_rule(kPrompt));
  if (plan.empty()) run_decodes(room);
}

void plan_mixed(const BatchView& view, BatchPlan& plan, Prompts prompts) {
  Room room(view, plan);
  run_decodes(room);
  run_prefills(room);
  admit(room, find_admission_rule(kPrompt), prompts);
  std::sort(plan.runs.begin(), plan.runs.end(),
            [](const ScheduledRun& a, const ScheduledRun& b) { return a.index < b.index; });
}

// Every running sequence decodes. The remaining tokens of the step go to prompts, in pieces.
void plan_chunked(const BatchView& view, BatchPlan& plan) { plan_mixed(view, plan, Prompts::pieces); }

// Every running sequence decodes. Whole prompts join the step in which they fit.
void plan_persistent(const BatchView& view, BatchPlan& plan) { plan_mixed(view, plan, Prompts::whole); }

constexpr BatchPolicy kPolicies[] = {
    {"chunked", plan_chunked, kPrompt, true, "Sarathi-Serve (OSDI '24) section 4.2; vLLM V1's scheduler"},
    {"persistent", plan_persistent, kPrompt, false,
     "TurboMind's persistent batch: sequences join and leave at any step"},
    {"prefill_first", plan_prefill_first, kPrompt, false,
     "vLLM V0's scheduler; Orca (OSDI '22) iteration-level batching"},
    {"static", plan_static, kLongest, false, "request-level batching, the baseline of Orca (OSDI '22) section 3"},
};

}  // namespace

std::span<const BatchPolicy> batch_policies() { return kPolicies; }

const BatchPolicy* find_batch_policy(std::string_view name) { return find_row(kPolicies, name); }

}  // namespace xpyd::batch
