// How many drafts pay (TurboSpec, arXiv 2406.14066): as many as let a step end more tokens per second.
//
// A draft behind i others is kept with a^(i + 1), where `a` is how many of the sequence's last drafts were right, of those
// that came to be looked at; it costs what one more token costs. So it pays while
//
//   a^(i + 1) / seconds of a token  >  tokens that the step ends / seconds of the step.
//
// Whether text can be guessed is found out by trying, which costs: where nothing is right, this rule alone tries in a
// step of four and loses 3 to 4 % for good. So drafts are paid for out of what drafts have earned (DraftCredit).
//
// Thread safety: none; values.
#pragma once

#include <algorithm>

namespace xpyd::batch {

// Of one sequence. What lies back counts less, so that who has given up drafting tries again.
class DraftRecord {
 public:
  double share() const { return (right_ + 1) / (looked_at_ + 2); }
  bool unknown() const { return looked_at_ < 0.5; }  // or long ago
  void saw(int drafts, int accepted) {
    constexpr double kForget = 0.97;
    right_ = kForget * right_ + accepted;
    looked_at_ = kForget * looked_at_ + accepted + (accepted < drafts);
  }

 private:
  double right_ = 0, looked_at_ = 0;
};

// Of an engine, in tokens. The price of a draft is what the step would have ended in its time; one that is right is a
// token. So much can be lost: kFirst, or kMost of what was earned, and kShare of all tokens.
class DraftCredit {
 public:
  double left() const { return left_; }
  void pay(double tokens) { left_ -= tokens; }
  void token(bool right) { left_ = std::min(kMost, left_ + kShare + right); }  // was put out; `right`: as drafted

 private:
  static constexpr double kFirst = 0.5, kMost = 4, kShare = 0.01;
  double left_ = kFirst;
};

// A step: the tokens that it is expected to end, and its seconds, which grow with its drafts.
struct DraftRate {
  double tokens, seconds, token_seconds, credit;
  // At least kLeast: what one more token takes is learned late, as its cost is tied to what was known at first.
  double price() const { return std::max(kLeast, tokens * token_seconds / seconds); }
  static constexpr double kLeast = 0.05;
  // The next sequence's drafts, at most `most`.
  int take(const DraftRecord& record, int most) {
    double kept = 1;
    int n = 0;
    for (; n < most; ++n) {
      kept *= record.share();
      const bool try_it = n == 0 && record.unknown() && price() < 1;  // else it stays unknown where drafts are dear
      if ((kept <= price() && !try_it) || credit < price()) break;
      credit -= price();
      tokens += kept, seconds += token_seconds;
    }
    return n;
  }
};

}  // namespace xpyd::batch
