// Chat messages -> prompt text, for the template families of the supported models. The templates are
// written by hand in C++: a Jinja template out of a model folder is code, and is never run.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/tokenizer.h"

namespace xpyd {

struct ChatMessage {
  std::string role;  // system | user | assistant | tool; "developer" is read as system
  std::string content;
};

// A message's text never becomes a control token: `pieces` alternate between template text, in which special
// tokens are parsed, and message text, in which they are not.
struct PromptPiece {
  std::string text;
  bool from_template;
};

struct ChatTemplate {
  const char* name;  // llama2, llama3, chatml, mistral, plain
  Result<std::vector<PromptPiece>> (*render)(const std::vector<ChatMessage>& messages,
                                             bool add_generation_prompt);
  const char* source;
};

std::span<const ChatTemplate> chat_templates();

// By name, or for "auto" by what the folder's tokenizer_config.json chat_template and special tokens look like.
// Without any: "plain" (the messages' text, one per line).
Result<const ChatTemplate*> find_chat_template(std::string_view name, const std::string& dir,
                                               const Tokenizer& tokenizer);

// Ids of the rendered prompt, BOS as the template has it, never twice.
std::vector<int32_t> encode_chat(const Tokenizer& tokenizer, const std::vector<PromptPiece>& pieces);

}  // namespace xpyd
