#include "batch/policies/admission.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/table.h"

namespace xpyd::batch {

int blocks_for(int tokens, int block_tokens) { return (tokens + block_tokens - 1) / block_tokens; }

int new_blocks(const SequenceView& s, int n, int block_tokens) {
  return std::max(0, blocks_for(s.n_computed + n, block_tokens) - s.n_blocks) + (s.tail_shared ? 1 : 0);
}

namespace {

// Blocks of all choices of `s` with `tokens` each. The prompt's full blocks are shared.
int blocks_of_choices(const SequenceView& s, int tokens, int block_tokens) {
  if (s.choices == 1) return blocks_for(tokens, block_tokens);
  const int shared = s.n_tokens / block_tokens;
  return shared + s.choices * (blocks_for(tokens, block_tokens) - shared);
}

// The KV of the last output token is never written.
int kv_limit(const SequenceView& s) { return std::max(s.n_tokens, s.n_limit - 1); }

// Requires blocks for the prompts of running and starting sequences. 1 % of the pool stays free, so that the first
// decode steps do not preempt at once. Blocks of a prefix hit are not counted.
int admit_prompt(const AdmissionView& view) {
  int blocks = view.available_blocks;
  for (const auto& [s, n] : view.running) {
    const int next = s->pending() > 1 ? s->pending() : n;
    if (next > 0) blocks -= new_blocks(*s, next, view.block_tokens);
  }
  for (size_t i = 0; i < view.candidates.size(); ++i) {
    const SequenceView& s = *view.candidates[i].sequence;
    const int here = std::max(s.n_blocks, s.n_computed / view.block_tokens);
    const int need = std::max(0, blocks_for(s.n_tokens, view.block_tokens) - here);
    const bool alone = view.running.empty() && i == 0;
    if (need + (alone ? 0 : view.capacity_blocks / 100) > blocks) return int(i);
    blocks -= need;
  }
  return int(view.candidates.size());
}

// In a shared pool even a single sequence may find less than its longest output needs. It starts anyway, because no
// sequence here will end and make room for it.
int at_least_one(const AdmissionView& view, int admitted) {
  if (admitted > 0 || !view.running.empty() || view.candidates.empty()) return admitted;
  AdmissionView first = view;
  first.candidates = view.candidates.first(1);
  return admit_prompt(first);
}

// Requires blocks for the longest outputs of all sequences at once.
int admit_longest(const AdmissionView& view) {
  auto growth = [&](const SequenceView& s) {
    const int most = blocks_of_choices(s, kv_limit(s), view.block_tokens);
    return std::max(0, most - s.n_blocks) + (s.tail_shared ? 1 : 0);
  };
  int64_t blocks = view.available_blocks;
  for (const auto& [s, n] : view.running) blocks -= growth(*s);
  int admitted = 0;
  for (const auto& [s, n] : view.candidates) {
    if ((blocks -= growth(*s)) < 0) break;
    ++admitted;
  }
  return at_least_one(view, admitted);
}

// Requires that the peak of all sequences' blocks fits. A sequence grows by one token a step and then ends, so blocks
// peak at the end of one of them. A prompt that needs further steps is delayed by the prompts before it and its own
// rest. It counts as if it grew at once and ended late. A block that several sequences hold counts for each.
int admit_peak_tokens(const AdmissionView& view) {
  struct Future {
    const SequenceView* s;
    int64_t end;  // steps until all its blocks are free
  };
  std::vector<Future> futures;
  int64_t rest = 0, sequences = 0, held = 0;
  const auto add = [&](const Scheduled& one) {
    const SequenceView& s = *one.sequence;
    const int64_t later = s.pending() > 1 ? s.pending() - one.n_tokens : 0;
    rest += later, sequences += s.choices;
    const int64_t room = std::max<int64_t>(1, view.step_tokens - sequences);
    futures.push_back({&s, kv_limit(s) - s.n_tokens + (later > 0 ? (rest + room - 1) / room : 0)});
  };
  const auto blocks_at = [&](int64_t step) {  // with a spare token each, because prompts that run alone decode earlier
    int64_t sum = 0;
    for (const auto& [s, end] : futures) {
      if (end < step) continue;
      const int tokens = int(std::min<int64_t>(kv_limit(*s), s->n_tokens + step + 1));
      const bool copies = s->tail_shared || (s->choices > 1 && s->n_tokens % view.block_tokens != 0);
      sum += std::max(blocks_of_choices(*s, tokens, view.block_tokens), s->n_blocks) + int(copies);
    }
    return sum;
  };
  for (const Scheduled& one : view.running) {
    held += one.sequence->n_blocks;
    add(one);
  }
  held = std::min<int64_t>(held, view.capacity_blocks - view.available_blocks);
  int admitted = 0;
  for (const Scheduled& one : view.candidates) {
    add(one);
    held += one.sequence->n_blocks;
    const auto fits = [&](const Future& f) { return blocks_at(f.end) <= view.available_blocks + held; };
    if (!std::ranges::all_of(futures, fits)) break;
    ++admitted;
  }
  return at_least_one(view, admitted);
}

constexpr AdmissionRule kRules[] = {
    {"prompt", admit_prompt, "vLLM (SOSP '23) section 4.5: the prompt fits, 1 % stays free"},
    {"peak_tokens", admit_peak_tokens, "lightllm's Efficient Router: the predicted peak fits"},
    {"longest", admit_longest, "Orca (OSDI '22) section 4.2: max_tokens of all sequences are reserved"},
};

}  // namespace

std::span<const AdmissionRule> admission_rules() { return kRules; }

const AdmissionRule* find_admission_rule(std::string_view name) { return find_row(kRules, name); }

}  // namespace xpyd::batch
