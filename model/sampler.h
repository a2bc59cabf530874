// Logits -> one token. The order of operations: rules, penalties, temperature, top-k, top-p, min-p, draw.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/random.h"
#include "base/rooms.h"

namespace xpyd::model {

struct TokenBias {
  int32_t token = 0;
  float bias = 0;  // added to its logit
};

struct BadWord {
  std::vector<int32_t> tokens;  // at least one: the last one may not follow the others
};

// What a request says of single tokens. A token that a rule forbids has the logit -infinity, whatever penalties and
// bias say of it. Where nothing is left, the first allowed token is chosen.
struct TokenRules {
  std::vector<int32_t> allowed;     // ids, ascending: no other may be chosen; empty: all may
  std::vector<TokenBias> bias;      // of distinct tokens
  std::vector<BadWord> bad_words;   // in the output; the prompt's tokens do not count
  std::vector<int32_t> end_tokens;  // none of them may be among
  int min_tokens = 0;               // … the first so many tokens of the output
};

struct SamplingParams {
  float temperature = 1;         // 0 = greedy: the lowest id among the highest logits
  int top_k = 0;                 // 0 = off
  float top_p = 1;               // (0, 1]
  float min_p = 0;               // [0, 1], relative to the most likely token
  float repetition_penalty = 1;  // > 0, on prompt and output tokens (CTRL, section 4.1)
  float presence_penalty = 0;    // [-2, 2], once per distinct output token
  float frequency_penalty = 0;   // [-2, 2], times the output count
  uint64_t seed = 0;
  int top_logprobs = -1;  // -1: no logprobs; 0..20: that many alternatives
  std::shared_ptr<const TokenRules> rules = nullptr;  // null: every token may be chosen
};

// One token's choice where no rule, no penalty and no logprob is asked for; a model may make it itself (model.h).
struct Draw {
  float temperature = 0;  // 0 = greedy: the lowest id among the highest logits
  int top_k = 0;          // 0 = off
  float top_p = 1, min_p = 0;
  float uniform = 0;  // in [0, 1): where in the mass of the kept tokens, by ascending id, the draw falls
};

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;  // log-softmax of the raw logits, before rules, penalties and temperature
};

struct Sampled {
  TokenLogprob chosen;
  std::vector<TokenLogprob> top;  // most likely first; params.top_logprobs entries, or empty
  int nan_logits = 0;             // NaN among the logits, read as -infinity: a broken model or corrupt KV
  int rank = 0;                   // of a prompt's token: 1 + the number of logits above its own; else 0
};

// One sequence's sampling state: its generator and the counts that penalties need. A plain value:
// it moves from the prefill to the decode instance with the sequence.
struct SamplerState {
  Random random;
  std::unordered_map<int32_t, int> output_counts;  // kept only when a penalty is on
  std::vector<int32_t> prompt_tokens;              // distinct; kept only with a repetition penalty
  std::vector<int32_t> output;                     // so far; kept only with rules

  SamplerState() = default;
  // `choice` is the index among n choices: each has its own stream of the same seed.
  SamplerState(const SamplingParams& params, int choice, std::span<const int32_t> prompt);
};

// Whether sample() needs more than a Draw says: rules, penalties, logprobs.
bool more_than_a_draw(const SamplingParams& params);
// The next choice as a Draw; takes from state.random what sample() would.
Draw next_draw(const SamplingParams& params, SamplerState& state);

// What sample() did to `state` when it chose `token`: for a sequence that goes on elsewhere.
void repeat_draw(const SamplingParams& params, int32_t token, SamplerState& state);

// Scratch that a caller reuses from call to call. Once it has grown to the vocabulary, sampling allocates only what
// penalties and rules (a new entry of output_counts, of output) and top_logprobs (Sampled::top) need.
struct SamplerScratch {
  std::vector<float> logits;
  std::vector<int32_t> order;
};

// Chooses a token from logits [vocab] and records it in `state`. Deterministic in (logits, params,
// state). Total: any bits of logits give a token. Among equals the lower id wins. +infinity is read
// as the largest float; where every logit is -infinity or NaN the token is 0 (with rules: the first allowed),
// its logprob -infinity. params are taken as valid: the API's edge checks the ranges above.
Sampled sample(std::span<const float> logits, const SamplingParams& params, SamplerState& state,
               SamplerScratch& scratch);

// What these logits say of a token that is given, as one of the prompt.
Sampled judge(std::span<const float> logits, int32_t token, int n_top, SamplerScratch& scratch);

}  // namespace xpyd::model
