// Chat messages -> prompt text, for the template families of the supported models. The templates
// are written by hand in C++: a Jinja template out of a model folder is code, and is never run.
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

// A message's text never becomes a control token: pieces alternate between template text, in which
// special tokens are parsed, and message text, in which they are not. (Where a template marks turns
// with plain text, as llama2 and mistral do with "[INST]", a message can still contain that text:
// those models have no better mark.)
struct PromptPiece {
  std::string text;
  bool from_template;
};

struct ChatTemplate {
  const char* name;  // llama2, llama3, chatml, mistral, mistral_v3, plain
  // Messages that the template cannot express (none, roles that do not alternate where they must,
  // an unknown role) are an Error that names the message.
  Result<std::vector<PromptPiece>> (*render)(const std::vector<ChatMessage>& messages,
                                             bool add_generation_prompt);
  const char* control_tokens;  // that the tokenizer must have, with spaces between
  const char* source;
};

std::span<const ChatTemplate> chat_templates();

// By name, or for "auto" by the folder's chat template (chat_template.jinja, else
// tokenizer_config.json) and, without one, by the tokenizer's special tokens; with neither it is
// "plain" (the messages' text, one per line). A folder's template that is not one of ours is an
// error, as is a template whose control tokens the tokenizer lacks. `dir` may be empty: then there
// is only the tokenizer to look at.
Result<const ChatTemplate*> find_chat_template(std::string_view name, const std::string& dir,
                                               const Tokenizer& tokenizer);

// Ids of the rendered prompt, equal to those of the whole text at once (so that merges reach across
// pieces, and SentencePiece's space is put before the text, not before each piece). BOS is where
// the template has it; a prompt without any template text ("plain") gets what the tokenizer adds to
// text.
std::vector<int32_t> encode_chat(const Tokenizer& tokenizer,
                                 const std::vector<PromptPiece>& pieces);

}  // namespace xpyd
