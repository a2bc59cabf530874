// Sampling without sorting the vocabulary. Every filter (top-k, top-p, min-p) keeps the tokens above a threshold, which
// is found by counting in a radix of the float's bits. The draw then goes through the kept tokens in the order of their
// ids.
//
// sample() accepts any logits. It reads NaN as -infinity, and +infinity as the largest float. If no logit is above
// -infinity, the token is 0.
#include "model/sampler.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>

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

// Keys whose unsigned order is the order of the floats. Requires: x is not NaN.
uint32_t order_key(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x == 0 ? 0.0f : x);  // -0 and +0 are one value
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The heaviest tokens, by key and then by id, that weigh at least `target` together: the tokens with a key above `key`,
// and the first `ties` tokens, by id, whose key equals it.
struct Cut {
  uint32_t key = 0;
  int ties = 0;
};

// Finds one radix digit after the other. The bucket in which the sum reaches the target is the key's next digit; only
// its members count in the next pass.
template <class Key, class Weight>
Cut find_cut(int n, Key key, Weight weight, double target) {
  constexpr uint32_t kDigits = 256;
  double bucket[kDigits];
  uint32_t prefix = 0, prefix_mask = 0;
  double above = 0, tie_weight = 1;
  for (int shift = 24; shift >= 0; shift -= 8) {
    std::fill(bucket, bucket + kDigits, 0.0);
    for (int i = 0; i < n; ++i) {
      const uint32_t k = key(i);
      if ((k & prefix_mask) == prefix) bucket[k >> shift & (kDigits - 1)] += weight(i);
    }
    uint32_t chosen = 0;  // if rounding keeps the sum below the target, everything is kept
    double before = above;
    for (uint32_t d = kDigits; d-- > 0;) {
      if (bucket[d] == 0) continue;
      chosen = d;
      before = above;
      if (above + bucket[d] >= target) break;
      above += bucket[d];
    }
    above = before;
    prefix |= chosen << shift;
    prefix_mask |= (kDigits - 1) << shift;
    tie_weight = bucket[chosen];
  }
  // All ties weigh the same; a last pass counts them.
  int ties = 0;
  double each = 0;
  for (int i = 0; i < n; ++i)
    if (key(i) == prefix) {
      ++ties;
      each = weight(i);
    }
  if (above + tie_weight > target && each > 0) ties = std::clamp(int(std::ceil((target - above) / each)), 1, ties);
  return {prefix, ties};
}

// Finds the k-th highest logit. For small k it keeps a sorted list, which few tokens enter.
Cut find_top_k(const float* x, int n, int k) {
  constexpr int kList = 128;
  if (k > kList)
    return find_cut(
        n, [x](int i) { return order_key(x[i]); }, [](int) { return 1.0; }, k);
  float list[kList];  // descending
  int size = 0;
  for (int i = 0; i < n; ++i) {
    if (size == k && !(x[i] > list[k - 1])) continue;
    int at = size < k ? size++ : k - 1;
    for (; at > 0 && x[i] > list[at - 1]; --at) list[at] = list[at - 1];
    list[at] = x[i];
  }
  const float last = list[k - 1];
  return {order_key(last), int(std::count(list, list + k, last))};
}

// Applies the rules to logits without NaN.
void apply(const TokenRules& rules, std::span<const int32_t> output, float* x, int n) {
  const auto forbid = [&](int32_t id) {
    if (id >= 0 && id < n) x[id] = kLowest;
  };
  if (!rules.allowed.empty()) {
    int next = 0;
    for (int32_t id : rules.allowed) {
      if (id < next || id >= n) continue;
      std::fill(x + next, x + id, kLowest);
      next = id + 1;
    }
    std::fill(x + next, x + n, kLowest);
  }
  for (const TokenBias& b : rules.bias)
    if (b.token >= 0 && b.token < n) x[b.token] = made_finite(x[b.token] + b.bias);
  for (const BadWord& word : rules.bad_words) {
    const std::span<const int32_t> begin = std::span(word.tokens).first(word.tokens.size() - 1);
    if (begin.size() <= output.size() && std::ranges::equal(begin, output.last(begin.size())))
      forbid(word.tokens.back());
  }
  if (output.size() < size_t(std::max(rules.min_tokens, 0)))
    for (int32_t id : rules.end_tokens) forbid(id);
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
  if (params.rules) state.output.push_back(token);
}

// Tokens that may still be drawn: ascending ids, and weights relative to 1 for the most likely token. The arrays lie in
// the scratch; shrinking moves entries down only.
struct Candidates {
  int32_t id(int j) const { return all ? j : ids[j]; }
  template <class Keep>
  void shrink(Keep keep) {
    int kept = 0;
    for (int j = 0; j < n; ++j) {
      const int32_t token = id(j);
      const float weight = weights[j];
      ids[kept] = token;
      weights[kept] = weight;
      kept += keep(weight) ? 1 : 0;
    }
    n = kept;
    all = false;
  }
  int n;
  int32_t* ids;  // not set while `all`
  float* weights;
  bool all;
};

