// Every filter (top-k, top-p, min-p) keeps the most likely tokens. The draw then goes through the kept tokens in the
// order of their ids.
//
// sample() accepts any logits. It reads NaN as -infinity, and +infinity as the largest float. If no logit is above
// -infinity, the token is 0.
#include "model/sampler.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "base/status.h"
#include "model/gemm/ops.h"

namespace xpyd::model {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Makes a logit finite or -infinity.
float made_finite(float x) { return x != x ? kLowest : std::min(x, FLT_MAX); }

// The highest logit, and the lowest id that has it.
struct Top {
  float value = kLowest;
  int id = 0;
  int nans = 0;
  bool finite() const { return nans == 0 && value > kLowest && value <= FLT_MAX; }
};

Top find_top(const float* x, int n) {
  constexpr int kBlock = 1024;
  Top top;
  int block = 0;
  for (int begin = 0; begin < n; begin += kBlock) {
    const Largest peak = default_ops().peak(x + begin, std::min(kBlock, n - begin));
    top.nans += peak.nans;
    if (peak.value > top.value) {
      top.value = peak.value;
      block = begin;
    }
  }
  if (top.value > kLowest) top.id = int(std::find(x + block, x + n, top.value) - x);
  return top;
}

// Applies the penalties to the logits of tokens seen before.
void penalise(const SamplingParams& params, const SamplerState& state, float* x, int n) {
  auto repeat = [&](int32_t id) {
    if (id < 0 || id >= n) return;
    const float penalty = params.repetition_penalty;
    x[id] = made_finite(x[id] > 0 ? x[id] / penalty : x[id] * penalty);
  };
  if (params.repetition_penalty != 1) {
    for (int32_t id : state.prompt_tokens) repeat(id);
    for (const auto& [id, count] : state.output_counts)
      if (!std::binary_search(state.prompt_tokens.begin(), state.prompt_tokens.end(), id)) repeat(id);
  }
  if (params.presence_penalty != 0 || params.frequency_penalty != 0)
    for (const auto& [id, count] : state.output_counts)
      if (id >= 0 && id < n)
        x[id] = made_finite(x[id] - params.presence_penalty - params.frequency_penalty * float(count));
}

bool has_penalties(const SamplingParams& params) {
  return params.repetition_penalty != 1 || params.presence_penalty != 0 || params.frequency_penalty != 0;
}

// Records a chosen token.
void record(const SamplingParams& params, int32_t token, SamplerState& state) {
  if (has_penalties(params)) ++state.output_counts[token];
}

// Draws from softmax(x / temperature) after the filters. x may be scratch.logits.
int32_t draw(const float* x, int n, float peak, const SamplingParams& params, Random& random, SamplerScratch& scratch) {
  const Ops& ops = default_ops();
  std::vector<int32_t>& ids = scratch.order;  // tokens that may still be drawn, ascending
  ids.resize(size_t(n));
  std::iota(ids.begin(), ids.end(), 0);
  if (params.top_k > 0 && params.top_k < n) {
    const auto better = [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
    std::nth_element(ids.begin(), ids.begin() + params.top_k, ids.end(), better);
    ids.resize(size_t(params.top_k));
    std::sort(ids.begin(), ids.end());
  }
  std::vector<float>& weights = scratch.logits;  // of the same tokens, relative to 1 for the most likely one
  weights.resize(size_t(n));
  for (size_t j = 0; j < ids.size(); ++j) weights[j] = x[ids[j]];
  // A temperature below 1e-6 acts as greedy except for ties, and its inverse stays finite.
  ops.exp(weights.data(), peak, 1 / std::max(params.temperature, 1e-6f), int(ids.size()), weights.data());
  const auto keep = [&](auto wanted) {
    size_t kept = 0;
    for (size_t j = 0; j < ids.size(); ++j) {
      if (!wanted(weights[j])) continue;
      ids[kept] = ids[j];
      weights[kept++] = weights[j];
    }
    ids.resize(kept);
  };

  if (params.top_p < 1) {
    const double total = ops.sum(weights.data(), int(ids.size()));
    // Together, tokens below the mean of the mass that top-p may drop weigh less than that mass, so none is needed.
    const float floor = float((1 - double(params.top_p)) * total / double(ids.size()) * 0.999);
    keep([&](float weight) { return weight >= floor; });
    std::vector<float>& sorted = scratch.sorted;
    sorted.assign(weights.begin(), weights.begin() + std::ptrdiff_t(ids.size()));
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    size_t needed = 0;
    for (double sum = 0; needed < sorted.size() && sum < params.top_p * total; ++needed) sum += double(sorted[needed]);
    const float least = sorted[needed - 1];
    // Among the tokens of the least weight, those with the lowest ids stay.
    auto ties = std::count(sorted.begin(), sorted.begin() + std::ptrdiff_t(needed), least);
    keep([&](float weight) { return weight > least || (weight == least && ties-- > 0); });
  }
  if (params.min_p > 0) keep([&](float weight) { return weight >= params.min_p; });

  // The first token at which the running sum passes u; if u lies in the rounding error of the sum, the last one with
  // any weight.
  const double u = random.uniform() * ops.sum(weights.data(), int(ids.size()));
  double running = 0;
  int32_t chosen = ids[0];
  for (size_t j = 0; j < ids.size() && running <= u; ++j) {
    if (weights[j] == 0) continue;
    chosen = ids[j];
    running += double(weights[j]);
  }
  return chosen;
}

// Computes the log-softmax of the raw logits for the chosen token and for the most likely ones.
void add_logprobs(std::span<const float> logits, const Top& top, int n_top, Sampled& sampled, SamplerScratch& scratch) {
  const Ops& ops = default_ops();
  const int n = int(logits.size());
  scratch.logits.assign(logits.begin(), logits.end());
  float* x = scratch.logits.data();
  if (top.nans || top.value > FLT_MAX) std::transform(x, x + n, x, made_finite);
  const float peak = std::min(top.value, FLT_MAX);

  // The n_top best so far, best first. A token enters only above the last one, so the lower id of equals stays first.
  n_top = std::min(n_top, n);
  sampled.top.reserve(size_t(n_top) + 1);
  for (int i = 0; n_top > 0 && i < n; ++i) {
    const float value = x[i];
    if (int(sampled.top.size()) == n_top && !(value > sampled.top.back().logprob)) continue;
    auto place = std::find_if(sampled.top.begin(), sampled.top.end(),
                              [value](const TokenLogprob& t) { return value > t.logprob; });
    sampled.top.insert(place, {i, value});
    if (int(sampled.top.size()) > n_top) sampled.top.pop_back();
  }
  const float chosen = x[sampled.chosen.token];
  double log_sum = 0;
  if (peak > kLowest) {
    ops.exp(x, peak, 1, n, x);
    log_sum = std::log(ops.sum(x, n));
  }
  auto logprob = [&](float logit) { return logit > kLowest ? float(double(logit) - double(peak) - log_sum) : kLowest; };
  sampled.chosen.logprob = logprob(chosen);
  for (TokenLogprob& t : sampled.top) t.logprob = logprob(t.logprob);
}

// False: greedy.
bool draws(const SamplingParams& params) { return params.temperature > 0 && params.top_k != 1; }

}  // namespace

SamplerState::SamplerState(const SamplingParams& params, int choice, std::span<const int32_t> prompt)
    : random(Random(params.seed).next() ^ (uint64_t(choice) * 0xd1342543de82ef95u)) {
  if (params.repetition_penalty == 1) return;
  prompt_tokens.assign(prompt.begin(), prompt.end());
  std::sort(prompt_tokens.begin(), prompt_tokens.end());
  prompt_tokens.erase(std::unique(prompt_tokens.begin(), prompt_tokens.end()), prompt_tokens.end());
}

bool more_than_a_draw(const SamplingParams& params) {
  const bool filters = params.top_k > 0 || params.top_p < 1 || params.min_p > 0;
  return has_penalties(params) || params.top_logprobs >= 0 || (draws(params) && filters);
}

Draw next_draw(const SamplingParams& params, SamplerState& state) {
  constexpr double kBelowOne = 0x1.fffffep-1;  // rounding to float must not give 1
  if (!draws(params)) return {};
  return {params.temperature, float(std::min(state.random.uniform(), kBelowOne))};
}

void repeat_draw(const SamplingParams& params, int32_t token, SamplerState& state) {
  (void)next_draw(params, state);
  record(params, token, state);
}

Sampled sample(std::span<const float> logits, const SamplingParams& params, SamplerState& state,
               SamplerScratch& scratch) {
  XPYD_CHECK(!logits.empty());
  const int n = int(logits.size());
  const Top raw = find_top(logits.data(), n);
  const bool penalties = has_penalties(params);
  const float* x = logits.data();
  Top top = raw;
  if (penalties || raw.nans || raw.value > FLT_MAX) {
    scratch.logits.resize(size_t(n));
    float* copy = scratch.logits.data();
    std::transform(x, x + n, copy, made_finite);
    if (penalties) penalise(params, state, copy, n);
    x = copy;
    top = find_top(x, n);
  }

  Sampled sampled;
  sampled.finite = raw.finite();
  sampled.chosen.token = top.id;
  if (draws(params) && top.value != kLowest)
    sampled.chosen.token = draw(x, n, top.value, params, state.random, scratch);
  if (params.top_logprobs >= 0) add_logprobs(logits, raw, params.top_logprobs, sampled, scratch);
  record(params, sampled.chosen.token, state);
  return sampled;
}

Sampled judge(std::span<const float> logits, int32_t token, int n_top, SamplerScratch& scratch) {
  XPYD_CHECK(token >= 0 && size_t(token) < logits.size(), std::to_string(token));
  const Top top = find_top(logits.data(), int(logits.size()));
  Sampled sampled;
  sampled.chosen.token = token;
  sampled.finite = top.finite();
  add_logprobs(logits, top, n_top, sampled, scratch);
  const float own = made_finite(logits[size_t(token)]);
  sampled.rank = 1 + int(std::count_if(logits.begin(), logits.end(), [own](float x) { return made_finite(x) > own; }));
  return sampled;
}

}  // namespace xpyd::model
