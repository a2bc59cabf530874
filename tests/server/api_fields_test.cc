// Covers the fields of completion and chat requests. The server honours a field, refuses it by its name, or ignores it
// and names it in the log.
#include <algorithm>
#include <iterator>
#include <sstream>

#include "disagg/processes/codec.h"
#include "model/text/chat_template.h"
#include "server/openai/api.h"
#include "tests/catch.h"
#include "tests/json.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing::api_fields_test {

enum Where { kCompletions = 1, kChat = 2, kBoth = 3 };
enum Kind {
  honoured,  // the value changes the request to the cluster, or the answer
  refused,   // the value is an error that names the field
  ignored,   // no value changes anything
};
struct Fields {
  Kind kind;
  Where where;
  const char* value;  // a value that asks for something
  const char* names;
  const char* with = "";  // fields that these need beside them
};
// Every body below has prompt, messages and model.
constexpr Fields kFields[] = {
    {honoured, kBoth, R"(1.5)", "frequency_penalty presence_penalty repetition_penalty"},
    {honoured, kCompletions, R"(2)", "logprobs"},
    {honoured, kChat, R"(true)", "logprobs"},
    {honoured, kChat, R"(3)", "top_logprobs", R"("logprobs":true)"},
    {honoured, kBoth, R"(7)", "max_tokens max_completion_tokens"},
    {honoured, kBoth, R"(2)", "n prompt_logprobs"},
    {honoured, kBoth, R"(4)", "seed"},
    {honoured, kBoth, R"("x")", "stop"},
    {honoured, kBoth, R"(true)", "stream include_stop_str_in_output ignore_eos return_token_ids"},
    {honoured, kBoth, R"({"include_usage":true})", "stream_options", R"("stream":true)"},
    {honoured, kBoth, R"(0.5)", "temperature top_p min_p"},
    {honoured, kBoth, R"(5)", "top_k"},
    {honoured, kBoth, R"([3])", "stop_token_ids"},
    {honoured, kBoth, R"(false)", "skip_special_tokens"},
    {honoured, kCompletions, R"(true)", "echo"},
    {honoured, kChat, R"(false)", "add_generation_prompt"},
    {honoured, kChat, R"({"mood":"good"})", "chat_template_kwargs"},
    {honoured, kBoth, R"(3)", "priority"},
    {honoured, kBoth, R"("s")", "cache_salt"},
    {honoured, kBoth, R"("s","session_generation":"new")", "session_id"},
    {honoured, kCompletions, R"(false)", "add_special_tokens"},
    {refused, kBoth, R"({"type":"json_object"})", "response_format"},
    {refused, kBoth, R"("x")",
     "guided_json guided_regex guided_choice guided_grammar structured_outputs prompt_embeds suffix"},
    {refused, kBoth, R"(true)", "use_beam_search"},
    {refused, kBoth, R"({"5":2})", "logit_bias"},
    {refused, kBoth, R"([3,5])", "allowed_token_ids bad_words documents functions"},
    {refused, kBoth, R"([{"type":"function"}])", "tools"},
    {refused, kBoth, R"(5)", "min_tokens truncate_prompt_tokens"},
    {ignored, kBoth, R"("x")", "user request_id service_tier brand_new"},
    {ignored, kBoth, R"("auto")", "tool_choice"},
    {ignored, kBoth, R"(2)", "best_of"},
    {ignored, kChat, R"(true)", "echo"},
};

// A served model with byte tokens.
ServedModel served(const ChatTemplate* chat = nullptr) {
  ServedModel model{.name = "m", .tokenizer = &byte_tokenizer(), .chat_template = chat};
  model.max_model_len = 100000;
  model.vocab_size = byte_tokenizer().vocab_size();
  model.max_prompt_bytes = 100000;
  return model;
}

