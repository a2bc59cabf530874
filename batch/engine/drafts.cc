#include "batch/engine/drafts.h"

#include <algorithm>

#include "base/status.h"

namespace xpyd::batch {

// Returns the most drafts for this entry. 0: it does not decode, or there is no room.
int Drafts::most_for(const StepEntry& entry, int spare_tokens, int spare_rows, int room) const {
  const Sequence& s = *entry.sequence;
  const bool decodes = entry.wants_logits && s.n_output() > 0 && !s.leaves;
  if (!decodes) return 0;
  const int wanted = options_.speculation.tokens;
  return std::max(0, std::min({wanted > 0 ? wanted : kMostDrafts, s.request->max_tokens - s.n_output() - 1,
                               spare_tokens, spare_rows, room}));
}

void Drafts::add(std::vector<StepEntry>& entries, const StepCost::Terms& cost) {
  const KvStats kv = memory_.stats();
  const int block_tokens = kv.block_tokens;
  int spare_tokens = options_.step_tokens, spare_rows = options_.max_batch, free_blocks = kv.free;
  StepShape shape;
  DraftRate rate = {};
  for (const StepEntry& entry : entries) {
    spare_tokens -= entry.n_tokens;
    spare_rows -= std::max(1, entry.n_rows());
    shape.add_tokens(entry.n_tokens, entry.first);
    rate.tokens += entry.wants_logits;
  }
  rate.seconds = seconds(cost, shape);
  drafted_.clear();
  wishes_.clear();
  for (StepEntry& entry : entries) {
    Sequence& s = *entry.sequence;
    const int blocks = int(memory_.blocks(s.kv).size());
    int most = most_for(entry, spare_tokens, spare_rows, (blocks + free_blocks) * block_tokens - entry.end());
    if (most == 0) continue;
    rate.token_seconds = cost[1] + 2 * entry.end() * cost[3] + drafter_->round_seconds() / double(entries.size());
    const bool as_pay = options_.speculation.tokens == 0;
    if (as_pay && (most = rate.take(s.draft_record, most)) == 0) {
      s.draft_record.saw(0, 0);
      continue;
    }
    if (drafter_->in_place() && !append_room(memory_, s, entry.n_tokens + most)) continue;
    free_blocks -= int(memory_.blocks(s.kv).size()) - blocks;
    spare_tokens -= most, spare_rows -= most;
    drafted_.push_back(&entry);
    wishes_.push_back({.sequence = &s, .tokens = s.tokens, .memory = s.drafts, .most = most});
  }
  drafter_->draft(wishes_);
  for (size_t i = 0; i < drafted_.size(); ++i) {
    StepEntry& entry = *drafted_[i];
    Sequence& s = *entry.sequence;
    const std::vector<int32_t>& drafts = wishes_[i].drafts;
    const int n = int(drafts.size());
    if (drafter_->in_place() && n < wishes_[i].most) {
      memory_.rollback(s.kv);
      XPYD_CHECK(append_room(memory_, s, entry.n_tokens));
    }
    const int blocks = int(memory_.blocks(s.kv).size());
    if (n == 0 || (entry.end() + n - 1) / block_tokens >= blocks + free_blocks ||
        !append_room(memory_, s, entry.n_tokens + n))
      continue;
    free_blocks -= int(memory_.blocks(s.kv).size()) - blocks;
    s.tokens.insert(s.tokens.end(), drafts.begin(), drafts.end());
    entry.n_tokens += n, entry.n_drafts = n;
  }
}

}  // namespace xpyd::batch
