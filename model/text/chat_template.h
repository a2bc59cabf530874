// Chat messages -> prompt text, by the model's own Jinja template (model/jinja/jinja.h). It renders as Hugging Face's
// apply_chat_template does. The template's variables are messages, tools and documents (none), add_generation_prompt,
// the tokenizer's special tokens (bos_token, eos_token, ...) and chat_template_kwargs.
//
// Thread safety: const after loading.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/jinja/jinja.h"
#include "model/text/tokenizer.h"

namespace xpyd::model {

struct ChatMessage {
  std::string role;  // system | developer | user | assistant
  std::string content;
};

class ChatTemplate {
 public:
  using WallClock = std::function<int64_t()>;  // seconds since 1970

  struct Request {
    bool add_generation_prompt = true;
    std::string kwargs = {};  // a JSON object of more variables, or ""
  };

  // Loads a template. `wanted` is "auto", "plain" or a file.
  // "auto" is the folder's own template: chat_template.jinja, or else chat_template in tokenizer_config.json; if that
  // has several, the one named "default". "plain" is the messages' text, one per line, for models without a template.
  // Returns null for "auto" in a folder without a template. Errors name the file, the line of a template and the
  // unknown construct.
  static Result<std::unique_ptr<const ChatTemplate>> load(const std::string& wanted, const std::string& dir,
                                                          WallClock clock);
  static Result<std::unique_ptr<const ChatTemplate>> parse(std::string_view jinja, WallClock clock);

  // Renders a chat for encode(). Each special token's text in what a client wrote has a mark inside (see
  // Tokenizer::guard), so a message never becomes a control token. If a template marks turns with plain text, a message
  // can still contain that text; such models have no better mark. If the template refuses the messages
  // (raise_exception), the Error has its words.
  Result<std::string> render(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                             const Request& request) const;
  Result<std::string> render(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages) const {
    return render(tokenizer, messages, Request());
  }

  // Returns the ids of a rendered chat. BOS is where the template puts it; for "plain", the tokenizer adds its own.
  std::vector<int32_t> encode(const Tokenizer& tokenizer, const std::string& prompt) const;

 private:
  ChatTemplate() = default;
  // Both throw an Error that says what is wrong.
  void set(const std::string& text, const std::string& where);
  void read_folder(const std::string& dir, bool with_template);

  WallClock clock_;
  std::optional<jinja::Template> jinja_;
  jinja::Dict special_tokens_;
  bool plain_ = false;
};

}  // namespace xpyd::model
