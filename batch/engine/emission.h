// Emission turns logits into tokens, makes their text, and sends their events to the sinks.
//
// Thread safety: the engine's thread.
#pragma once

#include "batch/engine/engine_parts.h"
#include "batch/sequence.h"
#include "model/sampler.h"

namespace xpyd::batch {

class Emission {
 public:
  Emission(const EngineOptions& options, int vocab, EngineStats& stats)
      : options_(options), vocab_(size_t(vocab)), stats_(stats) {}

  // Samples the next token of a sequence whose choice is open. `row`, here and below: [vocab], its logits.
  Sampled draw(Sequence& sequence, const float* row) {
    return sample({row, vocab_}, sequence.request->sampling, sequence.sampler, scratch_);
  }
  // Computes the logprob of token `at` of the prompt.
  void judge_prompt(Sequence& sequence, int at, const float* row) {
    sequence.prompt_logprobs[size_t(at)] = judge({row, vocab_}, sequence.tokens[size_t(at)],
                                                 sequence.request->prompt_logprobs, scratch_);
  }
  // Stores `sampled` as token `at`, which may hold a draft, and sends its event. True: the sequence has ended. It ends
  // with an error if the logits are not finite.
  bool accept(Sequence& sequence, int at, Sampled sampled, uint64_t row_hash, double now);

 private:
  void set_text_and_end(Sequence& sequence, TokenEvent& event, int n_output) const;

  const EngineOptions& options_;
  const size_t vocab_;
  EngineStats& stats_;
  SamplerScratch scratch_;
};

}  // namespace xpyd::batch
