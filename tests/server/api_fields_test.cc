// Every field that vLLM's and SGLang's completion and chat requests have, or had, and OpenAI's: this server does what
// it says, or refuses it by its name, or does not care, because no answer depends on it. A field that is new there gets
// a row here, which fails until the parser knows it.
#include <algorithm>

#include "disagg/control/codec.h"
#include "model/chat_template.h"
#include "server/api.h"
#include "tests/catch.h"
#include "tests/json.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing::api_fields_test {
namespace {

enum Where { kCompletions = 1, kChat = 2, kBoth = 3 };
enum Kind {
  honoured,  // this value changes what the cluster is asked for, or what is answered
  refused,   // this value is an error that names the field
  harmless,  // any value: nothing changes
};
struct Field {
  const char* name;
  Where where;
  Kind kind;
  const char* value;      // one that asks for something
  const char* with = "";  // fields that it needs
};
// prompt, messages and model are in every body below.
constexpr Field kFields[] = {
    {"frequency_penalty", kBoth, honoured, R"(1.5)"},
    {"presence_penalty", kBoth, honoured, R"(1.5)"},
    {"logit_bias", kBoth, honoured, R"({"5":2})"},
    {"logprobs", kCompletions, honoured, R"(2)"},
    {"logprobs", kChat, honoured, R"(true)"},
    {"top_logprobs", kChat, honoured, R"(3)", R"("logprobs":true)"},
    {"max_tokens", kBoth, honoured, R"(7)"},
    {"max_completion_tokens", kBoth, honoured, R"(7)"},
    {"n", kBoth, honoured, R"(2)"},
    {"seed", kBoth, honoured, R"(4)"},
    {"stop", kBoth, honoured, R"("x")"},
    {"stream", kBoth, honoured, R"(true)"},
    {"stream_options", kBoth, honoured, R"({"include_usage":true})", R"("stream":true)"},
    {"temperature", kBoth, honoured, R"(0.5)"},
    {"top_p", kBoth, honoured, R"(0.5)"},
    {"top_k", kBoth, honoured, R"(5)"},
    {"min_p", kBoth, honoured, R"(0.5)"},
    {"repetition_penalty", kBoth, honoured, R"(1.5)"},
    {"stop_token_ids", kBoth, honoured, R"([3])"},
    {"include_stop_str_in_output", kBoth, honoured, R"(true)"},
    {"ignore_eos", kBoth, honoured, R"(true)"},
    {"return_token_ids", kBoth, honoured, R"(true)"},
    {"min_tokens", kBoth, honoured, R"(2)"},
    {"skip_special_tokens", kBoth, honoured, R"(false)"},
    {"prompt_logprobs", kBoth, honoured, R"(2)"},
    {"allowed_token_ids", kBoth, honoured, R"([3,5])"},
    {"bad_words", kBoth, honoured, R"(["x"])"},
    {"echo", kCompletions, honoured, R"(true)"},
    {"tools", kChat, honoured, R"([{"type":"function"}])"},
    {"tool_choice", kChat, honoured, R"("none")", R"("tools":[{"type":"function"}])"},
    {"add_generation_prompt", kChat, honoured, R"(false)"},
    {"chat_template_kwargs", kChat, honoured, R"({"mood":"good"})"},
    {"priority", kBoth, honoured, R"(3)"},
    {"cache_salt", kBoth, honoured, R"("s")"},
    {"session_id", kBoth, honoured, R"("s","session_generation":"new")"},
    {"add_special_tokens", kCompletions, honoured, R"(false)"},
    {"response_format", kBoth, refused, R"({"type":"json_object"})"},
    {"guided_json", kBoth, refused, R"("x")"},
    {"guided_regex", kBoth, refused, R"("x")"},
    {"guided_choice", kBoth, refused, R"("x")"},
    {"guided_grammar", kBoth, refused, R"("x")"},
    {"structured_outputs", kBoth, refused, R"("x")"},
    {"structural_tag", kBoth, refused, R"("x")"},
    {"json_schema", kBoth, refused, R"("x")"},
    {"regex", kBoth, refused, R"("x")"},
    {"ebnf", kBoth, refused, R"("x")"},
    {"grammar", kBoth, refused, R"("x")"},
    {"stop_regex", kBoth, refused, R"("x")"},
    {"custom_logit_processor", kBoth, refused, R"("x")"},
    {"lora_path", kBoth, refused, R"("x")"},
    {"guided_decoding_backend", kBoth, refused, R"("x")"},
    {"guided_whitespace_pattern", kBoth, refused, R"("x")"},
    {"no_stop_trim", kBoth, refused, R"(true)"},
    {"use_beam_search", kBoth, refused, R"(true)"},
    {"watermarking", kBoth, refused, R"(true)"},
    {"return_tokens_as_token_ids", kBoth, refused, R"(true)"},
    {"return_hidden_states", kBoth, refused, R"(true)"},
    {"return_routed_experts", kBoth, refused, R"(true)"},
    {"return_cached_tokens_details", kBoth, refused, R"(true)"},
    {"return_prompt_text", kChat, refused, R"(true)"},
    {"return_prompt_token_ids", kChat, refused, R"(true)"},
    {"return_meta_info", kChat, refused, R"(true)"},
    {"continue_final_message", kChat, refused, R"(true)"},
    {"echo", kChat, refused, R"(true)"},
    {"add_special_tokens", kChat, refused, R"(true)"},
    {"enable_thinking", kChat, refused, R"(true)"},
    {"enable_thinking", kChat, refused, R"(false)"},
    {"include_reasoning", kChat, refused, R"(false)"},
    {"detokenize", kBoth, refused, R"(false)"},
    {"logits_processors", kBoth, refused, R"([1])"},
    {"logprob_token_ids", kBoth, refused, R"([1])"},
    {"custom_params", kBoth, refused, R"({"a":1})"},
    {"vllm_xargs", kBoth, refused, R"({"a":1})"},
    {"repetition_detection", kBoth, refused, R"({"a":1})"},
    {"kv_transfer_params", kBoth, refused, R"({"a":1})"},
    {"ec_transfer_params", kBoth, refused, R"({"a":1})"},
    {"session_params", kBoth, refused, R"({"a":1})"},
    {"thinking_token_budget", kBoth, refused, R"(5)"},
    {"truncate_prompt_tokens", kBoth, refused, R"(5)"},
    {"routed_experts_prompt_start", kBoth, refused, R"(5)"},
    {"routed_experts_start_len", kBoth, refused, R"(5)"},
    {"bootstrap_port", kBoth, refused, R"(5)"},
    {"bootstrap_room", kBoth, refused, R"(5)"},
    {"bootstrap_host", kBoth, refused, R"("x")"},
    {"extra_key", kBoth, refused, R"("x")"},
    {"prompt_embeds", kBoth, refused, R"("x")"},
    {"best_of", kBoth, refused, R"(2)"},
    {"suffix", kCompletions, refused, R"("x")"},
    {"chat_template", kChat, refused, R"("x")"},
    {"task", kChat, refused, R"("x")"},
    {"verbosity", kChat, refused, R"("x")"},
    {"reasoning_effort", kChat, refused, R"("low")"},
    {"reasoning", kChat, refused, R"({"a":1})"},
    {"thinking", kChat, refused, R"({"a":1})"},
    {"audio", kChat, refused, R"({"a":1})"},
    {"web_search_options", kChat, refused, R"({"a":1})"},
    {"documents", kChat, refused, R"([{}])"},
    {"functions", kChat, refused, R"([{}])"},
    {"input_ids", kChat, refused, R"([1])"},
    {"function_call", kChat, refused, R"({"name":"f"})"},
    {"modalities", kChat, refused, R"(["audio"])"},
    {"tool_choice", kChat, refused, R"("required")"},
    {"user", kBoth, harmless, R"("x")"},
    {"request_id", kBoth, harmless, R"("x")"},
    {"rid", kBoth, harmless, R"("x")"},
    {"truncation_side", kBoth, harmless, R"("x")"},
    {"ngram_corpus_id", kBoth, harmless, R"("x")"},
    {"safety_identifier", kBoth, harmless, R"("x")"},
    {"service_tier", kBoth, harmless, R"("auto")"},
    {"prompt_cache_key", kBoth, harmless, R"("x")"},
    {"prompt_cache_retention", kBoth, harmless, R"("x")"},
    {"spaces_between_special_tokens", kBoth, harmless, R"(false)"},
    {"return_mm_kwargs", kBoth, harmless, R"(false)"},
    {"separate_reasoning", kBoth, harmless, R"(false)"},
    {"stream_reasoning", kBoth, harmless, R"(false)"},
    {"parallel_tool_calls", kBoth, harmless, R"(false)"},
    {"return_token_offsets", kBoth, harmless, R"(true)"},
    {"use_audio_in_video", kBoth, harmless, R"(true)"},
    {"store", kBoth, harmless, R"(true)"},
    {"length_penalty", kBoth, harmless, R"(3)"},
    {"stream_interval", kBoth, harmless, R"(3)"},
    {"routed_dp_rank", kBoth, harmless, R"(3)"},
    {"data_parallel_rank", kBoth, harmless, R"(3)"},
    {"disagg_prefill_dp_rank", kBoth, harmless, R"(3)"},
    {"max_dynamic_patch", kBoth, harmless, R"(3)"},
    {"min_dynamic_patch", kBoth, harmless, R"(3)"},
    {"custom_labels", kBoth, harmless, R"({"a":{}})"},
    {"images_config", kBoth, harmless, R"({"a":{}})"},
    {"metadata", kBoth, harmless, R"({"a":{}})"},
    {"mm_processor_kwargs", kBoth, harmless, R"({"a":{}})"},
    {"media_io_kwargs", kBoth, harmless, R"({"a":{}})"},
    {"prediction", kBoth, harmless, R"({"a":{}})"},
};

// As vLLM (commit 002032e, entrypoints/openai/{completion,chat_completion}/protocol.py) and SGLang (commit 004c82e,
// srt/entrypoints/openai/protocol.py) list them.
constexpr const char* kTheirCompletions =
    "add_special_tokens allowed_token_ids bad_words best_of bootstrap_host bootstrap_port bootstrap_room cache_salt "
    "custom_labels custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf echo "
    "ec_transfer_params extra_key frequency_penalty ignore_eos images_config include_stop_str_in_output json_schema "
    "kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs lora_path max_tokens min_p min_tokens n "
    "ngram_corpus_id no_stop_trim presence_penalty priority prompt_embeds prompt_logprobs regex repetition_detection "
    "repetition_penalty request_id response_format return_cached_tokens_details return_hidden_states return_mm_kwargs "
    "return_routed_experts return_token_ids return_token_offsets return_tokens_as_token_ids rid routed_dp_rank "
    "routed_experts_prompt_start routed_experts_start_len seed session_id session_params skip_special_tokens "
    "spaces_between_special_tokens stop stop_regex stop_token_ids stream stream_interval stream_options "
    "structured_outputs suffix temperature thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side "
    "use_beam_search user vllm_xargs watermarking";
constexpr const char* kTheirChat =
    "add_generation_prompt add_special_tokens allowed_token_ids bad_words bootstrap_host bootstrap_port bootstrap_room "
    "cache_salt chat_template chat_template_kwargs continue_final_message custom_logit_processor custom_params "
    "data_parallel_rank disagg_prefill_dp_rank documents ebnf echo ec_transfer_params extra_key frequency_penalty "
    "ignore_eos images_config include_reasoning include_stop_str_in_output input_ids kv_transfer_params length_penalty "
    "logit_bias logprob_token_ids logprobs lora_path max_completion_tokens max_dynamic_patch max_tokens "
    "media_io_kwargs min_dynamic_patch min_p min_tokens mm_processor_kwargs n ngram_corpus_id no_stop_trim "
    "parallel_tool_calls presence_penalty priority prompt_logprobs reasoning reasoning_effort regex "
    "repetition_detection repetition_penalty request_id response_format return_cached_tokens_details "
    "return_hidden_states return_meta_info return_mm_kwargs return_prompt_text return_prompt_token_ids "
    "return_routed_experts return_token_ids return_token_offsets return_tokens_as_token_ids rid routed_dp_rank "
    "routed_experts_prompt_start routed_experts_start_len seed separate_reasoning session_id session_params "
    "skip_special_tokens spaces_between_special_tokens stop stop_regex stop_token_ids stream stream_interval "
    "stream_options stream_reasoning structured_outputs task temperature thinking_token_budget tool_choice tools "
    "top_k top_logprobs top_p truncate_prompt_tokens truncation_side use_audio_in_video use_beam_search user "
    "vllm_xargs watermarking";

// All that the rest of the server learns of a request; or the error.
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

std::string body_of(const Field& field, const std::string& value) {
  const std::string with = field.with;
  return "\"" + std::string(field.name) + "\":" + value + (with.empty() ? "" : "," + with);
}

TEST_CASE("api: every field of other servers is honoured, refused or harmless", "[server][api]") {
  for (const Field& field : kFields)
    for (const bool chat : {false, true}) {
      if (!(field.where & (chat ? kChat : kCompletions))) continue;
      INFO((chat ? "chat " : "completions ") << body_of(field, field.value));
      const Heard without = hear(chat, field.with), with = hear(chat, body_of(field, field.value));
      const Heard null = hear(chat, body_of(field, "null"));
      REQUIRE(without.status == 200);
      CHECK(null.status == 200);
      CHECK(null.all == without.all);
      CHECK(null.ignored.empty());
      switch (field.kind) {
        case honoured:
          CHECK(with.status == 200);
          CHECK(with.ignored.empty());
          // This tokenizer adds no special tokens (tests/model/tokenizer_test.cc has some that do).
          if (std::string_view(field.name) != "add_special_tokens") CHECK(with.all != without.all);
          break;
        case refused:
          CHECK(with.status == 400);
          CHECK(with.error_field == field.name);
          break;
        case harmless:
          CHECK(with.status == 200);
          CHECK(with.ignored.empty());
          CHECK(with.all == without.all);
          break;
      }
    }
}

TEST_CASE("api: no field of other servers is without a row", "[server][api]") {
  for (const bool chat : {false, true}) {
    std::string names = chat ? kTheirChat : kTheirCompletions;
    for (size_t end; !names.empty(); names.erase(0, end)) {
      end = std::min(names.find(' '), names.size());
      const std::string name = names.substr(0, end);
      INFO((chat ? "chat " : "completions ") << name);
      CHECK(std::ranges::any_of(kFields, [&](const Field& field) {
        return field.name == name && (field.where & (chat ? kChat : kCompletions));
      }));
      if (end < names.size()) ++end;
    }
  }
  // And a name that nobody knows is no row's: it would be found out.
  CHECK(hear(false, R"("brand_new":1)").ignored == std::vector<std::string>{"brand_new"});
}

TEST_CASE("api: values that ask for nothing are as good as none", "[server][api]") {
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

// ---- what is honoured, in detail

TokenRules rules_of(const std::string& more, const ServedModel& model) {
  GenerationCall call;
  const auto error = parse_generation(R"({"prompt":"hi")" + (more.empty() ? "" : "," + more) + "}", false, model, call);
  INFO(more << (error ? error->message : ""));
  REQUIRE(!error);
  const auto& rules = call.prompts[0].sampling.rules;
  return rules ? *rules : TokenRules{};
}

TEST_CASE("api: rules of single tokens, as the request says them", "[server][api]") {
  ServedModel model{.name = "m", .tokenizer = &byte_tokenizer()};
  model.max_model_len = 1000;
  model.vocab_size = byte_tokenizer().vocab_size();
  model.max_prompt_bytes = 1000;
  model.eos_tokens = {256, 10};
  CHECK(rules_of(R"("allowed_token_ids":[9,3,9])", model).allowed == std::vector<int32_t>{3, 9});
  const TokenRules biased = rules_of(R"("logit_bias":{"5":-100,"7":1.5,"8":0})", model);
  REQUIRE(biased.bias.size() == 2);
  CHECK((biased.bias[0].token == 5 && biased.bias[0].bias == -100));
  CHECK((biased.bias[1].token == 7 && biased.bias[1].bias == 1.5f));
  // Bytes are tokens: a blank before a word makes it longer, and is no other token.
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
  // All prompts and choices of a call share one.
  GenerationCall many;
  REQUIRE(!parse_generation(R"({"prompt":["a","b"],"allowed_token_ids":[5]})", false, model, many));
  CHECK(many.prompts[0].sampling.rules == many.prompts[1].sampling.rules);
}

TEST_CASE("api: max_completion_tokens counts for completions, too, and wins", "[server][api]") {
  ServedModel model{.name = "m", .tokenizer = &byte_tokenizer()};
  model.max_model_len = 100;
  model.vocab_size = byte_tokenizer().vocab_size();
  model.max_prompt_bytes = 1000;
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

TEST_CASE("api: what a folder wants of sampling is for requests that do not say", "[server][api]") {
  ServedModel model{.name = "m", .tokenizer = &byte_tokenizer()};
  model.max_model_len = 100;
  model.vocab_size = byte_tokenizer().vocab_size();
  model.max_prompt_bytes = 1000;
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
