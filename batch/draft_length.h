// How many drafts to use (TurboSpec, arXiv 2406.14066): as many as increase the tokens per second of the step.
//
// A draft behind i others is accepted with probability a^(i + 1), where `a` is the accepted share of the sequence's
// recently checked drafts. Its cost is that of one more token. It pays while
//
//   a^(i + 1) / seconds of a token  >  tokens that the step outputs / seconds of the step.
//
// Only trying tells whether text is predictable, and trying costs. Where no draft is ever right, one step in four tries
// one: 3 to 4 % are lost.
//
// Thread safety: plain values.
#pragma once

#include <algorithm>

namespace xpyd::batch {

// Acceptance record of one sequence. Old results fade, so a sequence that stopped drafting tries again later.
class DraftRecord {
 public:
  double share() const { return (right_ + 1) / (looked_at_ + 2); }
  bool unknown() const { return looked_at_ < 0.5; }  // nothing checked, or only long ago
  void saw(int drafts, int accepted) {
    constexpr double kForget = 0.97;
    right_ = kForget * right_ + accepted;
    looked_at_ = kForget * looked_at_ + accepted + (accepted < drafts);
  }

 private:
  double right_ = 0, looked_at_ = 0;
};

// One step: its expected output tokens and its seconds, both of which grow with its drafts.
struct DraftRate {
  double tokens, seconds, token_seconds;
  // At least kLeast: the cost model starts from a prior and learns the price of one more token late.
  double price() const { return std::max(kLeast, tokens * token_seconds / seconds); }
  static constexpr double kLeast = 0.05;
  // Returns how many drafts the next sequence gets, at most `most`.
  int take(const DraftRecord& record, int most) {
    double kept = 1;
    int n = 0;
    for (; n < most; ++n) {
      kept *= record.share();
      const bool try_it = n == 0 && record.unknown() && price() < 1;  // else it stays unknown where drafts cost much
      if (kept <= price() && !try_it) break;
      tokens += kept, seconds += token_seconds;
    }
    return n;
  }
};

}  // namespace xpyd::batch
