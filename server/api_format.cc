#include "server/api_format.h"

#include <algorithm>
#include <cmath>

#include "base/utf8.h"
#include "server/json_text.h"

namespace xpyd {
namespace {

const char* error_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 404: return "not_found_error";
    case 503: return "overloaded_error";
    default: return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

void text_or_null(JsonText& json, std::string_view text) {
  if (text.empty())
    json.null();
  else
    json.text(text);
}

void add_ids(JsonText& json, const char* name, const std::vector<int32_t>& ids) {
  json.key(name).open('[');
  for (int32_t id : ids) json.integer(id);
  json.close(']');
}

void add_usage(JsonText& json, const Usage& usage) {
  json.open('{').key("prompt_tokens").integer(usage.prompt_tokens);
  json.key("completion_tokens").integer(usage.completion_tokens);
  json.key("total_tokens").integer(usage.prompt_tokens + usage.completion_tokens);
  json.key("prompt_tokens_details").open('{').key("cached_tokens").integer(usage.cached_tokens);
  json.close('}').close('}');
}

// {"token","logprob","bytes"}, not closed.
void open_chat_logprob(JsonText& json, const Tokenizer* tokenizer, const TokenLogprob& token) {
  json.open('{').key("token").text(token_text(tokenizer, token.token));
  json.key("logprob").number(token.logprob).key("bytes").open('[');
  if (tokenizer != nullptr && token.token >= 0 && token.token < tokenizer->vocab_size())
    for (char c : tokenizer->piece(token.token)) json.integer(static_cast<unsigned char>(c));
  json.close(']');
}

void add_chat_logprobs(JsonText& json, const Tokenizer* tokenizer, const ChoicePart& part) {
  json.open('{').key("content").open('[');
  for (const Sampled& sampled : part.logprobs) {
    open_chat_logprob(json, tokenizer, sampled.chosen);
    json.key("top_logprobs").open('[');
    for (const auto& other : sampled.top) {
      open_chat_logprob(json, tokenizer, other);
      json.close('}');
    }
    json.close(']').close('}');
  }
  json.close(']').close('}');
}

// A prompt's first token, which nothing foretells.
bool is_first(const Sampled& s) { return std::isnan(s.chosen.logprob); }

// vLLM's: by token id, the prompt's own token first.
void add_prompt_logprobs(JsonText& json, const Tokenizer* tokenizer, const std::vector<Sampled>& prompt) {
  json.key("prompt_logprobs").open('[');
  for (const Sampled& s : prompt) {
    if (is_first(s)) {
      json.null();
      continue;
    }
    auto add = [&](const TokenLogprob& t, int64_t rank) {
      json.key(std::to_string(t.token)).open('{').key("logprob").number(t.logprob);
      json.key("rank").integer(rank).key("decoded_token").text(token_text(tokenizer, t.token));
      json.close('}');
    };
    json.open('{');
    add(s.chosen, s.rank);
    for (size_t i = 0; i < s.top.size(); ++i)
      if (s.top[i].token != s.chosen.token) add(s.top[i], static_cast<int64_t>(i) + 1);
    json.close('}');
  }
  json.close(']');
}

void add_completion_logprobs(JsonText& json, const Tokenizer* tokenizer, const ChoicePart& part) {
  json.open('{').key("tokens").open('[');
  for (const Sampled& s : part.logprobs) json.text(token_text(tokenizer, s.chosen.token));
  json.close(']').key("token_logprobs").open('[');
  for (const Sampled& s : part.logprobs) json.number(s.chosen.logprob);
  json.close(']').key("top_logprobs").open('[');
  for (const Sampled& s : part.logprobs) {
    if (is_first(s)) {
      json.null();
      continue;
    }
    // Of tokens with one text the likeliest: a client's dictionary would keep the last.
    std::vector<std::string> listed;
    auto add = [&](const TokenLogprob& t) {
      std::string text = token_text(tokenizer, t.token);
      if (std::find(listed.begin(), listed.end(), text) != listed.end()) return;
      json.key(text).number(t.logprob);
      listed.push_back(std::move(text));
    };
    json.open('{');
    for (const auto& other : s.top) add(other);
    add(s.chosen);
    json.close('}');
  }
  json.close(']').key("text_offset").open('[');
  for (int32_t offset : part.text_offsets) json.integer(offset);
  json.close(']').close('}');
}

void add_end(JsonText& json, const ChoicePart& part) {
  json.key("finish_reason");
  if (part.finish == FinishReason::none)
    json.null();
  else
    json.text(finish_reason_name(part.finish));
  json.key("stop_reason");
  if (part.finish == FinishReason::stop && !part.stop_text.empty())
    json.text(part.stop_text);
  else if (part.finish == FinishReason::stop && part.stop_token >= 0)
    json.integer(part.stop_token);
  else
    json.null();
}

void add_choice(JsonText& json, const Tokenizer* tokenizer, bool chat, bool chunk, const ChoicePart& part) {
  json.open('{').key("index").integer(part.index);
  if (!chat) {
    json.key("text").text(part.text);
  } else {
    json.key(chunk ? "delta" : "message").open('{');
    if (part.first) json.key("role").text("assistant");
    if (part.first || !part.text.empty()) json.key("content").text(part.text);
    json.close('}');
  }
  json.key("logprobs");
  if (!part.with_logprobs)
    json.null();
  else if (chat)
    add_chat_logprobs(json, tokenizer, part);
  else
    add_completion_logprobs(json, tokenizer, part);
  add_end(json, part);
  if (part.token_ids != nullptr) add_ids(json, "token_ids", *part.token_ids);
  if (part.prompt_token_ids != nullptr) add_ids(json, "prompt_token_ids", *part.prompt_token_ids);
  if (part.prompt_logprobs != nullptr && !chat) add_prompt_logprobs(json, tokenizer, *part.prompt_logprobs);
  json.close('}');
}

void add_blocks(JsonText& json, const KvStats& kv) {
  json.key("block_tokens").integer(kv.block_tokens).key("blocks").open('{');
  json.key("capacity").integer(kv.capacity).key("free").integer(kv.free);
  json.key("active").integer(kv.active).key("cached").integer(kv.cached);
  json.key("in_transfer").integer(kv.in_transfer).close('}');
}

}  // namespace

std::string error_body(const ApiError& error) {
  JsonText json;
  json.open('{').key("error").open('{').key("message").text(error.message);
  json.key("type").text(error_type(error.status)).key("param");
  text_or_null(json, error.param);
  json.key("code");
  text_or_null(json, error.code);
  return json.close('}').close('}').take();
}

AnswerFormat::AnswerFormat(const GenerationCall& call, const ServedModel& model, const std::string& id,
                           int64_t created_unix_s)
    : chat_(call.chat), include_usage_(call.include_usage), tokenizer_(model.tokenizer), id_(id) {
  shared_ = ",\"created\":" + std::to_string(created_unix_s) + ",\"model\":" + json_quote(model.name) +
            ",\"system_fingerprint\":null,\"choices\":";
  if (call.turn) shared_ = ",\"session_generation\":" + json_quote(call.turn.generation()) + shared_;
}

std::string AnswerFormat::head(const char* object) const {
  return "{\"id\":" + json_quote(id_) + ",\"object\":\"" + object + "\"" + shared_;
}

std::string AnswerFormat::whole(std::span<const ChoicePart> choices, const Usage& usage) const {
  JsonText json;
  json.open('[');
  for (const auto& part : choices) add_choice(json, tokenizer_, chat_, false, part);
  json.close(']').key("usage");
  add_usage(json, usage);
  if (chat_ && choices[0].prompt_logprobs != nullptr)
    add_prompt_logprobs(json, tokenizer_, *choices[0].prompt_logprobs);
  return head(chat_ ? "chat.completion" : "text_completion") + json.take() + "}";
}

std::string AnswerFormat::chunk(const ChoicePart& choice, const Usage* usage) const {
  JsonText json;
  json.open('[');
  add_choice(json, tokenizer_, chat_, true, choice);
  json.close(']');
  if (usage != nullptr) {
    json.key("usage");
    add_usage(json, *usage);
  } else if (include_usage_) {
    json.key("usage").null();
  }
  return head(chat_ ? "chat.completion.chunk" : "text_completion") + json.take() + "}";
}

std::string AnswerFormat::usage_chunk(const Usage& usage) const {
  JsonText json;
  json.open('[').close(']').key("usage");
  add_usage(json, usage);
  return head(chat_ ? "chat.completion.chunk" : "text_completion") + json.take() + "}";
}

std::string sse_event(std::string_view json) { return "data: " + std::string(json) + "\n\n"; }

std::string token_text(const Tokenizer* tokenizer, int32_t id) {
  if (tokenizer == nullptr || id < 0 || id >= tokenizer->vocab_size()) return "token_id:" + std::to_string(id);
  const std::string& piece = tokenizer->piece(id);
  if (is_utf8(piece)) return piece;
  std::string out = "bytes:";
  for (char c : piece) {
    char hex[8];
    std::snprintf(hex, sizeof hex, "\\x%02x", static_cast<unsigned char>(c));
    out += hex;
  }
  return out;
}

std::string model_card(const ServedModel& model, const std::string& name, const std::string& root, int64_t created) {
  JsonText json;
  json.open('{').key("id").text(name).key("object").text("model");
  json.key("created").integer(created).key("owned_by").text("xpyd");
  json.key("root").text(root).key("parent").null();
  json.key("max_model_len").integer(model.max_model_len);
  json.key("vocab_size").integer(model.vocab_size);  // ours: for clients that make up prompts
  return json.key("permission").open('[').close(']').close('}').take();
}

std::string models_body(const ServedModel& model, const std::string& root, int64_t created) {
  std::string cards;
  for (const std::string& name : model.names)
    cards += (cards.empty() ? "" : ",") + model_card(model, name, root, created);
  return "{\"object\":\"list\",\"data\":[" + cards + "]}";
}

std::string stats_body(const ServedModel& model, const ServiceStats& stats) {
  JsonText json;
  json.open('{').key("model").text(model.name);
  json.key("max_model_len").integer(model.max_model_len);
  json.key("has_chat").boolean(model.chat_template != nullptr && model.tokenizer != nullptr);
  json.key("shared_pool").boolean(stats.shared_pool);
  if (stats.process_pool) {  // what nobody holds is the pool's, and not of each instance
    json.key("pool").open('{').key("blocks").integer(stats.process_pool->blocks);
    json.key("free").integer(stats.process_pool->free).close('}');
  }
  json.key("instances").open('[');
  for (InstanceStats i : stats.instances) {
    if (stats.process_pool) i.kv.free = 0, i.kv.capacity = stats.process_pool->blocks;
    json.open('{').key("name").text(i.name).key("running").integer(i.running);
    json.key("waiting").integer(i.waiting);
    json.key("remote_prefilling").integer(i.queue_remote_prefilling);
    json.key("sending").integer(i.queue_prefill_sending);
    add_blocks(json, i.kv);
    json.key("steps").integer(i.steps).key("generated_tokens").integer(i.generated_tokens);
    json.key("preemptions").integer(i.preemptions);
    json.key("prefix_query_tokens").integer(i.kv.prefix_query_tokens);
    json.key("prefix_hit_tokens").integer(i.kv.prefix_hit_tokens);
    json.key("transfers").integer(i.transfers).key("transfer_bytes").integer(i.transfer_bytes);
    json.key("transfer_seconds").number(i.transfer_seconds).close('}');
  }
  return json.close(']').close('}').take();
}

}  // namespace xpyd
