// How many drafts pay (TurboSpec, arXiv 2406.14066): as many as let a step end more tokens per second.
//
// A draft behind i others is kept with a^(i + 1), where `a` is how many of the sequence's last drafts were right, of those
// that came to be looked at; it costs what one more token costs. So it pays while
//
//   a^(i + 1) / seconds of a token  >  tokens that the step ends / seconds of the step.
//
// Thread safety: none; values.
#pragma once

namespace xpyd::batch {

// Of one sequence. What lies back counts less, so that who has given up drafting tries again.
class DraftRecord {
 public:
  double share() const { return (right_ + 1) / (looked_at_ + 2); }
  void saw(int drafts, int accepted) {
    constexpr double kForget = 0.97;
    right_ = kForget * right_ + accepted;
    looked_at_ = kForget * looked_at_ + accepted + (accepted < drafts);
  }

 private:
  double right_ = 0, looked_at_ = 0;
};

// A step: the tokens that it is expected to end, and its seconds, which grow with its drafts.
struct DraftRate {
  double tokens, seconds, token_seconds;
  // The next sequence's drafts, at most `most`.
  int take(const DraftRecord& record, int most) {
    double kept = 1;
    int n = 0;
    for (; n < most; ++n) {
      kept *= record.share();
      if (kept * seconds <= tokens * token_seconds) break;
      tokens += kept, seconds += token_seconds;
    }
    return n;
  }
};

}  // namespace xpyd::batch
