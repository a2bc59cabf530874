// Covers every field of the completion and chat requests of vLLM, SGLang and OpenAI, past and present. The server
// honours a field, refuses it by its name, or ignores it because no answer depends on it. A field that is new there
// gets a row here, and its row fails until the parser knows the field.
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
namespace {

enum Where { kCompletions = 1, kChat = 2, kBoth = 3 };
enum Kind {
  honoured,  // the value changes the request to the cluster, or the answer
  refused,   // the value is an error that names the field
  harmless,  // no value changes anything
};
struct Fields {
  Kind kind;
  Where where;
  const char* value;  // a value that asks for something
  const char* names;
  const char* with = "";  // fields that these need beside them
};
// The lists are vLLM's (commit 002032e, entrypoints/openai/{completion,chat_completion}/protocol.py) and SGLang's
// (commit 004c82e, srt/entrypoints/openai/protocol.py). Every body below has prompt, messages and model.
constexpr Fields kFields[] = {
    {honoured, kBoth, R"(1.5)", "frequency_penalty presence_penalty repetition_penalty"},
    {honoured, kBoth, R"({"5":2})", "logit_bias"},
    {honoured, kCompletions, R"(2)", "logprobs"},
    {honoured, kChat, R"(true)", "logprobs"},
    {honoured, kChat, R"(3)", "top_logprobs", R"("logprobs":true)"},
    {honoured, kBoth, R"(7)", "max_tokens max_completion_tokens"},
    {honoured, kBoth, R"(2)", "n min_tokens prompt_logprobs"},
    {honoured, kBoth, R"(4)", "seed"},
    {honoured, kBoth, R"("x")", "stop"},
    {honoured, kBoth, R"(true)", "stream include_stop_str_in_output ignore_eos return_token_ids"},
    {honoured, kBoth, R"({"include_usage":true})", "stream_options", R"("stream":true)"},
    {honoured, kBoth, R"(0.5)", "temperature top_p min_p"},
    {honoured, kBoth, R"(5)", "top_k"},
    {honoured, kBoth, R"([3])", "stop_token_ids"},
    {honoured, kBoth, R"(false)", "skip_special_tokens"},
    {honoured, kBoth, R"([3,5])", "allowed_token_ids"},
    {honoured, kBoth, R"(["x"])", "bad_words"},
    {honoured, kCompletions, R"(true)", "echo"},
    {honoured, kChat, R"([{"type":"function"}])", "tools"},
    {honoured, kChat, R"("none")", "tool_choice", R"("tools":[{"type":"function"}])"},
    {honoured, kChat, R"(false)", "add_generation_prompt"},
    {honoured, kChat, R"({"mood":"good"})", "chat_template_kwargs"},
    {honoured, kBoth, R"(3)", "priority"},
    {honoured, kBoth, R"("s")", "cache_salt"},
    {honoured, kBoth, R"("s","session_generation":"new")", "session_id"},
    {honoured, kCompletions, R"(false)", "add_special_tokens"},
    {refused, kBoth, R"({"type":"json_object"})", "response_format"},
    {refused, kBoth, R"("x")",
     "guided_json guided_regex guided_choice guided_grammar structured_outputs structural_tag json_schema regex ebnf "
     "grammar stop_regex custom_logit_processor lora_path guided_decoding_backend guided_whitespace_pattern "
     "bootstrap_host extra_key prompt_embeds"},
    {refused, kBoth, R"(true)",
     "no_stop_trim use_beam_search watermarking return_tokens_as_token_ids return_hidden_states return_routed_experts "
     "return_cached_tokens_details"},
    {refused, kChat, R"(true)",
     "return_prompt_text return_prompt_token_ids return_meta_info continue_final_message echo add_special_tokens "
     "enable_thinking"},
    {refused, kChat, R"(false)", "enable_thinking include_reasoning"},
    {refused, kBoth, R"(false)", "detokenize"},
    {refused, kBoth, R"([1])", "logits_processors logprob_token_ids"},
    {refused, kBoth, R"({"a":1})",
     "custom_params vllm_xargs repetition_detection kv_transfer_params ec_transfer_params session_params"},
    {refused, kBoth, R"(5)",
     "thinking_token_budget truncate_prompt_tokens routed_experts_prompt_start routed_experts_start_len bootstrap_port "
     "bootstrap_room"},
    {refused, kBoth, R"(2)", "best_of"},
    {refused, kCompletions, R"("x")", "suffix"},
    {refused, kChat, R"("x")", "chat_template task verbosity"},
    {refused, kChat, R"("low")", "reasoning_effort"},
    {refused, kChat, R"({"a":1})", "reasoning thinking audio web_search_options"},
    {refused, kChat, R"([{}])", "documents functions"},
    {refused, kChat, R"([1])", "input_ids"},
    {refused, kChat, R"({"name":"f"})", "function_call"},
    {refused, kChat, R"(["audio"])", "modalities"},
    {refused, kChat, R"("required")", "tool_choice"},
    {harmless, kBoth, R"("x")",
     "user request_id rid truncation_side ngram_corpus_id safety_identifier prompt_cache_key prompt_cache_retention"},
    {harmless, kBoth, R"("auto")", "service_tier"},
    {harmless, kBoth, R"(false)",
     "spaces_between_special_tokens return_mm_kwargs separate_reasoning stream_reasoning parallel_tool_calls"},
    {harmless, kBoth, R"(true)", "return_token_offsets use_audio_in_video store"},
    {harmless, kBoth, R"(3)",
     "length_penalty stream_interval routed_dp_rank data_parallel_rank disagg_prefill_dp_rank max_dynamic_patch "
     "min_dynamic_patch"},
    {harmless, kBoth, R"({"a":{}})",
     "custom_labels images_config metadata mm_processor_kwargs media_io_kwargs prediction"},
};

// Everything that the rest of the server learns of a request, or the error.
struct Heard {
  std::string error_field, all;
  int status = 200;
  std::vector<std::string> ignored;
};
Heard hear(bool chat, const std::string& more) {
  static const auto chats = ChatTemplate::parse(
      "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools|tojson }}{{ mood }}{{ add_generation_prompt }}",
      [] { return int64_t{0}; });
  ServedModel model{.name = "m", .tokenizer = &byte_tokenizer(), .chat_template = chats.value().get()};
  model.max_model_len = 100000;
  model.vocab_size = byte_tokenizer().vocab_size();
  model.max_prompt_bytes = 100000;
  model.eos_tokens = {2};
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
  for (const bool flag : {call.stream, call.include_usage, call.continuous_usage, call.echo, call.return_token_ids,
                          call.prompt_logprobs, call.prompt_only, call.has_seed, call.session_end})
    heard.all += flag ? '1' : '0';
  heard.all += call.session_id;
  return heard;
}

std::vector<std::string> words_of(const char* text) {
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), {}};
}

