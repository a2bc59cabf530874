// Admission rules: the queue says whose turn it is, a rule says whether there is memory for him, now and later. Pure
// functions over a snapshot, for every batching policy and KV memory.
#pragma once

#include <span>
#include <string_view>

#include "batch/policies/policy.h"

namespace xpyd::batch {

struct Scheduled {
  const SequenceView* sequence = nullptr;
  int n_tokens = 0;  // of this step
};

struct AdmissionView {
  std::span<const Scheduled> running;     // all that go on, oldest first; 0 tokens: not in this step
  std::span<const Scheduled> candidates;  // waiting ones, in order, for whom the step has room
  int available_blocks = 0;               // before this step's appends
  int capacity_blocks = 0;
  int block_tokens = 0;
  int step_tokens = 0;
  bool prompts_alone = false;  // nobody decodes while a prompt is being computed
};

struct AdmissionRule {
  const char* name;
  int (*admits)(const AdmissionView& view);  // how many of the candidates may start, the first ones
  bool looks_ahead;                          // reads SequenceView::n_shared_blocks
  const char* source;
};

std::span<const AdmissionRule> admission_rules();
const AdmissionRule* find_admission_rule(std::string_view name);  // null: no such rule

// Blocks that `s` must get before it computes its next n tokens, n > 0.
int blocks_for(int tokens, int block_tokens);
int new_blocks(const SequenceView& s, int n, int block_tokens);

}  // namespace xpyd::batch
