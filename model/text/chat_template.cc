#include "model/text/chat_template.h"

#include <nlohmann/json.hpp>

#include "base/json/json.h"
#include "model/folder.h"

namespace xpyd::model {
namespace {

using jinja::Value;

constexpr size_t kMaxConfigBytes = size_t{16} << 20;
constexpr const char* kPlain =
    "{% for message in messages %}{{ '\n' if not loop.first }}{{ message.content }}{% endfor %}";

Value text(std::string_view words, bool from_client) { return jinja::text_value({words, from_client}); }

// Returns a file's text; "" if there is no file.
std::string read_optional(const std::string& path) {
  auto file = read_model_file(path, kMaxConfigBytes);
  return !file && file.error().code == ErrorCode::not_found ? "" : need(std::move(file));
}

// A special token is a string, or an object with its content.
const std::string* token_text(const nlohmann::json& value) {
  const nlohmann::json* content = value.is_object() ? find_field(value, "content") : &value;
  return content && content->is_string() ? &content->get_ref<const std::string&>() : nullptr;
}

// Adds the variables of Hugging Face's special_tokens_map.
void add_special_tokens(const nlohmann::json& config, std::vector<std::pair<std::string, Value>>& out) {
  auto add = [&](const std::string& name, Value value) {
    for (const auto& [known, unused] : out)
      if (known == name) return;
    out.emplace_back(name, std::move(value));
  };
  for (const char* name : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
    if (auto* value = find_field(config, name))
      if (auto* token = token_text(*value)) add(name, text(*token, false));
  for (const char* name : {"additional_special_tokens", "extra_special_tokens"}) {
    const nlohmann::json* value = find_field(config, name);
    if (value == nullptr || !value->is_structured()) continue;
    std::vector<Value> list;
    for (const auto& [key, each] : value->items()) {
      const std::string* token = token_text(each);
      if (token && value->is_object()) add(key, text(*token, false));
      if (token && value->is_array()) list.push_back(text(*token, false));
    }
    if (!list.empty()) add(name, jinja::list_value(std::move(list)));
  }
}

Value parts_of(Value words) {
  return jinja::list_value(
      {jinja::dict_value({{text("type", false), text("text", false)}, {text("text", false), std::move(words)}})});
}

}  // namespace

void ChatTemplate::set(const std::string& source, const std::string& where) {
  auto made = jinja::Template::parse(source);
  if (!made.ok())
    throw invalid(where + ": chat template, " + made.error().message + " (--chat-template gives another template)");
  jinja_ = std::move(made).value();
  look_at_contents();
}

void ChatTemplate::read_folder(const std::string& dir, bool with_template) {
  nlohmann::json config = nlohmann::json::object(), map = config;
  for (auto [name, json] :
       {std::pair("/tokenizer_config.json", &config), std::pair("/special_tokens_map.json", &map)}) {
    const std::string file = read_optional(dir + name);
    if (file.empty()) continue;
    *json = need(parse_json(file, dir + name, {.max_bytes = kMaxConfigBytes}));
    if (!json->is_object()) throw invalid(dir + name + ": expected an object");
    add_special_tokens(*json, special_tokens_);
  }
  if (!with_template) return;
  const std::string file = read_optional(dir + "/chat_template.jinja");
  if (!file.empty()) return set(file, dir + "/chat_template.jinja");
  const std::string path = dir + "/tokenizer_config.json";
  const nlohmann::json* value = find_field(config, "chat_template");
  if (value == nullptr) return;
  if (value->is_string()) return set(value->get<std::string>(), path);
  if (!value->is_array()) throw invalid(path + ": field \"chat_template\": expected a string or an array");
  for (const nlohmann::json& named : *value) {  // [{"name": "default", "template": ...}, ...]
    JsonFields fields(named, path + ": chat_template");
    const std::string name = fields.string("name"), source = fields.string("template");
    if (name == "default") set(source, path);
  }
  if (!jinja_) throw invalid(path + ": field \"chat_template\": no template in it has the name \"default\"");
}

Result<std::unique_ptr<const ChatTemplate>> ChatTemplate::load(const std::string& wanted, const std::string& dir,
                                                               WallClock clock) try {
  std::unique_ptr<ChatTemplate> chat(new ChatTemplate());
  chat->clock_ = std::move(clock);
  chat->plain_ = wanted == "plain";
  if (!dir.empty()) chat->read_folder(dir, wanted == "auto");
  if (chat->plain_) {
    chat->set(kPlain, "plain");
  } else if (wanted != "auto") {
    auto file = read_small_file(wanted, jinja::Template::kMaxBytes);
    if (!file.ok())
      return invalid("--chat-template: expected auto, plain, none or the path of a file; " + file.error().message);
    chat->set(file.value(), wanted);
  }
  if (!chat->jinja_) return std::unique_ptr<const ChatTemplate>();
  return std::unique_ptr<const ChatTemplate>(std::move(chat));
} catch (const Error& error) {
  return error;
}

Result<std::unique_ptr<const ChatTemplate>> ChatTemplate::parse(std::string_view jinja, WallClock clock) try {
  std::unique_ptr<ChatTemplate> chat(new ChatTemplate());
  chat->clock_ = std::move(clock);
  chat->set(std::string(jinja), "text");
  return std::unique_ptr<const ChatTemplate>(std::move(chat));
} catch (const Error& error) {
  return error;
}

// A content is text unless the template iterates over it and a trial shows that it then prints no text.
void ChatTemplate::look_at_contents() {
  if (!jinja_->iterates_over_content()) return;
  const std::string words = "what a user says";
  const auto prints = [&](bool reads_text) {
    reads_text_ = reads_text;
    const auto out = run({{"user", words}}, {});
    return out.ok() && out.value().bytes.find(words) != std::string::npos;
  };
  const bool as_text = prints(true), as_parts = prints(false);
  reads_text_ = as_text || !as_parts;
}

Result<jinja::Text> ChatTemplate::run(const std::vector<ChatMessage>& messages, const Request& request) const try {
  const bool knows_developer = jinja_->mentions("developer");
  std::vector<Value> list;
  for (const ChatMessage& message : messages) {
    const std::string& role = message.role == "developer" && !knows_developer ? "system" : message.role;
    const Value words = text(message.content, true);
    list.push_back(jinja::dict_value(
        {{text("role", false), text(role, false)}, {text("content", false), reads_text_ ? words : parts_of(words)}}));
  }
  std::vector<std::pair<std::string, Value>> variables;  // the first of a name counts
  variables.emplace_back("messages", jinja::list_value(std::move(list)));
  variables.emplace_back("tools", jinja::None());
  variables.emplace_back("documents", jinja::None());
  variables.emplace_back("add_generation_prompt", request.add_generation_prompt);
  const Value more = request.kwargs.empty() ? Value() : jinja::json_value(request.kwargs);
  if (more.dict())
    for (const auto& [name, value] : more.dict()->items) variables.emplace_back(name.text()->bytes, value);
  variables.insert(variables.end(), special_tokens_.begin(), special_tokens_.end());
  return jinja_->render(std::move(variables), clock_());
} catch (const jinja::Fault& fault) {  // the messages are too large or too deep for a value
  return invalid("messages: " + fault.what);
}

Result<std::vector<PromptPiece>> ChatTemplate::render(const std::vector<ChatMessage>& messages,
                                                      const Request& request) const {
  if (messages.empty()) return invalid("messages: expected at least one message");
  auto made = run(messages, request);
  if (!made.ok()) return invalid("the model's chat template failed, " + made.error().message);
  std::vector<PromptPiece> pieces;
  size_t begin = 0;
  for (const jinja::Text::Run& run : made.value().runs) {
    pieces.push_back({made.value().bytes.substr(begin, run.end - begin), !run.from_client});
    begin = run.end;
  }
  return pieces;
}

std::vector<int32_t> ChatTemplate::encode(const Tokenizer& tokenizer, const std::vector<PromptPiece>& pieces) const {
  std::vector<Tokenizer::Part> parts;
  for (const PromptPiece& piece : pieces) parts.push_back({piece.text, piece.from_template});
  return tokenizer.encode(parts, plain_);
}

}  // namespace xpyd::model
