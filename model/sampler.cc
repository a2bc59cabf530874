// Sampling without sorting the vocabulary. Every filter (top-k, top-p, min-p) keeps the tokens
// above a threshold, found by counting in a radix of the float's bits; the draw then walks the kept
// tokens in the order of their ids.
//
// sample() is total. A NaN logit is read as -infinity and counted in Sampled::nan_logits, +infinity
// as the largest float; where no logit is above -infinity, the token is 0.
#include "model/sampler.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>

#include "base/status.h"
#include "model/ops.h"

namespace xpyd {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Peak {
  float value = kLowest;
  int nans = 0;
  bool infinite = false;
};

// Four chains, as one would wait for each comparison in turn.
Peak find_peak(const float* x, int n) {
  float best[4] = {kLowest, kLowest, kLowest, kLowest};
  int nans[4] = {};
  int i = 0;
  for (; i + 4 <= n; i += 4)
    for (int j = 0; j < 4; ++j) {
      const float v = x[i + j];
      best[j] = v > best[j] ? v : best[j];
      nans[j] += v != v;
    }
  for (; i < n; ++i) {
    best[0] = x[i] > best[0] ? x[i] : best[0];
    nans[0] += x[i] != x[i];
  }
  Peak peak;
  for (int j = 0; j < 4; ++j) {
    peak.value = std::max(peak.value, best[j]);
    peak.nans += nans[j];
  }
  peak.infinite = peak.value > FLT_MAX;
  return peak;
}

void make_finite(float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] = x[i] != x[i] ? kLowest : std::min(x[i], FLT_MAX);
}

