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

// The blocks that one sequence will hold after each coming step, if every sequence decodes in every step. Until its
// prompt is computed it holds what the prompt takes; then it grows by one token a step; after step `end` it holds
// nothing. If another step than this one completes the prompt, that step is only known to lie between two bounds. The
// sequence then grows from the earlier bound and ends after the later.
struct Future {
  const SequenceView* s;
  int64_t soonest;  // step that completes the prompt, counted from 1; 0: no sequence decodes before it
  int64_t end;      // step after which all its blocks are free

  int blocks(int64_t step, int block_tokens) const {
    const int grown = int(std::min<int64_t>(std::max<int64_t>(0, step - soonest), kv_limit(*s) - s->n_tokens));
    const bool waits = step < soonest && s->pending() == 1;  // while prompts are computed
    const int tokens = waits ? s->n_computed : s->n_tokens + grown;
    const int most = grown > 0 ? blocks_of_choices(*s, tokens, block_tokens) : blocks_for(tokens, block_tokens);
    // Each sequence that shares the block of its next token needs a copy, even the last of them.
    const bool copies = s->tail_shared ? !waits : s->choices > 1 && s->n_tokens % block_tokens != 0;
    return std::max(most, s->n_blocks) - s->n_shared_blocks + int(copies && (grown > 0 || s->tail_shared));
  }
};

// The futures of running and admitted sequences, and the blocks held at each step after which a sequence ends. A
// sequence never shrinks before its end, so usage peaks at the last step between two ends.
class Timeline {
 public:
  explicit Timeline(const AdmissionView& view) : view_(view), blocks_(view.available_blocks) {
    for (const Scheduled& one : view.running) {
      blocks_ += one.sequence->n_blocks - one.sequence->n_shared_blocks;
      futures_.push_back(future_of(one));
    }
    for (const Future& f : futures_) peaks_.push_back({f.end, held_at(f.end)});
  }

  // Adds a sequence. False: at some step memory would not suffice; nothing has changed.
  bool add(const Scheduled& one) {
    const int64_t rest_before = rest_, sequences_before = sequences_;
    const Future f = future_of(one);
    const int64_t blocks = blocks_ + one.sequence->n_blocks;
    auto held_of = [&](int64_t step) { return step <= f.end ? f.blocks(step, view_.block_tokens) : 0; };
    const int64_t at_end = held_at(f.end) + held_of(f.end);
    bool fits = at_end <= blocks;
    for (const auto& [step, held] : peaks_) fits = fits && held + held_of(step) <= blocks;
    if (!fits) {
      rest_ = rest_before;
      sequences_ = sequences_before;
      return false;
    }
    for (auto& [step, held] : peaks_) held += held_of(step);
    futures_.push_back(f);
    peaks_.push_back({f.end, at_end});
    blocks_ = blocks;
    return true;
  }

 private:
  struct Peak {
    int64_t step, held;
  };

  // Prompts are computed in order. A prompt is delayed only by those before it, and only sequences that run before it
  // completes take tokens of its steps.
  Future future_of(const Scheduled& one) {
    const SequenceView& s = *one.sequence;
    const int left = kv_limit(s) - s.n_tokens;
    sequences_ += s.choices;
    if (s.pending() == 1 && one.n_tokens == 0) return {&s, 1, 1 + left};  // it decodes when it may
    if (view_.prompts_alone) return {&s, 0, left};
    const int64_t rest = s.pending() - one.n_tokens;
    if (rest == 0) return {&s, 1, 1 + left};
    rest_ += rest;
    const int64_t step = view_.step_tokens, sure = step - sequences_;
    const int64_t latest = sure > 0 ? 1 + (rest_ + sure - 1) / sure : kNever;
    return {&s, 1 + (rest + step - 1) / step, latest + left};
  }

  int64_t held_at(int64_t step) const {
    int64_t sum = 0;
    for (const Future& f : futures_)
      if (f.end >= step) sum += f.blocks(step, view_.block_tokens);
    return sum;
  }

  static constexpr int64_t kNever = int64_t{1} << 40;
  const AdmissionView& view_;
  int64_t blocks_;  // blocks that all of them may hold together
  int64_t rest_ = 0, sequences_ = 0;
  std::vector<Future> futures_;
  std::vector<Peak> peaks_;
};

int admit_peak_tokens(const AdmissionView& view) {
  if (view.candidates.empty()) return 0;
  Timeline timeline(view);
  int admitted = 0;
  while (admitted < int(view.candidates.size()) && timeline.add(view.candidates[size_t(admitted)])) ++admitted;
  return at_least_one(view, admitted);
}

constexpr AdmissionRule kRules[] = {
    {"prompt", admit_prompt, false, "vLLM (SOSP '23) section 4.5: the prompt fits, 1 % stays free"},
    {"peak_tokens", admit_peak_tokens, true, "lightllm's Efficient Router: the predicted peak fits"},
    {"longest", admit_longest, false, "Orca (OSDI '22) section 4.2: max_tokens of all sequences are reserved"},
};

}  // namespace

std::span<const AdmissionRule> admission_rules() { return kRules; }

const AdmissionRule* find_admission_rule(std::string_view name) { return find_row(kRules, name); }

}  // namespace xpyd::batch
