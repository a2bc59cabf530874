// Admission rules. The queue decides whose turn it is; a rule decides whether memory suffices, now and later. Rules are
// pure functions of a snapshot and work with every batching policy and KV memory.
#pragma once

#include <span>
#include <string_view>

#include "batch/policies/policy.h"

namespace xpyd::batch {

struct Scheduled {
  const SequenceView* sequence = nullptr;
  int n_tokens = 0;  // tokens in this step
};

struct AdmissionView {
  std::span<const Scheduled> running;     // all that continue, oldest first; 0 tokens: not in this step
  std::span<const Scheduled> candidates;  // waiting ones that the step has room for, in order
  int available_blocks = 0;               // before this step's appends
  int capacity_blocks = 0;
  int block_tokens = 0;
  int step_tokens = 0;
};

struct AdmissionRule {
  const char* name;
  int (*admits)(const AdmissionView& view);  // returns how many candidates may start, from the first on
  const char* source;
};

std::span<const AdmissionRule> admission_rules();
const AdmissionRule* find_admission_rule(std::string_view name);  // null: no such rule

// blocks_for() rounds tokens up to blocks. new_blocks(): blocks that `s` needs before it computes its next n tokens, n
// > 0.
int blocks_for(int tokens, int block_tokens);
int new_blocks(const SequenceView& s, int n, int block_tokens);

}  // namespace xpyd::batch
