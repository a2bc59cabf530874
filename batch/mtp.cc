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
    const size_t n = rows_.size();
    const size_t width = size_t(model_.config().hidden), vocab = size_t(model_.config().vocab);
    step_.clear(), before_.clear();
    for (size_t i = 0; i < n; ++i) {
      const Row& row = rows_[i];
      step_.add({&row.token, 1}, row.length, draws_.wish(row.draws).sequence->kv, false);
      before_.push_back(states_.data() + i * width);
    }
    const std::span<const float> logits = step_.predict(model_, memory_, {states_.data(), before_});
    size_t kept = 0;
    for (size_t i = 0; i < n; ++i) {
      Row row = rows_[i];
      draws_.draw(row.draws, logits.subspan(i * vocab, vocab));
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
  DraftStep step_;
};

}  // namespace

std::unique_ptr<Drafter> make_head_drafter(const SpeculationOptions&, const DrafterParts& parts) {
  return std::make_unique<HeadDrafter>(parts);
}

}  // namespace xpyd::batch
