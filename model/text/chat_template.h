// Chat messages -> prompt text, by the model's own Jinja template (model/jinja/jinja.h), rendered as Hugging Face's
// apply_chat_template does: messages, tools, documents (none), add_generation_prompt, the tokenizer's special tokens
// (bos_token, eos_token, ...) and chat_template_kwargs are its variables.
//
// Thread safety: const after loading.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/jinja/jinja.h"
#include "model/text/tokenizer.h"

namespace xpyd::model {

struct ChatMessage {
  std::string role;  // system | developer | user | assistant | tool
  std::string content;
  // The whole message, where it has more than these two: a dict with role, content (none, text or a
  // list of text parts), tool_calls, name, ...
  jinja::Value fields = {};
};

// A message's text never becomes a control token, whatever the template does to it: pieces
// alternate between template text, in which special tokens are parsed, and clients' text, in which
// they are not. Roles, which are one of five words, count as template text. (Where a template marks
// turns with plain text, a message can still contain that text: such models have no better mark.)
struct PromptPiece {
  std::string text;
  bool from_template;
};

class ChatTemplate {
 public:
  using WallClock = std::function<int64_t()>;  // seconds since 1970

  struct Request {
    bool add_generation_prompt = true;
    jinja::Value tools = jinja::None();  // a list
    jinja::Value kwargs = {};            // a dict of more variables, or undefined
  };

  // `wanted` is "auto" (the folder's own: chat_template.jinja, else chat_template in tokenizer_config.json; "tool_use"
  // of several where a request has tools, else "default"), "plain" (the messages' text, one per line, for models
  // without any) or a file. Null: "auto", and the folder has none. Errors name the file and, of a template, the line
  // and what is not understood.
  static Result<std::unique_ptr<const ChatTemplate>> load(const std::string& wanted, const std::string& dir,
                                                          WallClock clock);
  static Result<std::unique_ptr<const ChatTemplate>> parse(std::string_view jinja, WallClock clock);

  // Messages that the template refuses (raise_exception) are an Error with its words.
  Result<std::vector<PromptPiece>> render(const std::vector<ChatMessage>& messages, const Request& request) const;
  Result<std::vector<PromptPiece>> render(const std::vector<ChatMessage>& messages, bool add_generation_prompt) const {
    return render(messages, Request{add_generation_prompt, jinja::None(), {}});
  }
  bool takes_tools() const { return tool_use_ || default_->jinja.mentions("tools"); }

  // Ids equal to those of the whole text at once (so that merges reach across pieces). BOS is where
  // the template has it; "plain" gets what the tokenizer adds to text.
  std::vector<int32_t> encode(const Tokenizer& tokenizer, const std::vector<PromptPiece>& pieces) const;

 private:
  ChatTemplate() = default;
  // Both throw the Error of what is wrong.
  void set(const std::string& text, const std::string& where, bool tool_use);
  void read_folder(const std::string& dir, bool with_template);
  struct Source {
    jinja::Template jinja;
    // What it does with a content: text, a list of parts, or either.
    bool reads_text = true, reads_parts = false;
  };
  Result<jinja::Text> run(const Source& source, const std::vector<ChatMessage>& messages, const Request& request) const;
  void look_at_contents(Source& source);

  WallClock clock_;
  std::unique_ptr<Source> default_, tool_use_;
  std::vector<std::pair<std::string, jinja::Value>> special_tokens_;
  bool plain_ = false;
};

}  // namespace xpyd::model
