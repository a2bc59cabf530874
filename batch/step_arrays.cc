#include "batch/step_arrays.h"

#include <algorithm>

namespace xpyd::batch {

StepEntry entry_of(Sequence& s, int n_tokens) {
  const int end = s.computed + n_tokens;
  StepEntry entry{.sequence = &s, .first = s.computed, .n_tokens = n_tokens};
  entry.wants_logits = end == int(s.tokens.size());
  if (s.wants_prompt_logprobs()) entry.n_prompt_rows = std::min(end, s.n_prompt() - 1) - s.computed;
  return entry;
}

StepInput StepArrays::gather(std::span<const StepEntry> entries, const KvMemory& memory, LayerObserver* observer,
                             float* hidden, size_t width) {
  const size_t n = entries.size(), n_ranks = size_t(memory.n_ranks());
  token_ids_.clear(), q_offsets_.assign(1, 0), kv_lengths_.clear(), logit_rows_.clear();
  views_.resize(n_ranks * n);  // grouped by rank
  for (size_t r = 0; r < n; ++r) {
    const StepEntry& entry = entries[r];
    const auto tokens = entry.sequence->tokens.begin() + entry.first;
    const int first = int(token_ids_.size()), last = first + entry.n_tokens - 1;
    token_ids_.insert(token_ids_.end(), tokens, tokens + entry.n_tokens);
    q_offsets_.push_back(last + 1);
    kv_lengths_.push_back(entry.end());
    for (int i = 0; i < entry.n_prompt_rows; ++i) logit_rows_.push_back(first + i);
    for (int i = entry.n_drafts; entry.wants_logits && i >= 0; --i) logit_rows_.push_back(last - i);
    for (size_t rank = 0; rank < n_ranks; ++rank) views_[rank * n + r] = memory.view(entry.sequence->kv, int(rank));
  }
  before_.clear();
  for (const StepEntry& entry : hidden ? entries : std::span<const StepEntry>()) {
    const Sequence& s = *entry.sequence;
    before_.push_back(s.hidden_tokens == entry.first && s.hidden.size() == width ? s.hidden.data() : nullptr);
  }
  return {.token_ids = token_ids_,
          .q_offsets = q_offsets_,
          .kv_lengths = kv_lengths_,
          .views = views_,
          .logit_rows = logit_rows_,
          .observer = observer,
          .hidden = {hidden, before_}};
}

}  // namespace xpyd::batch
