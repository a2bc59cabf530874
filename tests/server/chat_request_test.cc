// Tests what a chat request hands to the model's chat template: roles, contents and extra variables. Also tests what is
// refused.

#include "base/json/json.h"
#include "model/text/chat_template.h"
#include "server/openai/api.h"
#include "tests/catch.h"
#include "tests/json.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing::chat_request_test {

namespace {

constexpr const char* kAll =
    "{% for m in messages %}{{ m|tojson }}\n{% endfor %}{{ mood }} {{ add_generation_prompt }}";

// A served model with byte tokens.
ServedModel served(const ChatTemplate* chat) {
  ServedModel model{.name = "m", .tokenizer = &byte_tokenizer(), .chat_template = chat};
  model.max_model_len = 100000;
  model.vocab_size = byte_tokenizer().vocab_size();
  model.max_prompt_bytes = 100000;
  return model;
}

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

}  // namespace

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

}  // namespace xpyd::testing::chat_request_test
