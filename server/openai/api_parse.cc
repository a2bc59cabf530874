#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/json/json.h"
#include "server/openai/api.h"

namespace xpyd::server {
namespace {

using nlohmann::json;

constexpr int64_t kIntMax = INT32_MAX;
constexpr int kDefaultCompletionTokens = 16;
constexpr size_t kMaxMessages = 4096, kMaxShortText = 256, kMaxSaltBytes = 1024;

// Fields of other servers (vLLM, OpenAI) that this server cannot follow. A value that asks for something is refused,
// because the answer would not be what the client expects.
// clang-format off
constexpr const char* kRefusedFields[] = {
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "tools",
    "functions", "documents", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "use_beam_search", "suffix",
    "prompt_embeds", "truncate_prompt_tokens", "chat_template", "continue_final_message",
    "logits_processors", "structural_tag", "regex", "json_schema", "ebnf", "min_new_tokens", "lora_path", "audio"};
// clang-format on

ApiError bad(std::string param, std::string message) {
  return {.message = std::move(message), .param = std::move(param)};
}
ApiError field_error(const std::string& name, const std::string& expected) {
  return bad(name, "field \"" + name + "\": expected " + expected);
}

// Reads the fields of one object and records the names that were asked for. Throws an ApiError if a value is wrong.
class Fields {
 public:
  explicit Fields(const json& object) : object_(object) {}

  const json* find(const std::string& name) {  // null if missing or null
    known_.push_back(name);
    return find_field(object_, name);
  }
  int64_t integer(const std::string& name, int64_t min, int64_t max, int64_t fallback) {
    return find(name) == nullptr ? fallback : good(name, get_int(object_, name, min, max));
  }
  double number(const std::string& name, double min, double max, double fallback) {
    return find(name) == nullptr ? fallback : good(name, get_double(object_, name, min, max));
  }
  bool boolean(const std::string& name, bool fallback) {
    return find(name) == nullptr ? fallback : good(name, get_bool(object_, name));
  }
  std::string text(const std::string& name, size_t min_bytes, size_t max_bytes) {
    if (find(name) == nullptr) return "";
    std::string value = good(name, get_string(object_, name));
    if (value.size() < min_bytes || value.size() > max_bytes)
      throw field_error(name, std::to_string(min_bytes) + " to " + std::to_string(max_bytes) + " bytes of text, got " +
                                  std::to_string(value.size()));
    return value;
  }

  std::vector<std::string> unknown() const {
    std::vector<std::string> names;
    for (const auto& [name, value] : object_.items())
      if (std::find(known_.begin(), known_.end(), name) == known_.end()) names.push_back(name);
    return names;
  }

