#include "model/cost/step_cost.h"

#include <algorithm>
#include <cmath>

namespace xpyd::model {

void StepShape::add(const StepShape& other, double times) {
  steps += times * other.steps, tokens += times * other.tokens, prefix += times * other.prefix;
  attended += times * other.attended, decodes += times * other.decodes;
  decode_context += times * other.decode_context;
}

void StepShape::add_tokens(double n, double L) {
  if (n > 1 || L == 0)
    add_prompt(n, L);
  else
    add_decodes(n, L + 1);
  steps = std::max(steps, 1.0);
}

StepShape prompt_steps(double tokens, double cached, double chunk) {
  const double n = std::max(1.0, std::ceil(tokens / chunk));
  return {.steps = n,
          .tokens = tokens,
          .prefix = n * cached + chunk * n * (n - 1) / 2,
          .attended = 2 * cached * tokens + tokens * tokens};  // (cached + tokens)^2 - cached^2 for any chunks
}

StepCost::StepCost(const CostModel& model, const Rates& rates) {
  const double weights = model.prefill(1, 0, false).bytes, kv = model.kv_token_bytes();
  // Two prompts far apart separate a token's own cost from its cost of attending to another token.
  const double one = model.prefill(1, 0, false).flops, far = model.prefill(1, 1 << 14, false).flops;
  const double attention = (far - one) / (1 << 14);  // FLOPs of one token attending to one token
  prior_ = {weights / rates.bytes_per_s,
            one / rates.flops_per_s,
            kv / rates.bytes_per_s,
            attention / 2 / rates.flops_per_s,
            model.decode(1, 1).flops / rates.flops_per_s,
            std::max(kv / rates.bytes_per_s, attention / rates.flops_per_s)};
}

StepCost::Terms StepCost::features(const StepShape& s) const {
  const Terms numbers = {s.steps, s.tokens, s.prefix, s.attended, s.decodes, s.decode_context};
  Terms f;
  for (int i = 0; i < kTerms; ++i) f[size_t(i)] = numbers[size_t(i)] * prior_[size_t(i)];
  return f;
}

double StepCost::seconds(const StepShape& shape) const {
  const Terms f = features(shape);
  double sum = 0;
  for (size_t i = 0; i < kTerms; ++i) sum += f[i] * factor_[i];
  return sum;
}

void StepCost::saw(const StepShape& step, double seconds, double forget) {
  if (!(seconds > 0)) return;
  Terms f = features(step);
  // Errors are relative to the prediction, so that a step of 1 ms counts as much as one of 1 s. If they were relative
  // to the measured time, fast steps would outweigh slow ones of the same shape, and sums would come out too short.
  const double scale = std::clamp(this->seconds(step), seconds / 4, 4 * seconds);
  for (double& x : f) x /= scale;
  for (size_t i = 0; i < kTerms; ++i) {
    for (size_t j = 0; j < kTerms; ++j) a_[i][j] = forget * a_[i][j] + f[i] * f[j];
    y_[i] = forget * y_[i] + f[i] * seconds / scale;
  }
  // Solves (A + prior) factor = y + prior, factor >= 0, by projected Gauss-Seidel from the previous solution.
  for (int sweep = 0; sweep < 8; ++sweep)
    for (size_t i = 0; i < kTerms; ++i) {
      double rest = y_[i] + kPrior;
      for (size_t j = 0; j < kTerms; ++j)
        if (j != i) rest -= a_[i][j] * factor_[j];
      factor_[i] = std::max(0.0, rest / (a_[i][i] + kPrior));
    }
}

StepCost::Terms StepCost::terms() const {
  Terms t;
  for (size_t i = 0; i < kTerms; ++i) t[i] = prior_[i] * factor_[i];
  return t;
}

}  // namespace xpyd::model