double sum(const float* x, int n) {
  double lane[4] = {};
  int i = 0;
  for (; i + 4 <= n; i += 4)
    for (int j = 0; j < 4; ++j) lane[j] += double(x[i + j]);
  for (; i < n; ++i) lane[0] += double(x[i]);
  return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

// Unsigned order of these keys = order of the floats; no NaN.
uint32_t order_key(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x == 0 ? 0.0f : x);  // -0 and +0 are one value
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The heaviest tokens, by key and then by id, that together weigh at least `target`: those with a
// key above `key`, and the first `ties` tokens (in the order of ids) whose key equals it.
struct Cut {
  uint32_t key = 0;
  int ties = 0;
};

// One radix digit after the other: the bucket in which the target is reached is the key's next
// digit, and only its members count in the next pass.
template <class Key, class Weight>
Cut find_cut(int n, Key key, Weight weight, double target) {
  double bucket[2048];
  uint32_t prefix = 0, prefix_mask = 0;
  double above = 0, tie_weight = 1;
  for (const auto& [shift, bits] : {std::pair{21, 11}, {10, 11}, {0, 10}}) {
    const uint32_t digits = 1u << bits;
    std::fill(bucket, bucket + digits, 0.0);
    for (int i = 0; i < n; ++i) {
      const uint32_t k = key(i);
      if ((k & prefix_mask) == prefix) bucket[k >> shift & (digits - 1)] += weight(i);
    }
    uint32_t chosen = 0;  // where rounding keeps the sum short of the target: everything is kept
    double before = above;
    for (uint32_t d = digits; d-- > 0;) {
      if (bucket[d] == 0) continue;
      chosen = d;
      before = above;
      if (above + bucket[d] >= target) break;
      above += bucket[d];
    }
    above = before;
    prefix |= chosen << shift;
    prefix_mask |= (digits - 1) << shift;
    tie_weight = bucket[chosen];
  }
  // All ties weigh the same; they were summed, so their count comes from a last look.
  int ties = 0;
  double each = 0;
  for (int i = 0; i < n; ++i)
    if (key(i) == prefix) {
      ++ties;
      each = weight(i);
    }
  if (above + tie_weight > target && each > 0)
    ties = std::clamp(int(std::ceil((target - above) / each)), 1, ties);
  return {prefix, ties};
}

// Penalties on the logits of tokens that were seen. Counts are few beside the vocabulary.
void penalise(const SamplingParams& params, const SamplerState& state, float* x, int n) {
  if (params.repetition_penalty != 1) {
    auto repeat = [&](int32_t id) {
      if (id < 0 || id >= n) return;
      x[id] = x[id] > 0 ? x[id] / params.repetition_penalty : x[id] * params.repetition_penalty;
    };
    for (int32_t id : state.prompt_tokens) repeat(id);
    for (const auto& [id, count] : state.output_counts)
      if (!std::binary_search(state.prompt_tokens.begin(), state.prompt_tokens.end(), id))
        repeat(id);
  }
  if (params.presence_penalty != 0 || params.frequency_penalty != 0)
    for (const auto& [id, count] : state.output_counts)
      if (id >= 0 && id < n)
        x[id] -= params.presence_penalty + params.frequency_penalty * float(count);
}

bool has_penalties(const SamplingParams& params) {
  return params.repetition_penalty != 1 || params.presence_penalty != 0 ||
         params.frequency_penalty != 0;
}

int32_t first_of(const float* x, int n, float value) {
  for (int i = 0; i < n; ++i)
    if (x[i] == value) return i;
  return 0;
}

// Draws from softmax(x / temperature) after the filters. `weights` [n] is scratch and may be x.
int32_t draw(const float* x, int n, float peak, const SamplingParams& params, Random& random,
             SamplerScratch& scratch) {
  // The candidates: ids[0..m), ascending, or all tokens when top-k is off.
  const int32_t* ids = nullptr;
  int m = n;
  if (params.top_k > 0 && params.top_k < n) {
    auto key = [&](int i) { return order_key(x[i]); };
    Cut cut = find_cut(
        n, key, [](int) { return 1.0; }, params.top_k);
    scratch.order.resize(size_t(n));
    m = 0;
    for (int i = 0; i < n; ++i) {
      const uint32_t k = key(i);
      if (k > cut.key || (k == cut.key && cut.ties-- > 0)) scratch.order[size_t(m++)] = i;
    }
    ids = scratch.order.data();
  }

  // Weights relative to the most likely token, whose weight is 1. At x == weights this goes upwards
  // through ascending ids, so that nothing is overwritten before it is read.
  scratch.logits.resize(size_t(n));
  float* weights = scratch.logits.data();
  if (ids)
    for (int j = 0; j < m; ++j) weights[j] = x[ids[j]];
  else if (weights != x)
    std::copy(x, x + n, weights);
  // A temperature below 1e-6 is greedy but for ties, and its inverse stays finite.
  default_ops().exp(weights, peak, 1 / std::max(params.temperature, 1e-6f), m, weights);

  if (params.top_p < 1) {
    auto key = [&](int j) { return std::bit_cast<uint32_t>(weights[j]); };
    auto weight = [&](int j) { return double(weights[j]); };
    Cut cut = find_cut(m, key, weight, params.top_p * sum(weights, m));
    for (int j = 0; j < m; ++j) {
      const uint32_t k = key(j);
      if (!(k > cut.key || (k == cut.key && cut.ties-- > 0))) weights[j] = 0;
    }
  }
  if (params.min_p > 0)
    for (int j = 0; j < m; ++j)
      if (weights[j] < params.min_p) weights[j] = 0;

  // The first token at which the running sum passes u; whole blocks are stepped over.
  const double u = random.uniform() * sum(weights, m);
  constexpr int kBlock = 256;
  double passed = 0;
  int last = 0;
  for (int begin = 0; begin < m; begin += kBlock) {
    const int size = std::min(kBlock, m - begin);
    const double block = sum(weights + begin, size);
    if (block == 0) continue;
    if (passed + block <= u) {
      passed += block;
      last = begin + size - 1;
      continue;
    }
    double running = passed;
    for (int j = begin; j < begin + size; ++j) {
      if (weights[j] == 0) continue;
      running += double(weights[j]);
      last = j;
      if (running > u) return ids ? ids[j] : j;
    }
    passed += block;
  }
  while (last > 0 && weights[last] == 0) --last;  // u lies in the rounding error of the last sum
  return ids ? ids[last] : last;
}

// Log-softmax of the raw logits for the chosen token and the most likely ones.
void add_logprobs(std::span<const float> logits, const Peak& peak, int n_top, Sampled& sampled,
                  SamplerScratch& scratch) {
  const int n = int(logits.size());
  scratch.logits.assign(logits.begin(), logits.end());
  float* x = scratch.logits.data();
  if (peak.nans || peak.infinite) make_finite(x, n);
  const float top = std::min(peak.value, FLT_MAX);

  // The n_top best so far, best first: a token enters only above the last one, so that the lower id
  // of equals stands first.
  n_top = std::min(n_top, n);
  sampled.top.clear();
  sampled.top.reserve(size_t(n_top) + 1);
  for (int i = 0; n_top > 0 && i < n; ++i) {
    if (int(sampled.top.size()) == n_top && !(x[i] > sampled.top.back().logprob)) continue;
    auto place = std::find_if(sampled.top.begin(), sampled.top.end(),
                              [&](const TokenLogprob& t) { return x[i] > t.logprob; });
    sampled.top.insert(place, {i, x[i]});
    if (int(sampled.top.size()) > n_top) sampled.top.pop_back();
  }
  const float chosen = x[sampled.chosen.token];
  double log_sum = 0;
  if (top > kLowest) {
    default_ops().exp(x, top, 1, n, x);
    log_sum = std::log(sum(x, n));
  }
  auto logprob = [&](float logit) {
    return logit > kLowest ? float(double(logit) - double(top) - log_sum) : kLowest;
  };
  sampled.chosen.logprob = logprob(chosen);
  for (TokenLogprob& t : sampled.top) t.logprob = logprob(t.logprob);
}

}  // namespace