 private:
  template <class T>
  static T good(const std::string& name, Result<T> result) {
    if (!result) throw bad(name, result.error().message);
    return std::move(result).value();
  }
  const json& object_;
  std::vector<std::string> known_;
};

json parse_body(std::string_view body) {
  auto parsed = parse_json(body, "request body");
  if (!parsed) throw bad("", parsed.error().message);
  if (!parsed.value().is_object())
    throw bad("", std::string("request body: expected a JSON object, got ") + parsed.value().type_name());
  return std::move(parsed).value();
}

void check_model(Fields& fields, const ServedModel& model) {
  const std::string name = fields.text("model", 0, 1024);
  if (!name.empty() && !model.is_called(name)) throw unknown_model(name, model);
}

ApiError too_long(const std::string& param, const std::string& what, const ServedModel& model) {
  return {.message = "This model's maximum context length is " + std::to_string(model.max_model_len) +
                     " tokens. However, " + what + ". Please shorten the prompt or ask for fewer tokens.",
          .param = param,
          .code = "context_length_exceeded"};
}

// Returns the ids from `encode`. It throws an Error if the model's own regexes cannot process this text.
template <class Encode>
std::vector<int32_t> encoded(const std::string& param, Encode encode) try {
  return encode();
} catch (const Error& error) {
  throw bad(param, error.message);
}

std::vector<int32_t> encode_text(const std::string& text, const ServedModel& model, bool add_special_tokens) {
  if (model.tokenizer == nullptr) throw bad("prompt", "this model has no tokenizer; send the prompt as token ids");
  if (text.size() > model.max_prompt_bytes)
    throw too_long("prompt", "your prompt is " + std::to_string(text.size()) + " bytes long", model);
  return encoded("prompt", [&] { return model.tokenizer->encode(text, {.add_special_tokens = add_special_tokens}); });
}

// All elements must be ids below the vocabulary's size.
std::vector<int32_t> read_ids(const json& list, const std::string& name, int vocab_size) {
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (const auto& item : list) {
    int64_t id = item.is_number_unsigned() && item.get<uint64_t>() <= uint64_t{INT32_MAX} ? item.get<int64_t>() : -1;
    if (id < 0 || id >= vocab_size) throw field_error(name, "token ids from 0 to " + std::to_string(vocab_size - 1));
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

struct Prompt {
  std::vector<int32_t> ids;
  std::string text;
};

// Accepts a string, a list of strings, a list of ids, or a list of lists of ids.
std::vector<Prompt> read_prompts(const json* prompt, const ServedModel& model, bool add_special_tokens) {
  const ApiError wrong = field_error(
      "prompt", "a string, a list of strings, a list of token ids or a list of lists of token ids");
  auto read = [&](const json& one) {
    Prompt p;
    if (one.is_string()) {
      p.text = one.get<std::string>();
      p.ids = encode_text(p.text, model, add_special_tokens);
    } else if (one.is_array()) {
      p.ids = read_ids(one, "prompt", model.vocab_size);
    } else {
      throw wrong;
    }
    if (p.ids.empty()) throw field_error("prompt", "at least one token, got an empty prompt");
    return p;
  };
  if (prompt == nullptr) throw wrong;
  std::vector<Prompt> out;
  const bool is_list_of_prompts = prompt->is_array() && !prompt->empty() && !prompt->front().is_number();
  if (!is_list_of_prompts) {
    out.push_back(read(*prompt));
    return out;
  }
  if (prompt->size() > kMaxChoicesPerCall)
    throw field_error("prompt", "at most " + std::to_string(kMaxChoicesPerCall) + " prompts");
  for (const auto& one : *prompt) {
    if (one.type() != prompt->front().type()) throw wrong;
    out.push_back(read(one));
  }
  return out;
}

// Accepts text or a list of {"type":"text"} parts.
std::string read_content(const json* content) {
  if (content == nullptr) return "";
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array())
    throw field_error("messages", "the content of each message to be a string or a list of text parts");
  std::string text;
  for (const auto& part : *content) {
    const json* type = part.is_object() ? find_field(part, "type") : nullptr;
    const json* words = part.is_object() ? find_field(part, "text") : nullptr;
    if (type == nullptr || *type != "text" || words == nullptr || !words->is_string())
      throw field_error("messages", "content parts to have type \"text\"; this model reads text only");
    text += words->get_ref<const std::string&>();
  }
  return text;
}

ChatMessage read_message(const json& item) {
  auto role = item.is_object() ? get_string(item, "role") : Result<std::string>(invalid(""));
  if (!role.ok()) throw field_error("messages", "each message to be an object with fields \"role\" and \"content\"");
  static constexpr std::string_view kRoles[] = {"system", "developer", "user", "assistant"};
  if (std::ranges::find(kRoles, role.value()) == std::end(kRoles))
    throw field_error("messages", "each role to be system, developer, user or assistant");
  return {std::move(role).value(), read_content(find_field(item, "content"))};
}

// Reads the fields of a chat besides its messages.
ChatTemplate::Request read_chat_request(Fields& fields) {
  ChatTemplate::Request request{.add_generation_prompt = fields.boolean("add_generation_prompt", true)};
  const json* kwargs = fields.find("chat_template_kwargs");
  if (kwargs == nullptr) return request;
  if (!kwargs->is_object() || kwargs->size() > 64)
    throw field_error("chat_template_kwargs", "an object of at most 64 fields");
  for (const char* name : {"messages", "tools", "documents", "add_generation_prompt"})
    if (kwargs->contains(name))
      throw field_error("chat_template_kwargs", std::string("no field \"") + name + "\" in it");
  request.kwargs = kwargs->dump();
  return request;
}

// `list` is the conversation so far; the new messages are appended to it.
std::vector<int32_t> read_messages(const json* messages, const ServedModel& model, const ChatTemplate::Request& request,
                                   std::vector<ChatMessage>& list) {
  if (messages == nullptr || !messages->is_array() || messages->empty() ||
      list.size() + messages->size() > kMaxMessages)
    throw field_error("messages", "a list of 1 to " + std::to_string(kMaxMessages) + " messages");
  if (model.tokenizer == nullptr || model.chat_template == nullptr)
    throw bad("messages", "this model has no chat template; use /v1/completions");
  size_t bytes = 0;
  for (const ChatMessage& message : list) bytes += message.content.size();
  for (const json& message : *messages) {
    list.push_back(read_message(message));
    bytes += list.back().content.size();
  }
  if (bytes > model.max_prompt_bytes)
    throw too_long("messages", "your messages are " + std::to_string(bytes) + " bytes long", model);
  const auto prompt = model.chat_template->render(*model.tokenizer, list, request);
  if (!prompt.ok()) throw bad("messages", prompt.error().message);
  bytes = prompt.value().size();
  if (bytes > model.max_prompt_bytes)
    throw too_long("messages", "the prompt made from your messages is " + std::to_string(bytes) + " bytes long", model);
  std::vector<int32_t> ids = encoded("messages",
                                     [&] { return model.chat_template->encode(*model.tokenizer, prompt.value()); });
  if (ids.empty()) throw field_error("messages", "messages that make a prompt of at least one token");
  return ids;
}

void read_stops(Fields& fields, const ServedModel& model, Request& request) {
  if (const json* stop = fields.find("stop")) {
    std::string expected = "a string or a list of at most " + std::to_string(kMaxStops) + " strings of 1 to " +
                           std::to_string(kMaxStopBytes) + " bytes";
    auto add = [&](const json& one) {
      const std::string text = one.is_string() ? one.get<std::string>() : "";
      if (text.empty() || text.size() > kMaxStopBytes) throw field_error("stop", expected);
      request.stop.push_back(text);
    };
    if (stop->is_array() && stop->size() > kMaxStops) throw field_error("stop", expected);
    if (!stop->is_array())
      add(*stop);
    else
      for (const auto& one : *stop) add(one);
  }
  if (const json* ids = fields.find("stop_token_ids")) {
    if (!ids->is_array() || ids->size() > kMaxStopTokens)
      throw field_error("stop_token_ids", "a list of at most " + std::to_string(kMaxStopTokens) + " token ids");
    request.stop_token_ids = read_ids(*ids, "stop_token_ids", model.vocab_size);
  }
  request.include_stop_text = fields.boolean("include_stop_str_in_output", false);
}

void read_sampling(Fields& fields, bool chat, const ServedModel& model, Request& request, bool& has_seed) {
  SamplingParams& s = request.sampling;
  s = model.sampling;
  s.temperature = static_cast<float>(fields.number("temperature", 0, 100, s.temperature));
  s.top_p = static_cast<float>(fields.number("top_p", 0, 1, s.top_p));
  if (s.top_p <= 0) throw field_error("top_p", "a number above 0, at most 1");
  int64_t top_k = fields.integer("top_k", -1, kIntMax, s.top_k);
  s.top_k = top_k < 0 ? 0 : static_cast<int>(top_k);
  s.min_p = static_cast<float>(fields.number("min_p", 0, 1, s.min_p));
  s.repetition_penalty = static_cast<float>(fields.number("repetition_penalty", 1e-6, 100, s.repetition_penalty));
  s.presence_penalty = static_cast<float>(fields.number("presence_penalty", -2, 2, 0));
  s.frequency_penalty = static_cast<float>(fields.number("frequency_penalty", -2, 2, 0));
  has_seed = fields.find("seed") != nullptr;
  s.seed = static_cast<uint64_t>(fields.integer("seed", INT64_MIN, INT64_MAX, 0));
  if (chat) {
    bool wanted = fields.boolean("logprobs", false);
    int64_t top = fields.integer("top_logprobs", 0, 20, 0);
    if (top > 0 && !wanted) throw bad("top_logprobs", "top_logprobs: needs logprobs: true");
    s.top_logprobs = wanted ? static_cast<int>(top) : -1;
  } else {
    s.top_logprobs = static_cast<int>(fields.integer("logprobs", 0, 20, -1));
  }
}

void read_stream(Fields& fields, GenerationCall& call) {
  call.stream = fields.boolean("stream", false);
  const json* options = fields.find("stream_options");
  if (options == nullptr) return;
  if (!call.stream) throw bad("stream_options", "stream_options: needs stream: true");
  if (!options->is_object()) throw field_error("stream_options", "an object");
  try {
    Fields inner(*options);
    call.include_usage = inner.boolean("include_usage", false);
  } catch (const ApiError& error) {
    throw bad("stream_options", error.message);
  }
}

// Refuses what this server cannot do.
void refuse_unsupported(Fields& fields) {
  static const json kAsksNothing[] = {false, 0, "", json::array(), json::object(), json::object({{"type", "text"}})};
  for (const char* name : kRefusedFields) {
    const json* value = fields.find(name);
    if (value != nullptr && std::ranges::find(kAsksNothing, *value) == std::end(kAsksNothing))
      throw bad(name, std::string("field \"") + name + "\": this server does not support it");
  }
}

// OpenAI has two names for this field. The newer one wins.
const char* max_tokens_name(Fields& fields) {
  const json* old = fields.find("max_tokens");
  return fields.find("max_completion_tokens") != nullptr || old == nullptr ? "max_completion_tokens" : "max_tokens";
}

// Reads what the request asks about the prompt's own tokens.
void read_echo(Fields& fields, bool chat, Request& request, GenerationCall& out) {
  out.echo = !chat && fields.boolean("echo", false);
  request.prompt_logprobs = static_cast<int>(fields.integer("prompt_logprobs", 0, 20, -1));
  out.prompt_logprobs = request.prompt_logprobs >= 0;
  if (out.prompt_logprobs && out.stream)
    throw bad("prompt_logprobs", "prompt_logprobs: cannot be streamed; use echo with logprobs");
  if (out.echo) request.prompt_logprobs = std::max(request.prompt_logprobs, request.sampling.top_logprobs);
  if (request.prompt_logprobs >= 0 && !out.session_id.empty())
    throw bad(out.prompt_logprobs ? "prompt_logprobs" : "echo",
              "prompt logprobs cannot be combined with session_id, because the prompt also has earlier turns");
}

// Checks the bounds of the whole call.
void check_sizes(const std::vector<Prompt>& prompts, const Request& request, const GenerationCall& out) {
  if (out.turn && prompts.size() > 1) throw field_error("prompt", "one prompt, because session_id is given");
  if (prompts.size() * static_cast<size_t>(request.n) > kMaxChoicesPerCall)
    throw field_error("n", "at most " + std::to_string(kMaxChoicesPerCall) + " choices in one call, prompts times n");
  size_t judged = 0;
  for (const auto& p : prompts) judged += p.ids.size() * static_cast<size_t>(request.prompt_logprobs + 1);
  if (judged > kMaxPromptLogprobs)
    throw bad("prompt", "the call asks for " + std::to_string(judged) +
                            " logprobs of prompt tokens; expected at most " + std::to_string(kMaxPromptLogprobs));
}

// Sets the number of output tokens: `wanted`, as the field `name` says, or the default if it is negative.
void set_max_tokens(const char* name, int64_t wanted, const GenerationCall& call, const ServedModel& model,
                    Request& request) {
  const char* prompt = call.chat ? "messages" : "prompt";
  int64_t prompt_tokens = static_cast<int64_t>(request.prompt.size());
  int64_t room = model.max_model_len - prompt_tokens;
  if (room < 1) throw too_long(prompt, "your prompt has " + std::to_string(prompt_tokens) + " tokens", model);
  if (wanted < 0) wanted = call.chat ? room : std::min<int64_t>(room, kDefaultCompletionTokens);
  if (call.prompt_only) wanted = 1;
  if (wanted > room)
    throw too_long(name,
                   "you requested " + std::to_string(prompt_tokens + wanted) + " tokens (" +
                       std::to_string(prompt_tokens) + " in the " + prompt + ", " + std::to_string(wanted) +
                       " in the completion)",
                   model);
  request.max_tokens = static_cast<int>(wanted);
}

// Takes the session that the request names.
void take_session(Request& request, const std::string& salt, const std::string& generation, bool chat,
                  Sessions* sessions, GenerationCall& out) {
  const std::string& id = out.session_id;
  if (id.empty()) {
    if (out.session_end) throw bad("session_end", "session_end: needs a session_id");
    if (!generation.empty()) throw bad("session_generation", "session_generation: needs a session_id");
    return;
  }
  if (sessions == nullptr) throw bad("session_id", "field \"session_id\": this server keeps no sessions");
  if (request.n > 1) throw bad("n", "n: must be 1 with a session_id, because a session has one reply per turn");
  if (generation.empty())
    throw bad("session_generation",
              "session_generation: expected \"new\" in the first turn of a session, and the session_generation of the "
              "last answer in later turns");
  const std::string name = "session `" + id + "`";
  auto refused = [&](int status, const std::string& why, const char* code, const char* param = "session_id") {
    return ApiError{.status = status, .message = why, .param = param, .code = code};
  };
  switch (sessions->begin(session_key(id, salt), out.turn, generation)) {
    case Sessions::State::taken:
      request.cache_salt = out.turn.salt();  // a session's KV is shared with no other
      break;
    case Sessions::State::busy:
      throw refused(409, name + " is busy with another turn: wait for its answer", "session_busy");
    case Sessions::State::dropped:
      throw refused(410, name + " was dropped: send the whole conversation with session_generation \"new\"",
                    "session_expired");
    case Sessions::State::stale:
      throw refused(409, name + ": session_generation is not that of its last answer", "session_stale",
                    "session_generation");
    case Sessions::State::full:
      throw refused(503, "all sessions that this server can keep are busy; try again later", "sessions_full");
  }
  const Conversation& so_far = out.turn.so_far();
  if (chat ? !so_far.tokens.empty() : !so_far.messages.empty())
    throw bad("session_id", name + " was started with " + (chat ? "/v1/completions" : "/v1/chat/completions") +
                                ": continue it there");
}

}  // namespace

bool ServedModel::is_called(std::string_view wanted) const {
  return wanted == name || std::ranges::find(other_names, wanted) != other_names.end();
}

ApiError unknown_model(const std::string& name, const ServedModel& model) {
  return {.status = 404,
          .message = "The model `" + name + "` does not exist; this server serves `" + model.name + "`.",
          .param = "model",
          .code = "model_not_found"};
}

size_t longest_prompt_bytes(const Tokenizer& tokenizer, int max_model_len) {
  size_t longest = 1;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) longest = std::max(longest, tokenizer.piece(id).size());
  // Normalizers (NFC in Qwen's tokenizer) may shorten text before tokenization, by less than a factor of four.
  return 4 * longest * static_cast<size_t>(std::max(max_model_len, 1));
}

std::optional<ApiError> parse_generation(std::string_view body, bool chat, const ServedModel& model,
                                         GenerationCall& out, Sessions* sessions) try {
  const json object = parse_body(body);
  Fields fields(object);
  check_model(fields, model);

  out.chat = chat;
  Request request;
  read_stream(fields, out);
  read_sampling(fields, chat, model, request, out.has_seed);
  read_stops(fields, model, request);
  refuse_unsupported(fields);
  request.n = static_cast<int>(fields.integer("n", 1, 8, 1));
  request.ignore_eos = fields.boolean("ignore_eos", false);
  request.skip_special_tokens = fields.boolean("skip_special_tokens", true);
  request.priority = static_cast<int>(fields.integer("priority", INT32_MIN, INT32_MAX, 0));
  out.session_id = fields.text("session_id", 1, kMaxShortText);
  out.session_end = fields.boolean("session_end", false);
  std::string salt = fields.text("cache_salt", 1, kMaxSaltBytes);
  const std::string generation = fields.text("session_generation", 1, kMaxShortText);
  if (!salt.empty()) request.cache_salt = std::max<uint64_t>(1, siphash(model.salt_key, salt));
  out.return_token_ids = fields.boolean("return_token_ids", false);
  read_echo(fields, chat, request, out);
  const char* most = max_tokens_name(fields);
  const int64_t max_tokens = fields.integer(most, out.echo ? 0 : 1, kIntMax, -1);
  out.prompt_only = max_tokens == 0;
  const bool add_special_tokens = !chat && fields.boolean("add_special_tokens", true);
  const ChatTemplate::Request chat_request = chat ? read_chat_request(fields) : ChatTemplate::Request();
  const json* prompt = fields.find(chat ? "messages" : "prompt");

  // Salts separate tenants, so they are part of a session's key.
  take_session(request, salt, generation, chat, sessions, out);
  const Conversation& so_far = out.turn.so_far();
  std::vector<Prompt> prompts;
  if (chat) {
    std::vector<ChatMessage> list = so_far.messages;
    prompts.push_back({read_messages(prompt, model, chat_request, list), ""});
    if (out.turn) out.messages = std::move(list);
  } else {
    prompts = read_prompts(prompt, model, add_special_tokens && so_far.tokens.empty());
  }
  check_sizes(prompts, request, out);
  request.prompt_is_text_prefix = !chat;
  for (auto& p : prompts) {
    request.prompt = so_far.tokens;
    request.prompt.insert(request.prompt.end(), p.ids.begin(), p.ids.end());
    set_max_tokens(most, max_tokens, out, model, request);
    if (out.echo) {
      bool was_ids = p.text.empty() && model.tokenizer != nullptr;
      out.prompt_texts.push_back(was_ids ? model.tokenizer->decode(p.ids) : std::move(p.text));
    }
    out.prompts.push_back(request);
  }
  out.ignored = fields.unknown();
  return {};
} catch (ApiError& error) {
  // The history, which is not in the request, may be the reason why it does not fit.
  if (out.turn && error.code == "context_length_exceeded")
    error.message += " The conversation so far, session `" + out.session_id + "`, counts as part of the prompt.";
  return error;
}

std::optional<ApiError> tokenize(std::string_view body, const ServedModel& model, std::string& answer) try {
  const json object = parse_body(body);
  Fields fields(object);
  check_model(fields, model);
  bool add_special_tokens = fields.boolean("add_special_tokens", true);
  const ChatTemplate::Request request = read_chat_request(fields);
  bool with_text = fields.boolean("return_token_strs", false);
  const json* messages = fields.find("messages");
  const json* prompt = fields.find("prompt");
  if (messages == nullptr && (prompt == nullptr || !prompt->is_string()))
    throw field_error("prompt", "a string, or a field \"messages\"");
  std::vector<ChatMessage> list;
  const std::vector<int32_t> ids = messages != nullptr
                                       ? read_messages(messages, model, request, list)
                                       : encode_text(prompt->get<std::string>(), model, add_special_tokens);
  JsonText text;
  text.open('{').add("count", ids.size(), "max_model_len", model.max_model_len, "tokens", ids);
  if (with_text) {
    text.key("token_strs").open('[');
    for (int32_t id : ids) text.value(model.tokenizer->piece(id));
    text.close(']');
  }
  answer = text.close('}').take();
  return {};
} catch (const ApiError& error) {
  return error;
}

std::optional<ApiError> detokenize(std::string_view body, const ServedModel& model, std::string& answer) try {
  const json object = parse_body(body);
  Fields fields(object);
  check_model(fields, model);
  const json* tokens = fields.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) throw field_error("tokens", "a list of token ids");
  if (model.tokenizer == nullptr) throw bad("tokens", "this model has no tokenizer");
  answer =
      JsonText().object("prompt", model.tokenizer->decode(read_ids(*tokens, "tokens", model.vocab_size), false)).take();
  return {};
} catch (const ApiError& error) {
  return error;
}

}  // namespace xpyd::server
