#include "model/text/chat_template.h"

#include <nlohmann/json.hpp>

#include "base/json/json.h"
#include "model/folder.h"

namespace xpyd::model {
namespace {

using jinja::Value;

constexpr size_t kMaxConfigBytes = size_t{16} << 20;
constexpr const char* kPlainTemplate =
    "{% for message in messages %}{{ '\n' if not loop.first }}{{ message.content }}{% endfor %}";

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
void add_special_tokens(const nlohmann::json& config, jinja::Dict& out) {
  auto add = [&](const std::string& name, Value value) {
    if (!jinja::find(out, name)) out.emplace_back(name, std::move(value));
  };
  for (const char* name : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
    if (auto* value = find_field(config, name))
      if (auto* token = token_text(*value)) add(name, jinja::text_value(*token));
  for (const char* name : {"additional_special_tokens", "extra_special_tokens"}) {
    const nlohmann::json* value = find_field(config, name);
    if (value == nullptr || !value->is_structured()) continue;
    jinja::List list;
    for (const auto& [key, each] : value->items()) {
      const std::string* token = token_text(each);
      if (token && value->is_object()) add(key, jinja::text_value(*token));
      if (token && value->is_array()) list.push_back(jinja::text_value(*token));
    }
    if (!list.empty()) add(name, jinja::list_value(std::move(list)));
  }
}

// Guards all texts of a client's value.
Value guarded(const Tokenizer& tokenizer, const Value& value) {
  if (auto* text = value.text()) return jinja::text_value(tokenizer.guard(*text));
  if (auto* list = value.list()) {
    jinja::List items;
    for (const Value& item : *list) items.push_back(guarded(tokenizer, item));
    return jinja::list_value(std::move(items));
  }
  if (auto* dict = value.dict()) {
    jinja::Dict items;
    for (const auto& [key, item] : *dict) items.emplace_back(tokenizer.guard(key), guarded(tokenizer, item));
    return jinja::dict_value(std::move(items));
  }
  return value;
}

// A template that does not know the role "developer" gets "system".
Value message_value(const Tokenizer& tokenizer, const ChatMessage& message, bool knows_developer) {
  Value role = jinja::text_value(message.role == "developer" && !knows_developer ? "system" : message.role);
  Value content = jinja::text_value(tokenizer.guard(message.content));
  if (!message.fields.dict()) return jinja::dict_value({{"role", std::move(role)}, {"content", std::move(content)}});
  // A message of calls only has content none, which templates test for; any other none would print as "None".
  const bool has_calls = jinja::find(*message.fields.dict(), "tool_calls");
  jinja::Dict items = *guarded(tokenizer, message.fields).dict();
  for (auto& [key, value] : items) {
    if (key == "role") value = role;
    if (key == "content" && !(value.is_none() && has_calls)) value = content;
  }
  return jinja::dict_value(std::move(items));
}

}  // namespace

void ChatTemplate::set(const std::string& source, const std::string& where, bool tool_use) {
  auto made = jinja::Template::parse(source);
  if (!made.ok())
    throw invalid(where + ": chat template, " + made.error().message + " (--chat-template gives another template)");
  (tool_use ? tool_use_ : default_) = std::move(made).value();
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
  const std::string tools = read_optional(dir + "/additional_chat_templates/tool_use.jinja");
  if (!file.empty()) {
    set(file, dir + "/chat_template.jinja", false);
    if (!tools.empty()) set(tools, dir + "/additional_chat_templates/tool_use.jinja", true);
    return;
  }
  const std::string path = dir + "/tokenizer_config.json";
  const nlohmann::json* value = find_field(config, "chat_template");
  if (value == nullptr) return;
  if (value->is_string()) return set(value->get<std::string>(), path, false);
  if (!value->is_array()) throw invalid(path + ": field \"chat_template\": expected a string or an array");
  for (const nlohmann::json& named : *value) {  // [{"name": "default", "template": ...}, ...]
    JsonFields fields(named, path + ": chat_template");
    const std::string name = fields.string("name"), source = fields.string("template");
    if (name == "default" || name == "tool_use") set(source, path, name == "tool_use");
  }
  if (!default_) throw invalid(path + ": field \"chat_template\": no template in it has the name \"default\"");
}

Result<std::unique_ptr<const ChatTemplate>> ChatTemplate::load(const std::string& wanted, const std::string& dir,
                                                               WallClock clock) try {
  std::unique_ptr<ChatTemplate> chat(new ChatTemplate());
  chat->clock_ = std::move(clock);
  chat->plain_ = wanted == "plain";
  if (!dir.empty()) chat->read_folder(dir, wanted == "auto");
  if (chat->plain_) {
    chat->set(kPlainTemplate, "plain", false);
  } else if (wanted != "auto") {
    auto file = read_small_file(wanted, kMaxConfigBytes);
    if (!file.ok())
      return invalid("--chat-template: expected auto, plain, none or the path of a file; " + file.error().message);
    chat->set(file.value(), wanted, false);
  }
  if (!chat->default_) return std::unique_ptr<const ChatTemplate>();
  return std::unique_ptr<const ChatTemplate>(std::move(chat));
} catch (const Error& error) {
  return error;
}

Result<std::unique_ptr<const ChatTemplate>> ChatTemplate::parse(std::string_view jinja, WallClock clock) try {
  std::unique_ptr<ChatTemplate> chat(new ChatTemplate());
  chat->clock_ = std::move(clock);
  chat->set(std::string(jinja), "text", false);
  return std::unique_ptr<const ChatTemplate>(std::move(chat));
} catch (const Error& error) {
  return error;
}

Result<std::string> ChatTemplate::render(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                                         const Request& request) const {
  if (messages.empty()) return invalid("messages: expected at least one message");
  const bool has_tools = request.tools.list() != nullptr;
  const jinja::Template& chosen = has_tools && tool_use_ ? *tool_use_ : *default_;
  const bool knows_developer = chosen.mentions("developer");
  jinja::List list;
  for (const ChatMessage& message : messages) list.push_back(message_value(tokenizer, message, knows_developer));
  jinja::Dict variables;  // the first of a name counts
  variables.emplace_back("messages", jinja::list_value(std::move(list)));
  variables.emplace_back("tools", guarded(tokenizer, request.tools));
  variables.emplace_back("documents", Value{jinja::None()});
  variables.emplace_back("add_generation_prompt", Value{request.add_generation_prompt});
  if (const jinja::Dict* more = request.kwargs.dict())
    for (const auto& [name, value] : *more) variables.emplace_back(name, guarded(tokenizer, value));
  variables.insert(variables.end(), special_tokens_.begin(), special_tokens_.end());
  auto made = chosen.render(std::move(variables), clock_());
  if (!made.ok()) return invalid("the model's chat template failed, " + made.error().message);
  return made;
}

std::vector<int32_t> ChatTemplate::encode(const Tokenizer& tokenizer, const std::string& prompt) const {
  return tokenizer.encode(prompt, {.add_special_tokens = plain_, .guarded = true});
}

}  // namespace xpyd::model
