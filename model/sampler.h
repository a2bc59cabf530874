// Turns logits into one token. The order is: penalties, temperature, top-k, top-p, min-p, draw.
//
// Thread safety: plain functions; a SamplerState and a SamplerScratch have one user at a time.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/random.h"
#include "base/rooms.h"

namespace xpyd::model {

struct SamplingParams {
  float temperature = 1;         // 0: greedy, the lowest id among the highest logits
  int top_k = 0;                 // 0: off
  float top_p = 1;               // (0, 1]
  float min_p = 0;               // [0, 1], relative to the most likely token
  float repetition_penalty = 1;  // > 0, on prompt and output tokens (CTRL, section 4.1)
  float presence_penalty = 0;    // [-2, 2], once per distinct output token
  float frequency_penalty = 0;   // [-2, 2], times the output count
  uint64_t seed = 0;
  int top_logprobs = -1;  // number of alternatives, 0 to 20; -1: no logprobs
};

// One token's choice from all tokens; a device may make it itself (model.h).
struct Draw {
  float temperature = 0;  // 0: greedy, the lowest id among the highest logits
  float uniform = 0;      // in [0, 1): position of the draw in the tokens' mass, by ascending id
};

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;  // log-softmax of the raw logits, before penalties and temperature
};

struct Sampled {
  TokenLogprob chosen;
  std::vector<TokenLogprob> top;  // most likely first; params.top_logprobs entries, or empty
  int rank = 0;                   // for a prompt token: 1 + the number of higher logits; else 0
  bool finite = true;             // false: a logit was NaN or +infinity, or none was above -infinity
};

// One sequence's sampling state: the random generator and the counts that penalties need. It is a plain value and moves
// from the prefill to the decode instance with the sequence.
struct SamplerState {
  Random random;
  std::unordered_map<int32_t, int> output_counts;  // kept only with a penalty
  std::vector<int32_t> prompt_tokens;              // distinct; kept only with a repetition penalty

  SamplerState() = default;
  // `choice` is the index among the request's n choices; each has its own stream of the same seed.
  SamplerState(const SamplingParams& params, int choice, std::span<const int32_t> prompt);
};

// True if sample() needs more than a Draw holds: penalties, logprobs, or a filter at a temperature.
bool more_than_a_draw(const SamplingParams& params);
// Returns the next choice as a Draw and takes from state.random as much as sample() would.
Draw next_draw(const SamplingParams& params, SamplerState& state);

// Updates `state` as sample() did when it chose `token`, for a sequence that continues elsewhere.
void repeat_draw(const SamplingParams& params, int32_t token, SamplerState& state);

// Scratch that a caller reuses. Once it has grown to the vocabulary, sampling allocates only entries of output_counts
// (penalties) and Sampled::top (top_logprobs).
struct SamplerScratch {
  std::vector<float> logits, sorted;
  std::vector<int32_t> order;
};

// Chooses a token from logits [vocab] and records it in `state`. The result depends on (logits, params, state) only,
// and any bits of logits give a token. The lower id wins among equals. +infinity is read as the largest float. If every
// logit is -infinity or NaN, the token is 0 and its logprob -infinity.
// Requires: params are in the ranges above; the API checks them.
Sampled sample(std::span<const float> logits, const SamplingParams& params, SamplerState& state,
               SamplerScratch& scratch);

// Returns the logprob, the rank and the n_top best tokens for a given token, such as one of the prompt.
Sampled judge(std::span<const float> logits, int32_t token, int n_top, SamplerScratch& scratch);

}  // namespace xpyd::model
