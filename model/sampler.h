// Logits -> one token. The order of operations: penalties, temperature, top-k, top-p, min-p, draw.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/random.h"
#include "base/rooms.h"

namespace xpyd::model {

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
};

// One token's choice where no penalty and no logprob is asked for; a model may make it itself (model.h).
struct Draw {
  float temperature = 0;  // 0 = greedy: the lowest id among the highest logits
  int top_k = 0;          // 0 = off
  float top_p = 1, min_p = 0;
  float uniform = 0;  // in [0, 1): where in the mass of the kept tokens, by ascending id, the draw falls
};

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;  // log-softmax of the raw logits, before penalties and temperature
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

  SamplerState() = default;
  // `choice` is the index among n choices: each has its own stream of the same seed.
  SamplerState(const SamplingParams& params, int choice, std::span<const int32_t> prompt);
};

// Whether sample() needs more than a Draw says: penalties, logprobs.
bool more_than_a_draw(const SamplingParams& params);
// The next choice as a Draw; takes from state.random what sample() would.
Draw next_draw(const SamplingParams& params, SamplerState& state);

// What sample() did to `state` when it chose `token`: for a sequence that goes on elsewhere.
void repeat_draw(const SamplingParams& params, int32_t token, SamplerState& state);

// Scratch that a caller reuses from call to call. Once it has grown to the vocabulary, sampling allocates only what
// penalties (a new entry of output_counts) and top_logprobs (Sampled::top) need.
struct SamplerScratch {
  std::vector<float> logits;
  std::vector<int32_t> order;
};

// Chooses a token from logits [vocab] and records it in `state`. Deterministic in (logits, params,
// state). Total: any bits of logits give a token. Among equals the lower id wins. +infinity is read
// as the largest float; where every logit is -infinity or NaN the token is 0, its logprob
// -infinity. params are taken as valid: the API's edge checks the ranges above.
Sampled sample(std::span<const float> logits, const SamplingParams& params, SamplerState& state,
               SamplerScratch& scratch);

// What these logits say of a token that is given, as one of the prompt.
Sampled judge(std::span<const float> logits, int32_t token, int n_top, SamplerScratch& scratch);

}  // namespace xpyd::model
