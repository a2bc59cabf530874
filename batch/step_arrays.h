// StepArrays holds the flat arrays of a step that the model reads.
//
// Thread safety: the engine's thread.
#pragma once

#include <span>
#include <vector>

#include "allocator/kv_memory.h"
#include "batch/sequence.h"
#include "model/model.h"

namespace xpyd::batch {

struct StepEntry {  // one sequence's part of a step
  Sequence* sequence = nullptr;
  int first = 0, n_tokens = 0;    // its tokens [first, first + n_tokens)
  bool wants_logits = false;      // sample tokens[first + n_tokens] from this step
  int n_prompt_rows = 0;          // also return logits of this many first tokens, for prompt logprobs
  int n_drafts = 0;               // its last tokens are drafts; logits of each and of the token before are wanted
  const float* hidden = nullptr;  // HiddenStates::rows of its tokens, once computed
  bool ended = false;             // the sequence ended while the step was under way: results are dropped
  int end() const { return first + n_tokens; }
  int n_known() const { return n_tokens - n_drafts; }
  int n_rows() const { return n_prompt_rows + wants_logits + n_drafts; }  // rows of logits
};

// The entry for the next n_tokens of a sequence.
StepEntry entry_of(Sequence& sequence, int n_tokens);

class StepArrays {
 public:
  // Returns the step as the model reads it. Its spans point into this object until the next call. A model with a
  // multi-token head passes `hidden`, HiddenStates::rows with `width` floats per token.
  StepInput gather(std::span<const StepEntry> entries, const KvMemory& memory, LayerObserver* observer,
                   float* hidden = nullptr, size_t width = 0);

 private:
  std::vector<int32_t> token_ids_, q_offsets_, kv_lengths_, logit_rows_;
  std::vector<KvView> views_;
  std::vector<const float*> before_;
};

}  // namespace xpyd::batch
