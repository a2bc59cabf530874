// What flows through an instance: Request in, TokenEvent out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/sampler.h"

namespace xpyd::batch {

// One user request. Made by the frontend, never changed afterwards, shared by whoever works on it.
struct Request {
  uint64_t id = 0;              // unique in this process
  std::vector<int32_t> prompt;  // token ids, at least one; prompt + max_tokens fits the context
  SamplingParams sampling;
  int max_tokens = 16;       // output tokens, at least 1
  int min_tokens = 0;        // no stop before that many output tokens; sampling.rules hold end tokens back so long
  int n = 1;                 // choices, 1..8
  int prompt_logprobs = -1;  // 0..20: logprobs of the prompt's tokens, with that many alternatives
  bool ignore_eos = false;
  std::vector<std::string> stop;  // stop strings
  std::vector<int32_t> stop_token_ids;
  bool include_stop_text = false;        // the stop string is part of the text
  bool skip_special_tokens = true;       // in the text
  bool prompt_is_text_prefix = true;     // the output continues the prompt's text (no leading space is stripped)
  int priority = 0;                      // lower runs earlier
  uint64_t cache_salt = 0;               // sequences of different salts share no prefix; of a session its own
  std::string session_id;                // multi-turn: the prompt holds the conversation so far
  double arrival_s = 0;                  // Clock seconds, at the frontend
  double deadline_s = 0;                 // Clock seconds; 0 = none. Past it the request ends with `timeout`
  double slo_ttft_s = 0, slo_tbt_s = 0;  // what its client wants; 0: what the server says
  int most_drafts = -1;                  // of one step; 0: none; -1: as many as the engine's options say
};

enum class FinishReason : uint8_t { none, stop, length, abort, timeout, error, refused };
const char* finish_reason_name(FinishReason reason);

// One output token of one choice. Choice c of a request ends with exactly one event whose finish !=
// none; an end without a token (abort, timeout, error, refused) has token -1.
struct TokenEvent {
  uint64_t request_id = 0;
  int choice = 0;
  int32_t token = -1;
  std::string text;  // text that became certain with this token: may be empty, is valid UTF-8
  FinishReason finish = FinishReason::none;
  std::string stop_text;    // finish == stop by a stop string: which one
  int32_t stop_token = -1;  // finish == stop by one of stop_token_ids: which one (not for EOS)
  std::string error;        // finish == error, refused: what happened, and why
  double retry_s = 0;       // finish == refused: when it may be otherwise
  bool has_logprobs = false;
  Sampled sampled;  // logprobs when asked for
  // In the first event of a request that asked: one for each prompt token; the first's is NaN, as
  // nothing is before it.
  std::vector<Sampled> prompt_logprobs;
  int cached_tokens = 0;     // prompt tokens whose KV was reused; in every event of the request
  int preemptions = 0;       // of this choice so far
  uint64_t logits_hash = 0;  // with finish: chained hash of the logits rows sampled for this choice
  double queued_s = 0, scheduled_s = 0,
         time_s = 0;  // Clock: arrival at the engine, first step, this token
};

// Receives the events of one request, from any engine thread; must not block.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void on_event(TokenEvent event) = 0;
};

}  // namespace xpyd::batch
