// Request bodies -> Requests: plain functions of (body, what the server serves), so that they can
// run on any thread, be fuzzed and be tested without a socket.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/siphash.h"
#include "batch/request.h"
#include "model/chat_template.h"
#include "model/tokenizer.h"
#include "server/metrics.h"
#include "server/sessions.h"

namespace xpyd::server {

// What is wrong with a request, as OpenAI's error envelope says it.
struct ApiError {
  int status = 400;
  std::string message;
  std::string param;  // the field; "" = null
  std::string code;   // for programs, as "context_length_exceeded"; "" = null
  RejectReason reason = RejectReason::invalid;
};

// What is served. Const after the start.
struct ServedModel {
  std::string name = "model";            // in answers
  std::vector<std::string> names;        // that clients see, `name` first; empty: it alone
  std::vector<std::string> other_names;  // that are answered, too: its folder
  bool is_called(std::string_view wanted) const;
  const Tokenizer* tokenizer = nullptr;         // null: no text, only token ids
  const ChatTemplate* chat_template = nullptr;  // null: no chat
  int max_model_len = 0;                        // tokens of prompt and output together
  int vocab_size = 0;                           // ids from clients are below it, and below the tokenizer's
  size_t max_prompt_bytes = 0;                  // a longer text cannot fit the context, whatever its tokens
  SipKey salt_key;
};

ApiError unknown_model(const std::string& name, const ServedModel& model);

// The longest token bounds how much text max_model_len tokens can hold.
size_t longest_prompt_bytes(const Tokenizer& tokenizer, int max_model_len);

struct GenerationCall {
  bool chat = false;
  bool stream = false, include_usage = false, continuous_usage = false;
  bool echo = false, return_token_ids = false;
  bool prompt_logprobs = false;  // asked for by that name, rather than by echo with logprobs
  bool prompt_only = false;      // echo of no token more: one is generated, and not shown
  bool has_seed = false;
  bool session_end = false;
  Sessions::Turn turn;                    // of the session, where one is named
  std::vector<ChatMessage> messages;      // chat in a session: so far and new
  std::vector<Request> prompts;           // id, arrival and deadline not yet set
  std::vector<std::string> prompt_texts;  // with echo: one for each prompt
  std::vector<std::string> ignored;       // fields that nobody here knows, for the log
};

// Bounds of the integer fields, in one table for the parser and its boundary test.
struct IntegerField {
  const char* name;
  int64_t min, max;
  bool completions, chat;
};
std::span<const IntegerField> integer_fields();

constexpr int kMaxChoicesPerCall = 128;  // prompts times n
// Prompt tokens of a call, each times its alternatives and itself: what an answer of 25 MB holds,
// and a control frame.
constexpr size_t kMaxPromptLogprobs = size_t{1} << 19;
constexpr size_t kMaxStops = 16, kMaxStopBytes = 256, kMaxStopTokens = 64;

// Takes the named conversation from `sessions` into out.turn. Null: session_id is refused.
std::optional<ApiError> parse_generation(std::string_view body, bool chat, const ServedModel& model,
                                         GenerationCall& out, Sessions* sessions = nullptr);

// /tokenize and /detokenize: the answer's body.
std::optional<ApiError> tokenize(std::string_view body, const ServedModel& model, std::string& answer);
std::optional<ApiError> detokenize(std::string_view body, const ServedModel& model, std::string& answer);

}  // namespace xpyd::server