TEST_CASE("api: every request field of vLLM, SGLang and OpenAI is honoured, refused by name or harmless",
          "[server][api]") {
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
        CHECK((null.status == 200 && null.all == without.all && null.ignored.empty()));
        CHECK(with.status == (fields.kind == refused ? 400 : 200));
        CHECK(with.ignored.empty());
        if (fields.kind == refused) CHECK(with.error_field == name);
        if (fields.kind == harmless) CHECK(with.all == without.all);
        // This tokenizer adds no special tokens. tests/model/tokenizer_test.cc has tokenizers that do.
        if (fields.kind == honoured && name != "add_special_tokens") CHECK(with.all != without.all);
      }
  // A name that no row has is reported as unknown, so a missing row would be found.
  CHECK(hear(false, R"("brand_new":1)").ignored == std::vector<std::string>{"brand_new"});
}

TEST_CASE("api: a value that asks for nothing is treated like an absent field", "[server][api]") {
  for (const char* name :
       {"guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema", "regex", "ebnf",
        "grammar", "stop_regex", "lora_path", "kv_transfer_params", "return_tokens_as_token_ids", "logits_processors"})
    for (const char* value : {"null", "false", "\"\"", "[]", "{}"})
      for (const bool chat : {false, true}) {
        INFO(name << " " << value);
        const Heard heard = hear(chat, "\"" + std::string(name) + "\":" + value);
        CHECK(heard.status == 200);
        CHECK(heard.all == hear(chat, "").all);
      }
}

