// Batching policies are pure functions from a snapshot of one instance to a plan of its next step. They use no clock,
// no randomness and no I/O. The live engine and the simulator call the same functions.
#pragma once

#include <span>
#include <string_view>
#include <vector>

namespace xpyd::batch {

// One sequence as a policy sees it.
struct SequenceView {
  int n_tokens = 0;          // prompt and output so far
  int n_computed = 0;        // tokens whose KV is in place or under way; if waiting, those that a prefix hit would give
  int n_limit = 0;           // most tokens of one choice: prompt + max_tokens, or as many as this instance computes
  int n_blocks = 0;          // blocks held or reserved; a waiting sequence holds some if its KV came from another
                             // instance or if it was admitted by reservation
  int choices = 1;           // sequences it counts for: before its first token it stands for all n choices
  bool tail_shared = false;  // the next append first copies a block
  int n_output = 0;          // generated tokens among n_tokens
  int n_held = 0;            // pending tokens that the next step must leave (chunk_policy.h, waves)
  int pending() const { return n_tokens - n_computed; }
  int most() const { return pending() - n_held; }  // most tokens of it in the next step
};

struct AdmissionRule;  // batch/policies/admission.h

struct BatchView {
  std::span<const SequenceView> running;  // oldest first
  std::span<const SequenceView> waiting;  // in the order in which they should start
  int available_blocks = 0;               // free or evictable
  int capacity_blocks = 0;
  int block_tokens = 0;
  int max_batch = 0;                         // sequences running at once
  int step_tokens = 0;                       // tokens of one step; all running sequences decode even beyond it
  const AdmissionRule* admission = nullptr;  // null: the policy's own
};

struct ScheduledRun {
  int index = 0;     // index into running (or waiting)
  int n_tokens = 0;  // its next tokens, 1 <= n_tokens <= most()
  bool operator==(const ScheduledRun&) const = default;
};

struct BatchPlan {
  std::vector<ScheduledRun> runs;    // indices of running, ascending, without preempted ones
  std::vector<ScheduledRun> admits;  // indices of waiting, ascending
  std::vector<int> preempts;         // indices of running: their blocks are freed and they wait again
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
  const char* admission;  // the rule with which it was published
  bool chunks;            // true: step_tokens is --chunk-tokens, which bounds TBT; false: --max-step-tokens, for memory
  const char* source;
};

std::span<const BatchPolicy> batch_policies();
const BatchPolicy* find_batch_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::batch