SamplerState::SamplerState(const SamplingParams& params, int choice,
                           std::span<const int32_t> prompt)
    : random(Random(params.seed).next() ^ (uint64_t(choice) * 0xd1342543de82ef95u)) {
  if (params.repetition_penalty == 1) return;
  prompt_tokens.assign(prompt.begin(), prompt.end());
  std::sort(prompt_tokens.begin(), prompt_tokens.end());
  prompt_tokens.erase(std::unique(prompt_tokens.begin(), prompt_tokens.end()), prompt_tokens.end());
}

Sampled sample(std::span<const float> logits, const SamplingParams& params, SamplerState& state,
               SamplerScratch& scratch) {
  XPYD_CHECK(!logits.empty());
  const int n = int(logits.size());
  const Peak raw = find_peak(logits.data(), n);
  Sampled sampled;
  sampled.nan_logits = raw.nans;

  const float* x = logits.data();
  float peak = raw.value;
  if (has_penalties(params) || raw.nans || raw.infinite) {
    scratch.logits.assign(logits.begin(), logits.end());
    float* copy = scratch.logits.data();
    make_finite(copy, n);
    if (has_penalties(params)) {
      penalise(params, state, copy, n);
      make_finite(copy, n);  // 0 * infinity, or beyond the largest float
    }
    x = copy;
    peak = find_peak(x, n).value;
  }

  if (peak > kLowest) {
    // Equal bits in the greedy case and in the draw: one argmax, the lowest id of equals.
    sampled.chosen.token = params.temperature <= 0 || params.top_k == 1
                               ? first_of(x, n, peak)
                               : draw(x, n, peak, params, state.random, scratch);
  }
  if (params.top_logprobs >= 0) add_logprobs(logits, raw, params.top_logprobs, sampled, scratch);
  if (has_penalties(params)) ++state.output_counts[sampled.chosen.token];
  return sampled;
}

}  // namespace xpyd
