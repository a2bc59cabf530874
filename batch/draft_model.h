// Drafts of a smaller model (Leviathan et al. 2023; Chen et al. 2023).
//
// It has KV of its own, in a memory of the same scheme, which no other instance sees: a decode instance computes the
// prompt for itself, the first time that it drafts for it, at most a step's tokens at a time. What of the last drafts
// was right is the longest common prefix of the tokens that it has computed and those that are known now; only these
// are `written`.
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
