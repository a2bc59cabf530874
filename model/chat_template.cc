#include "model/chat_template.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/utf8.h"
#include "model/folder.h"
#include "model/unicode.h"

namespace xpyd {
namespace {

constexpr size_t kMaxConfigBytes = size_t{16} << 20;

// Python's str.isspace(), which Jinja's trim and the templates' strip() go by.
bool is_python_space(uint32_t c) { return unicode::is_space(c) || (c >= 0x1c && c <= 0x1f); }

std::string_view strip_left(std::string_view text) {
  while (!text.empty()) {
    CodePoint c = next_code_point(text);
    if (!is_python_space(c.value)) break;
    text.remove_prefix(c.bytes);
  }
  return text;
}

std::string_view strip_right(std::string_view text) {
  size_t kept = 0;
  for (size_t i = 0; i < text.size();) {
    CodePoint c = next_code_point(text.substr(i));
    i += c.bytes;
    if (!is_python_space(c.value)) kept = i;
  }
  return text.substr(0, kept);
}

std::string_view strip(std::string_view text) { return strip_left(strip_right(text)); }

using Messages = std::vector<ChatMessage>;
using Rendered = Result<std::vector<PromptPiece>>;

class Prompt {
 public:
  Prompt& control(std::string_view text) { return add(text, true); }
  Prompt& message(std::string_view text) { return add(text, false); }
  std::vector<PromptPiece> pieces;