// Draws from softmax(x / temperature) after the filters. x may be scratch.logits.
int32_t draw(const float* x, int n, float peak, const SamplingParams& params, Random& random, SamplerScratch& scratch) {
  const Ops& ops = default_ops();
  scratch.logits.resize(size_t(n));
  scratch.order.resize(size_t(n));
  Candidates left{n, scratch.order.data(), scratch.logits.data(), true};
  if (params.top_k > 0 && params.top_k < n) {
    Cut cut = find_top_k(x, n, params.top_k);
    left.n = 0;
    left.all = false;
    for (int i = 0; i < n; ++i) {
      const uint32_t key = order_key(x[i]);
      if (key < cut.key || (key == cut.key && cut.ties-- <= 0)) continue;
      left.ids[left.n] = i;
      left.weights[left.n++] = x[i];
    }
  } else if (left.weights != x) {
    std::copy(x, x + n, left.weights);
  }
  // A temperature below 1e-6 acts as greedy except for ties, and its inverse stays finite.
  ops.exp(left.weights, peak, 1 / std::max(params.temperature, 1e-6f), left.n, left.weights);

  if (params.top_p < 1) {
    const double total = ops.sum(left.weights, left.n);
    // Together, tokens below the mean of the mass that top-p may drop weigh less than that mass, so none is needed.
    const float floor = float((1 - double(params.top_p)) * total / left.n * 0.999);
    left.shrink([&](float weight) { return weight >= floor; });
    auto key = [&](int j) { return std::bit_cast<uint32_t>(left.weights[j]); };
    auto weight = [&](int j) { return double(left.weights[j]); };
    Cut cut = find_cut(left.n, key, weight, params.top_p * total);
    left.shrink([&](float w) {
      const uint32_t k = std::bit_cast<uint32_t>(w);
      return k > cut.key || (k == cut.key && cut.ties-- > 0);
    });
  }
  if (params.min_p > 0) left.shrink([&](float weight) { return weight >= params.min_p; });

  // Returns the first token at which the running sum passes u, and skips whole blocks. If u lies in the rounding error
  // of the sum, it returns the last token with any weight.
  const double u = random.uniform() * ops.sum(left.weights, left.n);
  constexpr int kBlock = 256;
  double passed = 0;
  int last = 0;
  for (int begin = 0; begin < left.n; begin += kBlock) {
    const int size = std::min(kBlock, left.n - begin);
    const double block = ops.sum(left.weights + begin, size);
    if (passed + block > u) {
      double running = passed;
      for (int j = begin; j < begin + size; ++j) {
        running += double(left.weights[j]);
        if (left.weights[j] > 0) last = j;
        if (left.weights[j] > 0 && running > u) return left.id(j);
      }
    } else if (block > 0) {
      last = begin + size - 1;
    }
    passed += block;
  }
  while (last > 0 && left.weights[last] == 0) --last;
  return left.id(last);
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

}  // namespace

SamplerState::SamplerState(const SamplingParams& params, int choice, std::span<const int32_t> prompt)
    : random(Random(params.seed).next() ^ (uint64_t(choice) * 0xd1342543de82ef95u)) {
  if (params.repetition_penalty == 1) return;
  prompt_tokens.assign(prompt.begin(), prompt.end());
  std::sort(prompt_tokens.begin(), prompt_tokens.end());
  prompt_tokens.erase(std::unique(prompt_tokens.begin(), prompt_tokens.end()), prompt_tokens.end());
}

bool more_than_a_draw(const SamplingParams& params) {
  return params.rules || has_penalties(params) || params.top_logprobs >= 0;
}

Draw next_draw(const SamplingParams& params, SamplerState& state) {
  Draw draw{params.temperature, params.top_k, params.top_p, params.min_p, 0};
  constexpr double kBelowOne = 0x1.fffffep-1;  // rounding to float must not give 1
  if (params.temperature > 0 && params.top_k != 1) draw.uniform = float(std::min(state.random.uniform(), kBelowOne));
  return draw;
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
  if (params.rules || penalties || raw.nans || raw.value > FLT_MAX) {
    scratch.logits.resize(size_t(n));
    float* copy = scratch.logits.data();
    std::transform(x, x + n, copy, made_finite);
    if (params.rules) apply(*params.rules, state.output, copy, n);
    if (penalties) penalise(params, state, copy, n);
    x = copy;
    top = find_top(x, n);
  }

  Sampled sampled;
  sampled.chosen.token = top.id;
  if (top.value == kLowest && params.rules && !params.rules->allowed.empty())
    sampled.chosen.token = std::clamp(params.rules->allowed.front(), 0, n - 1);
  const bool greedy = params.temperature <= 0 || params.top_k == 1 || top.value == kLowest;
  if (!greedy) sampled.chosen.token = draw(x, n, top.value, params, state.random, scratch);
  if (params.top_logprobs >= 0) add_logprobs(logits, raw, params.top_logprobs, sampled, scratch);
  record(params, sampled.chosen.token, state);
  return sampled;
}

Sampled judge(std::span<const float> logits, int32_t token, int n_top, SamplerScratch& scratch) {
  XPYD_CHECK(token >= 0 && size_t(token) < logits.size(), std::to_string(token));
  const Top top = find_top(logits.data(), int(logits.size()));
  Sampled sampled;
  sampled.chosen.token = token;
  add_logprobs(logits, top, n_top, sampled, scratch);
  const float own = made_finite(logits[size_t(token)]);
  sampled.rank = 1 + int(std::count_if(logits.begin(), logits.end(), [own](float x) { return made_finite(x) > own; }));
  return sampled;
}

}  // namespace xpyd::model