// ---- honoured fields in detail

ServedModel bytes_model(int max_model_len) {
  ServedModel model{.name = "m", .tokenizer = &byte_tokenizer()};
  model.max_model_len = max_model_len;
  model.vocab_size = byte_tokenizer().vocab_size();
  model.max_prompt_bytes = 1000;
  return model;
}

TokenRules rules_of(const std::string& more, const ServedModel& model) {
  GenerationCall call;
  const auto error = parse_generation(R"({"prompt":"hi")" + (more.empty() ? "" : "," + more) + "}", false, model, call);
  INFO(more << (error ? error->message : ""));
  REQUIRE(!error);
  const auto& rules = call.prompts[0].sampling.rules;
  return rules ? *rules : TokenRules{};
}

TEST_CASE("api: token rules of a request reach its sampling parameters", "[server][api]") {
  ServedModel model = bytes_model(1000);
  model.eos_tokens = {256, 10};
  CHECK(rules_of(R"("allowed_token_ids":[9,3,9])", model).allowed == std::vector<int32_t>{3, 9});
  const TokenRules biased = rules_of(R"("logit_bias":{"5":-100,"7":1.5,"8":0})", model);
  REQUIRE(biased.bias.size() == 2);
  CHECK((biased.bias[0].token == 5 && biased.bias[0].bias == -100));
  CHECK((biased.bias[1].token == 7 && biased.bias[1].bias == 1.5f));
  // Tokens are bytes here, so a blank before a word only makes the word longer.
  const TokenRules worded = rules_of(R"("bad_words":["ab"," c"])", model);
  REQUIRE(worded.bad_words.size() == 2);
  CHECK(worded.bad_words[0].tokens == std::vector<int32_t>{'a', 'b'});
  CHECK(worded.bad_words[1].tokens == std::vector<int32_t>{'c'});
  const TokenRules longer = rules_of(R"("min_tokens":3,"stop_token_ids":[7,10])", model);
  CHECK(longer.min_tokens == 3);
  CHECK(longer.end_tokens == std::vector<int32_t>{7, 10, 256});
  GenerationCall plain;
  REQUIRE(!parse_generation(R"({"prompt":"hi","logit_bias":{},"bad_words":[],"min_tokens":0})", false, model, plain));
  CHECK(plain.prompts[0].sampling.rules == nullptr);
  // All prompts and choices of a call share one set of rules.
  GenerationCall many;
  REQUIRE(!parse_generation(R"({"prompt":["a","b"],"allowed_token_ids":[5]})", false, model, many));
  CHECK(many.prompts[0].sampling.rules == many.prompts[1].sampling.rules);
}

TEST_CASE("api: max_completion_tokens also counts for completions and overrides max_tokens", "[server][api]") {
  ServedModel model = bytes_model(100);
  const auto parse = [&](const std::string& more, GenerationCall& call) {
    return parse_generation(R"({"prompt":"hi",)" + more + "}", false, model, call);
  };
  GenerationCall a, b, c, d;
  REQUIRE(!parse(R"("max_completion_tokens":30)", a));
  CHECK(a.prompts[0].max_tokens == 30);
  REQUIRE(!parse(R"("max_completion_tokens":3,"max_tokens":20)", b));
  CHECK(b.prompts[0].max_tokens == 3);
  REQUIRE(!parse(R"("max_completion_tokens":0,"echo":true)", c));
  CHECK(c.prompt_only);
  const auto error = parse(R"("max_completion_tokens":99)", d);
  REQUIRE(error);
  CHECK(error->param == "max_completion_tokens");
}

TEST_CASE("api: the model folder's sampling defaults apply only to fields that a request leaves out", "[server][api]") {
  ServedModel model = bytes_model(100);
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

}  // namespace
}  // namespace xpyd::testing::api_fields_test
