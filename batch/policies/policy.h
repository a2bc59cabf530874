// Batching policies: pure functions from a snapshot of one instance to what it runs in the next step. No clock, no
// randomness, no I/O; the live engine and a simulation call the same function.
#pragma once

#include <span>
#include <string_view>
#include <vector>

namespace xpyd::batch {

// One sequence as a policy sees it.
struct SequenceView {
  int n_tokens = 0;    // known: prompt and output so far
  int n_computed = 0;  // tokens whose KV is in place or under way; for a waiting one, those a prefix hit would give
  int n_limit = 0;     // tokens at its longest, of one choice: prompt + max_tokens, as far as they come here
  int n_blocks = 0;    // blocks held, or set aside for it (KvMemory::escrow); a waiting one holds some when its KV came
                       // from another instance
  int choices = 1;     // sequences that it counts for: until its first token it stands for all n choices
  bool tail_shared = false;  // the next append copies a block first
  int n_output = 0;          // of n_tokens, those that were generated
  int n_shared_blocks = 0;   // of n_blocks, those that a sequence with more output to come holds too
  int n_held = 0;            // of pending(), those that the next step must leave (chunk_policy.h, waves)
  int pending() const { return n_tokens - n_computed; }
  int most() const { return pending() - n_held; }  // tokens of it in the next step
};

struct AdmissionRule;  // batch/policies/admission.h

struct BatchView {
  std::span<const SequenceView> running;  // oldest first
  std::span<const SequenceView> waiting;  // in the order in which they should start
  int available_blocks = 0;               // free or evictable
  int capacity_blocks = 0;
  int block_tokens = 0;
  int max_batch = 0;                         // sequences running at once
  int step_tokens = 0;                       // tokens of one step; decodes of all running sequences fit in any case
  const AdmissionRule* admission = nullptr;  // null: the policy's own
};

struct ScheduledRun {
  int index = 0;     // into running (or waiting)
  int n_tokens = 0;  // the next n tokens of it, 1 <= n <= most
  bool operator==(const ScheduledRun&) const = default;
};

struct BatchPlan {
  std::vector<ScheduledRun> runs;    // of running, ascending, none of them preempted
  std::vector<ScheduledRun> admits;  // of waiting, ascending
  std::vector<int> preempts;         // of running: their blocks are freed and they wait again
  bool empty() const { return runs.empty() && admits.empty() && preempts.empty(); }
  void clear() {
    runs.clear();
    admits.clear();
    preempts.clear();
  }
};

struct BatchPolicy {
  const char* name;
  void (*plan)(const BatchView& view, BatchPlan& plan);
  const char* admission;  // the rule that it has been published with
  bool chunks;            // step_tokens bound the gaps between tokens; else only memory
  bool keeps_rows;        // sequences keep their rows of the step's arrays
  const char* source;
};

std::span<const BatchPolicy> batch_policies();
const BatchPolicy* find_batch_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::batch