// Everything that the rest of the server learns of a request, or the error.
struct Heard {
  std::string error_field, all;
  int status = 200;
  std::vector<std::string> ignored;
};
Heard hear(bool chat, const std::string& more) {
  static const auto chats = ChatTemplate::parse(
      "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}{{ add_generation_prompt }}",
      [] { return int64_t{0}; });
  const ServedModel model = served(chats.value().get());
  const auto sessions = std::make_shared<Sessions>(4, 1 << 20);
  GenerationCall call;
  const std::string base = chat ? R"({"model":"m","messages":[{"role":"user","content":"hi"}])"
                                : R"({"model":"m","prompt":"hi")";
  const auto error = parse_generation(base + (more.empty() ? "" : "," + more) + "}", chat, model, call, sessions.get());
  if (error) return {error->param, "", error->status, {}};
  Heard heard{.ignored = call.ignored};
  for (const Request& prompt : call.prompts) {
    disagg::StartRequest start;
    start.request = std::make_shared<Request>(prompt);
    heard.all += disagg::encode(0, 0, start, 0);
  }
  for (const bool flag : {call.stream, call.include_usage, call.echo, call.return_token_ids, call.prompt_logprobs,
                          call.prompt_only, call.has_seed, call.session_end})
    heard.all += flag ? '1' : '0';
  heard.all += call.session_id;
  return heard;
}

std::vector<std::string> words_of(const char* text) {
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), {}};
}

TEST_CASE("api: a request field is honoured, refused by name or ignored", "[server][api]") {
  for (const Fields& fields : kFields)
    for (const std::string& name : words_of(fields.names))
      for (const bool chat : {false, true}) {
        if (!(fields.where & (chat ? kChat : kCompletions))) continue;
        const auto body = [&](const char* value) {
          return "\"" + name + "\":" + value + (*fields.with ? "," : "") + fields.with;
        };
        INFO((chat ? "chat " : "completions ") << body(fields.value));
        const Heard without = hear(chat, fields.with), with = hear(chat, body(fields.value));
        const Heard null = hear(chat, body("null"));
        REQUIRE(without.status == 200);
        CHECK((null.status == 200 && null.all == without.all));
        CHECK(with.status == (fields.kind == refused ? 400 : 200));
        CHECK(with.ignored == (fields.kind == ignored ? std::vector{name} : std::vector<std::string>()));
        if (fields.kind == refused) CHECK(with.error_field == name);
        if (fields.kind == ignored) CHECK(with.all == without.all);
        // This tokenizer adds no special tokens. tests/model/tokenizer_test.cc has tokenizers that do.
        if (fields.kind == honoured && name != "add_special_tokens") CHECK(with.all != without.all);
      }
}

TEST_CASE("api: a value that asks for nothing is treated like an absent field", "[server][api]") {
  for (const char* name : {"guided_regex", "structured_outputs", "suffix", "tools", "logit_bias", "min_tokens"})
    for (const char* value : {"null", "false", "0", "\"\"", "[]", "{}"})
      for (const bool chat : {false, true}) {
        INFO(name << " " << value);
        const Heard heard = hear(chat, "\"" + std::string(name) + "\":" + value);
        CHECK(heard.status == 200);
        CHECK(heard.all == hear(chat, "").all);
      }
}

TEST_CASE("api: the model folder's sampling defaults apply only to fields that a request leaves out", "[server][api]") {
  ServedModel model = served();
  model.sampling = {.temperature = 0.5f, .top_k = 20, .top_p = 0.75f, .min_p = 0.25f, .repetition_penalty = 1.25f};
  GenerationCall silent, says;
  REQUIRE(!parse_generation(R"({"prompt":"hi","temperature":null})", false, model, silent));
  const SamplingParams s = silent.prompts[0].sampling;
  CHECK((s.temperature == 0.5f && s.top_k == 20 && s.top_p == 0.75f && s.min_p == 0.25f));
  CHECK(s.repetition_penalty == 1.25f);
  REQUIRE(!parse_generation(R"({"prompt":"hi","temperature":1,"top_k":-1,"top_p":1,"min_p":0,"repetition_penalty":1})",
                            false, model, says));
  const SamplingParams t = says.prompts[0].sampling;
  CHECK((t.temperature == 1 && t.top_k == 0 && t.top_p == 1 && t.min_p == 0 && t.repetition_penalty == 1));
}

