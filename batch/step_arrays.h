// The flat arrays of a step, kept from step to step: what has not changed is not written again. And
// the rows of a persistent batch (TurboMind): a sequence keeps its row for as long as it takes part
// in every step, and a row that is left goes to the next newcomer or, without one, to the last row.
//
// Thread safety: the engine's.
#pragma once

#include <span>
#include <vector>

#include "allocator/kv_memory.h"
#include "batch/sequence.h"
#include "model/model.h"

namespace xpyd::batch {

struct StepEntry {  // one sequence's share of a step
  Sequence* sequence = nullptr;
  int first = 0, n_tokens = 0;  // its tokens [first, first + n_tokens)
  bool wants_logits = false;    // and then tokens[first + n_tokens] is chosen
  int n_prompt_rows = 0;        // logits of its first so many tokens are wanted, too: prompt logprobs
  int n_drafts = 0;             // its last so many tokens may be wrong: logits of the one before and of each are wanted
  const float* hidden = nullptr;  // HiddenStates::rows of its tokens, once they are computed
  bool ended = false;             // it ended while the step was under way: what the step gives it is dropped
  double draft_price = 0;         // of each of n_drafts (draft_length.h)
  int end() const { return first + n_tokens; }
  int n_known() const { return n_tokens - n_drafts; }
  int n_rows() const { return n_prompt_rows + wants_logits + n_drafts; }  // of logits
};

// The next n_tokens of a sequence.
StepEntry entry_of(Sequence& sequence, int n_tokens);

class StepArrays {
 public:
  // Puts the entries in the order of their sequences' rows. Sequence::row is this object's.
  void arrange(std::vector<StepEntry>& entries);
  // The step as the model sees it: spans into this object, until the next call.
  // `hidden`: of a model with a multi-token head, HiddenStates::rows, of so many floats a token.
  StepInput gather(std::span<const StepEntry> entries, const KvMemory& memory, LayerObserver* observer,
                   float* hidden = nullptr, size_t width = 0);

 private:
  struct Row {
    int n_tokens, n_prompt_rows, n_drafts;
    bool wants_logits;
    bool operator==(const Row&) const = default;
  };
  static Row row_of(const StepEntry& e) { return {e.n_tokens, e.n_prompt_rows, e.n_drafts, e.wants_logits}; }
  std::vector<Row> rows_;  // of the step before: where these are the same, so are the offsets
  std::vector<int32_t> token_ids_, q_offsets_ = {0}, kv_lengths_, logit_rows_;
  std::vector<KvView> views_;
  std::vector<const float*> before_;
  std::vector<StepEntry> arranged_, newcomers_;
  std::vector<const Sequence*> owners_;  // of the rows; addresses, to compare
};

}  // namespace xpyd::batch
