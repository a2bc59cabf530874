// The two structs that flow through an instance: a Request goes in, TokenEvents come out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/sampler.h"

namespace xpyd::batch {

// One user request. The frontend makes it and nobody changes it afterwards; every thread that serves it shares it.
struct Request {
  uint64_t id = 0;              // unique in this process
  std::vector<int32_t> prompt;  // token ids, at least one; prompt + max_tokens fits the context
  SamplingParams sampling;
  int max_tokens = 16;       // output tokens, at least 1
  int n = 1;                 // choices, 1..8
  int prompt_logprobs = -1;  // 0..20: return logprobs of the prompt's tokens with that many alternatives; -1: none
  bool ignore_eos = false;
  std::vector<std::string> stop;  // stop strings
  std::vector<int32_t> stop_token_ids;
  bool include_stop_text = false;     // the stop string is part of the text
  bool skip_special_tokens = true;    // in the text
  bool prompt_is_text_prefix = true;  // the output continues the prompt's text, so a leading space is kept
  int priority = 0;                   // lower runs earlier
  uint64_t cache_salt = 0;            // prefixes are shared only between equal salts; each session has its own
  double arrival_s = 0;               // Clock seconds, at the frontend
  double deadline_s = 0;              // Clock seconds; 0 = none. After it the request ends with `timeout`
};

enum class FinishReason : uint8_t { none, stop, length, abort, timeout, error, refused };
const char* finish_reason_name(FinishReason reason);

// One output token of one choice. Each choice of a request ends with exactly one event whose `finish` is not none. An
// end without a token (abort, timeout, error, refused) has token -1.
struct TokenEvent {
  uint64_t request_id = 0;
  int choice = 0;
  int32_t token = -1;
  std::string text;  // text that this token made final: valid UTF-8, may be empty
  FinishReason finish = FinishReason::none;
  std::string stop_text;    // finish == stop by a stop string: that string
  int32_t stop_token = -1;  // finish == stop by one of stop_token_ids: that token; -1 for EOS
  std::string error;        // finish == error or refused: the reason
  bool has_logprobs = false;
  Sampled sampled;  // its logprobs are filled when the request asks for them
  // One entry per prompt token, in the first event of a request that asked for them. The first entry is NaN, because no
  // token precedes it.
  std::vector<Sampled> prompt_logprobs;
  int cached_tokens = 0;     // prompt tokens whose KV was reused; the same in every event of the request
  uint64_t logits_hash = 0;  // with finish: chained hash of the logits rows from which this choice was sampled
  double queued_s = 0, scheduled_s = 0,
         time_s = 0;  // Clock: arrival at the engine, first step, this token
};

// Receives the events of one request. An engine thread calls it, and it must not block.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void on_event(TokenEvent event) = 0;
};

}  // namespace xpyd::batch
