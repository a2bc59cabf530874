#include "batch/mtp.h"

#include <algorithm>

#include "batch/draft_model.h"
#include "batch/sequence.h"

namespace xpyd::batch {
namespace {

class HeadDrafter final : public Drafter {
 public:
  explicit HeadDrafter(const DrafterParts& parts) : model_(parts.model), memory_(parts.memory), time_(parts.clock) {}

  bool in_place() const override { return true; }
  double round_seconds() const override { return time_.mean_s(); }

  // Of those whose last known token comes behind one whose hidden state is known. Later drafts take the head's own
  // states in its place.
  void draft(std::span<DraftWish> wishes) override {
    const size_t width = size_t(model_.config().hidden);
    begun_.clear(), rows_.clear(), states_.clear();
    for (DraftWish& wish : wishes) {
      const Sequence& s = *wish.sequence;
      if (s.hidden_tokens + 1 != int(wish.tokens.size()) || s.hidden.size() != width) continue;
      rows_.push_back({.draws = begun_.size(), .token = wish.tokens.back(), .length = int(wish.tokens.size())});
      begun_.push_back(&wish);
      states_.insert(states_.end(), s.hidden.begin(), s.hidden.end());
    }
    draws_.begin(begun_);
    while (!rows_.empty()) {
      time_.begin();
      predict();
      time_.end();
    }
  }

 private:
  struct Row {
    size_t draws;
    int32_t token;
    int length;  // tokens of KV, with this one
  };

  void predict() {
    const size_t n = rows_.size(), ranks = size_t(memory_.n_ranks());
    const size_t width = size_t(model_.config().hidden), vocab = size_t(model_.config().vocab);
    ids_.clear(), offsets_.assign(1, 0), lengths_.clear(), before_.clear();
    views_.resize(ranks * n);
    for (size_t i = 0; i < n; ++i) {
      const Row& row = rows_[i];
      ids_.push_back(row.token);
      offsets_.push_back(int(ids_.size()));
      lengths_.push_back(row.length);
      before_.push_back(states_.data() + i * width);
      for (size_t r = 0; r < ranks; ++r)
        views_[r * n + i] = memory_.view(draws_.wish(row.draws).sequence->kv, int(r));
    }
    logits_.resize(n * vocab);
    model_.predict({.token_ids = ids_,
                    .q_offsets = offsets_,
                    .kv_lengths = lengths_,
                    .views = views_,
                    .hidden = {states_.data(), before_}},
                   logits_.data());
    size_t kept = 0;
    for (size_t i = 0; i < n; ++i) {
      Row row = rows_[i];
      draws_.draw(row.draws, {logits_.data() + i * vocab, vocab});
      if (!draws_.wants_more(row.draws)) continue;
      row.token = draws_.wish(row.draws).drafts.back();
      ++row.length;
      if (kept < i) std::copy_n(states_.data() + i * width, width, states_.data() + kept * width);
      rows_[kept++] = row;
    }
    rows_.resize(kept);
  }

  Model& model_;
  KvMemory& memory_;
  RoundTime time_;
  DraftDraws draws_;
  std::vector<DraftWish*> begun_;
  std::vector<Row> rows_;
  std::vector<float> states_;  // [rows, hidden]
  std::vector<const float*> before_;
  std::vector<int32_t> ids_, offsets_, lengths_;
  std::vector<KvView> views_;
  std::vector<float> logits_;
};

}  // namespace

std::unique_ptr<Drafter> make_head_drafter(const SpeculationOptions&, const DrafterParts& parts) {
  return std::make_unique<HeadDrafter>(parts);
}

}  // namespace xpyd::batch
