// Drafts of a smaller model (Leviathan et al. 2023; Chen et al. 2023).
//
// It has KV of its own, in a memory of the same scheme. Who drafts computes the prompt for itself, the first time, at
// most a step's tokens at a time; or the prefill instance has (--draft-prefill), and its rows come with the sequence.
// What of the last drafts was right is the longest common prefix of the tokens that it has computed and those that are
// known now; only these are `written`.
//
// From its logits it draws with the sequence's own sampler and random numbers, so that where both models think alike
// the draft is what the engine will draw, at any temperature (arXiv 2408.07978).
//
// Thread safety: the engine's.
#pragma once

#include <memory>
#include <vector>

#include "batch/drafter.h"
#include "model/sampler.h"

namespace xpyd::batch {

std::unique_ptr<Drafter> make_model_drafter(const SpeculationOptions& options, const DrafterParts& parts);

// ---- --draft-prefill prefill: rows of the prompt, from instance to instance.

// Computes all `tokens` as far as no prefix cache has them. Its rows, [n_layers][K, V][tokens][heads] without gaps;
// empty: there is no room for them now, or the model's context is shorter.
std::vector<uint64_t> draft_rows(DraftModel& model, std::span<const int32_t> tokens, uint64_t salt);
size_t draft_row_words(const DraftModel& model, int n_tokens);
// Of rows of another instance. Null: there is no room for them; whoever drafts computes them. Before: rows.size() is
// draft_row_words().
std::unique_ptr<DraftMemory> adopt_draft_rows(std::shared_ptr<DraftModel> model, std::span<const int32_t> tokens,
                                              uint64_t salt, std::span<const uint64_t> rows);

// ---- What both drafters that compute are made of.

// One step of theirs: some last tokens of each of several sequences.
class DraftStep {
 public:
  void clear() { ids_.clear(), offsets_.assign(1, 0), lengths_.clear(), logit_rows_.clear(), kv_.clear(); }
  // `tokens`: the last ones of `length`.
  void add(std::span<const int32_t> tokens, int length, KvHandle kv, bool wants_logits);
  // Valid until the next add() or clear().
  StepInput input(const KvMemory& memory);
  // Of the rows that want them, [_, vocab].
  std::span<const float> forward(Model& model, const KvMemory& memory);
  std::span<const float> predict(Model& model, const KvMemory& memory, const HiddenStates& hidden);

 private:
  std::vector<int32_t> ids_, offsets_ = {0}, lengths_, logit_rows_;
  std::vector<KvHandle> kv_;
  std::vector<KvView> views_;
  std::vector<float> logits_;
};

// Drafts from logits, for many sequences, a token of each at a time.
class DraftDraws {
 public:
  void begin(std::span<DraftWish*> wishes);
  // The next draft of a wish, of those that begin() has seen.
  void draw(size_t wish, std::span<const float> logits);
  DraftWish& wish(size_t i) { return *drawn_[i].wish; }
  bool wants_more(size_t i) const { return int(drawn_[i].wish->drafts.size()) < drawn_[i].wish->most; }

 private:
  struct Drawn {
    DraftWish* wish;
    SamplerState sampler;  // a copy: these draws are not the sequence's
  };
  std::vector<Drawn> drawn_;
  SamplerScratch scratch_;
};

// A mean of seconds, of which the last ones count most.
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

}  // namespace xpyd::batch
