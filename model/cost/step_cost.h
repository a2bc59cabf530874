// Predicts the seconds of an engine's steps from their contents, and corrects itself by measured steps. The prediction
// is linear in six numbers of a step, so any prompt, batch or sum of steps has a closed form:
//
//   t = c  +  b X  +  gamma sum(L)  +  a sum(2 L x + x^2)  +  s n  +  k K
//
// Each prompt computes x tokens (X in total) after L cached ones; n sequences decode over K tokens of KV in total. The
// prefill part is SGLang's and WavePP's cost of a chunk. The decode part is weights and KV bytes (Mooncake, section
// 2.2).
//
// Thread safety: none; a value.
#pragma once

#include <array>

#include "model/cost/cost_model.h"

namespace xpyd::model {

// The contents of one step, of a part of one, or of `steps` steps together.
struct StepShape {
  double steps = 1;
  double tokens = 0;          // X
  double prefix = 0;          // sum(L)
  double attended = 0;        // sum(2 L x + x^2)
  double decodes = 0;         // n
  double decode_context = 0;  // K

  void add_prompt(double x, double L) { tokens += x, prefix += L, attended += 2 * L * x + x * x; }
  void add_decodes(double n, double K) { decodes += n, decode_context += K; }
  // Adds n tokens of one sequence after L tokens, in one step.
  void add_tokens(double n, double L);
  void add(const StepShape& other, double times = 1);
};

// All steps of a prompt of `tokens` after `cached`, with at most `chunk` tokens a step.
StepShape prompt_steps(double tokens, double cached, double chunk);

class StepCost {
 public:
  static constexpr int kTerms = 6;
  static constexpr double kForget = 0.998;
  using Terms = std::array<double, kTerms>;  // c, b, gamma, a, s, k

  StepCost() : StepCost(Terms{1e-3, 1e-4, 1e-9, 1e-10, 1e-4, 1e-9}) {}  // without knowledge of model or machine
  // Starts from the model's work at these rates, so that an unused instance is neither free nor unreachable.
  StepCost(const CostModel& model, const Rates& rates);
  explicit StepCost(const Terms& seconds) : prior_(seconds) {}

  double seconds(const StepShape& shape) const;
  // Learns from one measured step, by recursive least squares on errors relative to the prediction. A step weighs
  // `forget` times the next one. The prior holds where steps give no information, and no term falls below 0.
  void saw(const StepShape& step, double seconds, double forget = kForget);

  Terms terms() const;  // seconds per unit of each number of the shape

 private:
  static constexpr double kPrior = 1e-3;
  Terms features(const StepShape& shape) const;

  Terms prior_ = {};
  Terms factor_ = {1, 1, 1, 1, 1, 1};  // multiplies the prior's terms
  std::array<Terms, kTerms> a_ = {};   // normal equations
  Terms y_ = {};
};

// Seconds of a step of this shape by given terms.
inline double seconds(const StepCost::Terms& terms, const StepShape& s) {
  return terms[0] * s.steps + terms[1] * s.tokens + terms[2] * s.prefix + terms[3] * s.attended + terms[4] * s.decodes +
         terms[5] * s.decode_context;
}

// Accuracy of predictions: mean of |predicted - seen| / seen, and mean of (predicted - seen) / seen.
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
