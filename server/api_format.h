// Events -> OpenAI's JSON: plain functions, each one answer or one stream event.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "batch/request.h"
#include "disagg/service.h"
#include "model/tokenizer.h"
#include "server/api_parse.h"

namespace xpyd {

std::string error_body(const ApiError& error);

struct Usage {
  int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
};

// The parts of a choice that one answer or one stream event carries: a whole choice, or one token
// of it.
struct ChoicePart {
  int index = 0;
  std::string_view text;
  bool first = true;  // chat stream: carries the role
  bool with_logprobs = false;
  std::span<const Sampled> logprobs;                       // one for each token of the part
  std::span<const int32_t> text_offsets;                   // completions: code points before each token's text
  const std::vector<int32_t>* token_ids = nullptr;         // return_token_ids
  const std::vector<int32_t>* prompt_token_ids = nullptr;  // return_token_ids, first part
  const std::vector<Sampled>* prompt_logprobs = nullptr;   // prompt_logprobs
  FinishReason finish = FinishReason::none;
  std::string_view stop_text;  // why it stopped, when not by EOS
  int32_t stop_token = -1;
};

// What all answers of one call share. Pieces of JSON are made once.
class AnswerFormat {
 public:
  AnswerFormat() = default;
  AnswerFormat(const GenerationCall& call, const ServedModel& model, const std::string& id, int64_t created_unix_s);
  std::string whole(std::span<const ChoicePart> choices, const Usage& usage) const;
  // `usage`: null where the client did not ask for usage in every event.
  std::string chunk(const ChoicePart& choice, const Usage* usage) const;
  std::string usage_chunk(const Usage& usage) const;  // choices: []

 private:
  std::string head(const char* object) const;
  bool chat_ = false, include_usage_ = false;
  const Tokenizer* tokenizer_ = nullptr;
  std::string id_, shared_;  // shared_: the fields between object and choices
};

// One server-sent event: a single data line.
std::string sse_event(std::string_view json);

// Text of one token for a JSON string: bytes that are not UTF-8 as OpenAI's "bytes:\xe2\x80".
std::string token_text(const Tokenizer* tokenizer, int32_t id);

std::string models_body(const ServedModel& model, const std::string& root, int64_t created);
std::string model_card(const ServedModel& model, const std::string& name, const std::string& root, int64_t created);
// What the page draws: instances, blocks by state, queues, transfers.
std::string stats_body(const ServedModel& model, const ServiceStats& stats);

}  // namespace xpyd
