// Seconds of an engine's steps, predicted from what they compute and corrected by what they took. Linear in six numbers
// of a step, so that any prompt, batch or sum of steps has a closed form:
//
//   t = c  +  b X  +  gamma sum(L)  +  a sum(2 L x + x^2)  +  s n  +  k K
//
// for prompts that compute x tokens (X together) after L, and n sequences that decode over K tokens of KV together. The
// prefill part is SGLang's and WavePP's cost of a chunk, the decode part weights and KV bytes (Mooncake, section 2.2).
//
// Thread safety: none; a value.
#pragma once

#include <array>

#include "model/cost/cost_model.h"

namespace xpyd::model {

// What one step computes. Also of a part of a step, or of many: then `steps` says of how many.
struct StepShape {
  double steps = 1;
  double tokens = 0;          // X
  double prefix = 0;          // sum(L)
  double attended = 0;        // sum(2 L x + x^2)
  double decodes = 0;         // n
  double decode_context = 0;  // K

  void add_prompt(double x, double L) { tokens += x, prefix += L, attended += 2 * L * x + x * x; }
  void add_decodes(double n, double K) { decodes += n, decode_context += K; }
  // n tokens of a sequence after L, of one step.
  void add_tokens(double n, double L);
  void add(const StepShape& other, double times = 1);
};

// All steps of a prompt of `tokens` after `cached`, at most `chunk` a step.
StepShape prompt_steps(double tokens, double cached, double chunk);

class StepCost {
 public:
  static constexpr int kTerms = 6;
  static constexpr double kForget = 0.998;
  using Terms = std::array<double, kTerms>;  // c, b, gamma, a, s, k

  StepCost() : StepCost(Terms{1e-3, 1e-4, 1e-9, 1e-10, 1e-4, 1e-9}) {}  // of nothing that is known
  // What the model's work takes at these rates: an instance that nobody has used is not free, and not out of reach.
  StepCost(const CostModel& model, const Rates& rates);
  explicit StepCost(const Terms& seconds) : prior_(seconds) {}

  double seconds(const StepShape& shape) const;
  // A step with this shape took so long. Recursive least squares of errors relative to the prediction, in which a step
  // counts `forget` times the one after it, tied to the prior where steps say nothing; no term falls below 0.
  void saw(const StepShape& step, double seconds, double forget = kForget);

  Terms terms() const;  // seconds per unit of each number of the shape
  double steps_seen() const { return seen_; }

 private:
  static constexpr double kPrior = 1e-3;
  Terms features(const StepShape& shape) const;

  Terms prior_ = {};
  Terms factor_ = {1, 1, 1, 1, 1, 1};  // of the prior's terms
  std::array<Terms, kTerms> a_ = {};   // normal equations
  Terms y_ = {};
  double seen_ = 0;
};

// What a step of this shape takes by terms(): so many seconds for each of its numbers.
inline double seconds(const StepCost::Terms& terms, const StepShape& s) {
  return terms[0] * s.steps + terms[1] * s.tokens + terms[2] * s.prefix + terms[3] * s.attended + terms[4] * s.decodes +
         terms[5] * s.decode_context;
}

// How far predictions were off: mean of |predicted - seen| / seen, and of (predicted - seen) / seen.
struct PredictionError {
  double n = 0, absolute = 0, signed_sum = 0;
  void add(double predicted, double seen) {
    if (seen <= 0) return;
    const double e = (predicted - seen) / seen;
    n += 1, absolute += e < 0 ? -e : e, signed_sum += e;
  }
  double mape() const { return n > 0 ? absolute / n : 0; }
  double bias() const { return n > 0 ? signed_sum / n : 0; }
};

}  // namespace xpyd::model
