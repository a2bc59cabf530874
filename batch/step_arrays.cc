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

void StepArrays::arrange(std::vector<StepEntry>& entries) {
  newcomers_.clear();
  arranged_.assign(owners_.size(), StepEntry{});
  for (const StepEntry& entry : entries) {
    const size_t row = size_t(entry.sequence->row);  // -1 becomes larger than any row
    const bool keeps = row < owners_.size() && owners_[row] == entry.sequence;
    if (keeps) {
      arranged_[row] = entry;
    } else {
      newcomers_.push_back(entry);
    }
  }
  size_t next = 0;
  for (size_t row = 0; row < arranged_.size(); ++row) {
    if (arranged_[row].sequence) continue;
    if (next < newcomers_.size()) {
      arranged_[row] = newcomers_[next++];
      continue;
    }
    while (arranged_.size() > row && !arranged_.back().sequence) arranged_.pop_back();
    if (row >= arranged_.size()) break;
    arranged_[row] = arranged_.back();
    arranged_.pop_back();
  }
  arranged_.insert(arranged_.end(), newcomers_.begin() + ptrdiff_t(next), newcomers_.end());
  owners_.resize(arranged_.size());
  for (size_t row = 0; row < arranged_.size(); ++row) {
    owners_[row] = arranged_[row].sequence;
    arranged_[row].sequence->row = int(row);
  }
  std::swap(entries, arranged_);
}

StepInput StepArrays::gather(std::span<const StepEntry> entries, const KvMemory& memory, LayerObserver* observer,
                             float* hidden, size_t width) {
  const size_t n = entries.size();
  size_t same = 0, n_logits = 0;  // rows whose place in token_ids_ and logit_rows_ is unchanged
  for (; same < n && same < rows_.size(); ++same) {
    const StepEntry& entry = entries[same];
    if (rows_[same] != row_of(entry)) break;
    n_logits += size_t(entry.n_rows());
  }
  rows_.resize(n);
  q_offsets_.resize(n + 1);
  kv_lengths_.resize(n);
  const size_t n_ranks = size_t(memory.n_ranks());
  views_.resize(n_ranks * n);  // grouped by rank
  logit_rows_.resize(n_logits);
  for (size_t r = same; r < n; ++r) {
    const StepEntry& entry = entries[r];
    rows_[r] = row_of(entry);
    q_offsets_[r + 1] = q_offsets_[r] + entry.n_tokens;
    for (int i = 0; i < entry.n_prompt_rows; ++i) logit_rows_.push_back(q_offsets_[r] + i);
    for (int i = entry.n_drafts; entry.wants_logits && i >= 0; --i) logit_rows_.push_back(q_offsets_[r + 1] - 1 - i);
  }
  token_ids_.resize(size_t(q_offsets_[n]));
  for (size_t r = 0; r < n; ++r) {
    const StepEntry& entry = entries[r];
    const int32_t* tokens = entry.sequence->tokens.data() + entry.first;
    int32_t* to = token_ids_.data() + q_offsets_[r];
    if (entry.n_tokens == 1) {
      *to = *tokens;
    } else {
      std::copy_n(tokens, entry.n_tokens, to);
    }
    kv_lengths_[r] = entry.end();
    views_[r] = memory.view(entry.sequence->kv);
    for (size_t rank = 1; rank < n_ranks; ++rank) views_[rank * n + r] = memory.view(entry.sequence->kv, int(rank));
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