 private:
  Prompt& add(std::string_view text, bool from_template) {
    if (text.empty()) return *this;
    if (pieces.empty() || pieces.back().from_template != from_template)
      pieces.push_back({"", from_template});
    pieces.back().text += text;
    return *this;
  }
};

// Every message's role as templates name it.
Result<std::vector<std::string_view>> roles_of(const Messages& messages) {
  if (messages.empty()) return invalid("messages: expected at least one message");
  std::vector<std::string_view> roles;
  for (size_t i = 0; i < messages.size(); ++i) {
    std::string_view role;
    for (const char* known : {"system", "user", "assistant", "tool"})
      if (messages[i].role == known) role = known;
    if (messages[i].role == "developer") role = "system";
    if (role.empty())
      return invalid("messages[" + std::to_string(i) +
                     "].role: expected system, developer, user, assistant or tool");
    roles.push_back(role);
  }
  return roles;
}

// [system] user assistant user ...: the index of the first user message.
Result<size_t> check_alternating(const Messages& messages) {
  auto roles = roles_of(messages);
  if (!roles.ok()) return roles.error();
  size_t first = roles.value()[0] == "system" ? 1 : 0;
  if (first == messages.size()) return invalid("messages: expected a user message");
  for (size_t i = first; i < messages.size(); ++i) {
    std::string expected = (i - first) % 2 == 0 ? "user" : "assistant";
    if (roles.value()[i] != expected)
      return invalid("messages[" + std::to_string(i) + "].role: this model's chat template wants " +
                     "an optional system message, then user and assistant in turn; expected " +
                     expected + ", got " + messages[i].role);
  }
  return first;
}

Rendered llama2(const Messages& messages, bool) {
  auto first = check_alternating(messages);
  if (!first.ok()) return first.error();
  Prompt prompt;
  for (size_t i = first.value(); i < messages.size(); ++i) {
    const std::string& content = messages[i].content;
    if ((i - first.value()) % 2 == 1) {
      prompt.control(" ").message(strip(content)).control(" </s>");
    } else if (i == 1 && first.value() == 1) {
      // The template strips system and user text as one.
      std::string_view text = strip_right(content);
      prompt.control("<s>[INST] <<SYS>>\n").message(messages[0].content);
      prompt.control(text.empty() ? "\n<</SYS>>" : "\n<</SYS>>\n\n").message(text);
      prompt.control(" [/INST]");
    } else {
      prompt.control("<s>[INST] ").message(strip(content)).control(" [/INST]");
    }
  }
  return std::move(prompt.pieces);
}

Rendered llama3(const Messages& messages, bool add_generation_prompt) {
  auto roles = roles_of(messages);
  if (!roles.ok()) return roles.error();
  Prompt prompt;
  prompt.control("<|begin_of_text|>");
  for (size_t i = 0; i < messages.size(); ++i) {
    std::string_view role = roles.value()[i];
    if (role == "tool") role = "ipython";  // Llama 3.1's name for it
    prompt.control("<|start_header_id|>").control(role).control("<|end_header_id|>\n\n");
    prompt.message(strip(messages[i].content)).control("<|eot_id|>");
  }
  if (add_generation_prompt) prompt.control("<|start_header_id|>assistant<|end_header_id|>\n\n");
  return std::move(prompt.pieces);
}

Rendered chatml(const Messages& messages, bool add_generation_prompt) {
  auto roles = roles_of(messages);
  if (!roles.ok()) return roles.error();
  Prompt prompt;
  for (size_t i = 0; i < messages.size(); ++i) {
    prompt.control("<|im_start|>").control(roles.value()[i]).control("\n");
    prompt.message(messages[i].content).control("<|im_end|>\n");
  }
  if (add_generation_prompt) prompt.control("<|im_start|>assistant\n");
  return std::move(prompt.pieces);
}

Rendered mistral_family(const Messages& messages, bool v3) {
  auto first = check_alternating(messages);
  if (!first.ok()) return first.error();
  Prompt prompt;
  prompt.control("<s>");
  // The system text stands in the first user message; in v3 in the last message, if the user's.
  size_t with_system = first.value() == 0 ? messages.size() : v3 ? messages.size() - 1 : 1;
  for (size_t i = first.value(); i < messages.size(); ++i) {
    const std::string& content = messages[i].content;
    if ((i - first.value()) % 2 == 1) {
      prompt.control(" ").message(v3 ? strip(content) : content).control("</s>");
      continue;
    }
    prompt.control(v3 ? "[INST] " : " [INST] ");
    if (i == with_system) prompt.message(messages[0].content).control("\n\n");
    prompt.message(content).control(v3 ? "[/INST]" : " [/INST]");
  }
  return std::move(prompt.pieces);
}
Rendered mistral(const Messages& messages, bool) { return mistral_family(messages, false); }
Rendered mistral_v3(const Messages& messages, bool) { return mistral_family(messages, true); }

Rendered plain(const Messages& messages, bool) {
  auto roles = roles_of(messages);
  if (!roles.ok()) return roles.error();
  Prompt prompt;
  for (size_t i = 0; i < messages.size(); ++i)
    prompt.message(i == 0 ? "" : "\n").message(messages[i].content);
  return std::move(prompt.pieces);
}

const ChatTemplate kTemplates[] = {
    {"llama2", llama2, "<s> </s>", "Llama-2-chat's tokenizer_config.json"},
    {"llama3", llama3, "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
     "Llama-3-Instruct's; without the date lines that 3.1's puts before the system text"},
    {"chatml", chatml, "<|im_start|> <|im_end|>",
     "OpenAI's ChatML, as Qwen; without Qwen2.5's default system message"},
    {"mistral", mistral, "<s> </s>", "Mistral-7B-Instruct-v0.1's and v0.2's"},
    {"mistral_v3", mistral_v3, "<s> </s> [INST] [/INST]",
     "Mistral-7B-Instruct-v0.3's, without tools"},
    {"plain", plain, "", "none: the messages' text, one per line"},
};

// The folder's own template, "" if it has none.
Result<std::string> template_of(const std::string& dir) {
  std::string jinja = dir + "/chat_template.jinja", config = dir + "/tokenizer_config.json";
  auto file = read_model_file(jinja, kMaxConfigBytes);
  if (file.ok() || file.error().code != ErrorCode::not_found) return file;
  auto file_text = read_model_file(config, kMaxConfigBytes);
  if (!file_text.ok()) {
    if (file_text.error().code == ErrorCode::not_found) return std::string();
    return file_text.error();
  }
  auto json = parse_json(file_text.value(), config, {.max_bytes = kMaxConfigBytes});
  if (!json.ok()) return json.error();
  if (!json.value().is_object()) return invalid(config + ": expected an object");
  const nlohmann::json* value = find_field(json.value(), "chat_template");
  if (value == nullptr) return std::string();
  if (value->is_string()) return value->get<std::string>();
  if (!value->is_array())
    return invalid(config + ": field \"chat_template\": expected a string or an array");
  for (const nlohmann::json& named : *value) {  // [{"name": "default", "template": ...}, ...]
    JsonFields fields(named, config + ": chat_template");
    std::string name = fields.string("name"), text = fields.string("template");
    if (!fields.status().ok()) return fields.status().error();
    if (name == "default") return text;
  }
  return invalid(config + ": field \"chat_template\": none of the templates is named \"default\"");
}

std::string known_names() {
  std::string names;
  for (const ChatTemplate& row : kTemplates)
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

Result<std::string> recognise(const std::string& dir, const Tokenizer& tokenizer) {
  std::string text;
  if (!dir.empty()) {
    auto found = template_of(dir);
    if (!found.ok()) return found.error();
    text = found.value();
  }
  auto has_token = [&](const char* token) { return tokenizer.token_id(token) >= 0; };
  bool use_tokens = text.empty();
  auto shows = [&](const char* mark) {
    return use_tokens ? has_token(mark) : text.find(mark) != text.npos;
  };
  if (shows("<|start_header_id|>")) return std::string("llama3");
  if (shows("<|im_start|>")) return std::string("chatml");
  if (shows("<<SYS>>")) return std::string("llama2");
  if (shows("[INST]")) return std::string(has_token("[INST]") ? "mistral_v3" : "mistral");
  if (use_tokens) return std::string("plain");
  return invalid(
      dir + ": its chat template is none of those built in; choose one by name: " + known_names());
}

}  // namespace

std::span<const ChatTemplate> chat_templates() { return kTemplates; }

Result<const ChatTemplate*> find_chat_template(std::string_view name, const std::string& dir,
                                               const Tokenizer& tokenizer) {
  std::string wanted(name);
  if (wanted == "auto") {
    auto recognised = recognise(dir, tokenizer);
    if (!recognised.ok()) return recognised.error();
    wanted = recognised.value();
  }
  for (const ChatTemplate& row : kTemplates) {
    if (row.name != wanted) continue;
    std::string_view tokens = row.control_tokens;
    while (!tokens.empty()) {
      size_t space = std::min(tokens.find(' '), tokens.size());
      std::string token(tokens.substr(0, space));
      if (tokenizer.token_id(token) < 0)
        return invalid("chat template " + wanted + ": the tokenizer has no token " + token);
      tokens.remove_prefix(std::min(space + 1, tokens.size()));
    }
    return &row;
  }
  return invalid("chat template \"" + wanted + "\": expected auto or one of " + known_names());
}

std::vector<int32_t> encode_chat(const Tokenizer& tokenizer,
                                 const std::vector<PromptPiece>& pieces) {
  std::vector<Tokenizer::Part> parts;
  bool any_template = false;
  for (const PromptPiece& piece : pieces) {
    parts.push_back({piece.text, piece.from_template});
    any_template |= piece.from_template;
  }
  return tokenizer.encode(parts, !any_template);
}

}  // namespace xpyd