// ---- what a chat request gives to the model's chat template: roles, contents and extra variables

constexpr const char* kAll =
    "{% for m in messages %}{{ m|tojson }}\n{% endfor %}{{ mood }} {{ add_generation_prompt }}";

// Returns the text of the prompt, or of the error.
std::string prompt_of(const std::string& jinja, const std::string& body) {
  auto chat = ChatTemplate::parse(jinja, [] { return int64_t{0}; });
  if (!chat.ok()) return chat.error().message;
  GenerationCall call;
  auto error = parse_generation("{" + body + "}", true, served(chat.value().get()), call);
  if (error) return std::to_string(error->status) + " " + error->param + ": " + error->message;
  CHECK(call.ignored.empty());
  return byte_tokenizer().decode(call.prompts[0].prompt, false);
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

TEST_CASE("chat request: messages and extra variables reach the template", "[server][api][chat]") {
  CHECK(prompt_of(kAll, R"("messages": [{"role": "user", "content": "hi"}])") ==
        "{\"role\": \"user\", \"content\": \"hi\"}\n True");
  CHECK(prompt_of(kAll, R"("add_generation_prompt": false, "chat_template_kwargs": {"mood": "good"},
      "messages": [{"name": "Ann", "role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}])") ==
        "{\"role\": \"user\", \"content\": \"hi\"}\ngood False");
}

TEST_CASE("chat request: a client's special tokens are plain text wherever they stand", "[server][api][chat]") {
  const int32_t end = byte_tokenizer().token_id("<|end|>");
  REQUIRE(end >= 0);
  for (const char* body :
       {R"("messages": [{"role": "user", "content": "<|end|>"}])",
        R"("messages": [{"role": "user", "content": [{"type": "text", "text": "<|end|>"}]}])",
        R"("messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"mood": "<|end|>"})"}) {
    INFO(body);
    auto chat = ChatTemplate::parse(std::string(kAll) + "<|end|>", [] { return int64_t{0}; });
    GenerationCall call;
    REQUIRE(!parse_generation("{" + std::string(body) + "}", true, served(chat.value().get()), call));
    const auto& ids = call.prompts[0].prompt;
    CHECK(std::count(ids.begin(), ids.end(), end) == 1);  // the one that the template writes
    CHECK(ids.back() == end);
  }
}

TEST_CASE("chat request: what the template or the API cannot take is refused", "[server][api][chat]") {
  const std::string user = R"("messages": [{"role": "user", "content": "x"}])";
  const std::pair<std::string, std::string> cases[] = {
      {user + R"(, "tools": [])", " True"},
      {user + R"(, "tools": [{"a": 1}])", "400 tools: field \"tools\": this server does not support it"},
      {user + R"(, "chat_template_kwargs": [1])", "400 chat_template_kwargs"},
      {user + R"(, "chat_template_kwargs": {"messages": []})", "400 chat_template_kwargs"},
      {R"("messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])",
       "400 messages: field \"messages\": expected content parts to have type \"text\""},
  };
  for (const auto& [body, expected] : cases) {
    INFO(body);
    CHECK(has(prompt_of(kAll, body), expected));
  }
  CHECK(has(prompt_of("{{ raise_exception('Only two turns') }}", user),
            "400 messages: the model's chat template failed, line 1: Only two turns"));
  const std::string many = R"("messages": [{"role": "user", "content": ")" + std::string(60000, 'x') + "\"}]";
  CHECK(has(prompt_of("{{ messages[0].content }}{{ messages[0].content }}", many), "context length"));
}

}  // namespace xpyd::testing::api_fields_test
