#include "batch/speculation/mtp.h"

#include <algorithm>

#include "batch/sequence.h"
#include "model/sampler.h"

namespace xpyd::batch {
namespace {

// A running mean of seconds that gives recent rounds more weight.
class RoundTime {
 public:
  explicit RoundTime(Clock& clock) : clock_(clock) {}
  void begin() { began_s_ = clock_.now(); }
  void end() {
    const double s = clock_.now() - began_s_;
    mean_s_ += mean_s_ == 0 ? s : 0.1 * (s - mean_s_);
  }
  double mean_s() const { return mean_s_; }

 private:
  Clock& clock_;
  double began_s_ = 0, mean_s_ = 0;
};

class HeadDrafter final : public Drafter {
 public:
  explicit HeadDrafter(const DrafterParts& parts) : model_(parts.model), memory_(parts.memory), time_(parts.clock) {}

  bool in_place() const override { return true; }
  double round_seconds() const override { return time_.mean_s(); }

  // Drafts for sequences whose last known token follows a token with a known hidden state. Later drafts use the head's
  // own states instead.
  void draft(std::span<DraftWish> wishes) override {
    const size_t width = size_t(model_.config().hidden);
    begun_.clear(), rows_.clear(), states_.clear();
    for (DraftWish& wish : wishes) {
      const Sequence& s = *wish.sequence;
      if (s.hidden_tokens + 1 != int(wish.tokens.size()) || s.hidden.size() != width) continue;
      rows_.push_back({.wish = begun_.size(), .token = wish.tokens.back(), .length = int(wish.tokens.size())});
      begun_.push_back(&wish);
      states_.insert(states_.end(), s.hidden.begin(), s.hidden.end());
    }
    samplers_.clear();
    for (const DraftWish* wish : begun_) samplers_.push_back(wish->sequence->sampler);
    while (!rows_.empty()) {
      time_.begin();
      predict();
      time_.end();
    }
  }

 private:
  struct Row {
    size_t wish;  // index into begun_
    int32_t token;
    int length;  // KV tokens including this one
  };

  void predict() {
    const size_t n = rows_.size();
    const size_t width = size_t(model_.config().hidden), vocab = size_t(model_.config().vocab);
    ids_.clear(), offsets_.assign(1, 0), lengths_.clear(), views_.clear(), before_.clear();
    for (size_t i = 0; i < n; ++i) {
      ids_.push_back(rows_[i].token);
      offsets_.push_back(int(ids_.size()));
      lengths_.push_back(rows_[i].length);
      before_.push_back(states_.data() + i * width);
    }
    for (int rank = 0; rank < memory_.n_ranks(); ++rank)
      for (const Row& row : rows_) views_.push_back(memory_.view(begun_[row.wish]->sequence->kv, rank));
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
      DraftWish& wish = *begun_[row.wish];
      SamplingParams params = wish.sequence->request->sampling;
      params.top_logprobs = -1;
      row.token = sample({logits_.data() + i * vocab, vocab}, params, samplers_[row.wish], scratch_).chosen.token;
      wish.drafts.push_back(row.token);
      if (int(wish.drafts.size()) == wish.most) continue;
      ++row.length;
      if (kept < i) std::copy_n(states_.data() + i * width, width, states_.data() + kept * width);
      rows_[kept++] = row;
    }
    rows_.resize(kept);
  }

  Model& model_;
  KvMemory& memory_;
  RoundTime time_;
  std::vector<DraftWish*> begun_;
  std::vector<SamplerState> samplers_;  // of begun_: copies, so the originals do not advance
  SamplerScratch scratch_;
  std::vector<Row> rows_;
  std::vector<float> states_;  // [rows, hidden]
  std::vector<const float*> before_;
  std::vector<int32_t> ids_, offsets_, lengths_;
  std::vector<KvView> views_;
  std::vector<float> logits_;  // [rows, vocab]
};

}  // namespace

std::unique_ptr<Drafter> make_head_drafter(const DrafterParts& parts) { return std::make_unique<HeadDrafter>(parts); }

}  // namespace xpyd::batch
