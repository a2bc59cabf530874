// Jinja templates as chat templates use them, by the Template Designer Documentation of Jinja 3.1
// (jinja.palletsprojects.com/en/stable/templates) and with what Hugging Face's transformers sets for chats: a sandbox
// that changes no list or dict, trim_blocks, lstrip_blocks, break and continue, {% generation %}, its own tojson,
// raise_exception() and strftime_now().
//
// It has what chat templates were seen to use (in tests/data/chat_templates and 169 more) and no more. Refused when a
// template is parsed, with line and name: every other tag ({% include %}, {% call %}, {% with %}, ...), macros inside
// of loops, recursive loops, chains of comparisons, / // and **, floats as literals, and filters, tests, methods and
// their arguments that are not in the tables of jinja_builtins.cc. Refused when a rendering comes across them:
// arithmetic with floats, integers beyond 64 bits, characters without one capital, and what Python refuses.
//
// A template is a stranger's: expressions nest at most 200 deep, a rendering at most 800; it does a
// bounded amount of work (which bounds its memory too) and makes a bounded output.
//
// Thread safety: const after parsing.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/jinja/jinja_value.h"

namespace xpyd::model::jinja {

struct Limits {
  int64_t work = int64_t{1} << 23;  // nodes, values and 16 bytes of text: about half a second
  size_t output_bytes = size_t{64} << 20;
};

class Template {
 public:
  static constexpr size_t kMaxBytes = size_t{1} << 20;
  // The error reads "line N: ...".
  static Result<Template> parse(std::string_view source);
  Template(Template&&) noexcept;
  Template& operator=(Template&&) noexcept;
  ~Template();

  // `variables` are the names that it may use. `now_unix_s` is for strftime_now (local time).
  // Text from the variables is a client's where its Text says so.
  Result<Text> render(std::vector<std::pair<std::string, Value>> variables, int64_t now_unix_s,
                      const Limits& limits = {}) const;
  // Whether it takes the contents of `messages` apart as lists: a loop, map or selectattr over `message.content`, by
  // whatever names. vLLM decides so between "string" and "openai" contents (_detect_content_format).
  bool iterates_over_content() const;
  // Whether a name, attribute or string with this text stands in it.
  bool mentions(std::string_view word) const;

 private:
  Template();
  std::unique_ptr<Node> block_;
  std::vector<std::string> words_;
};

}  // namespace xpyd::model::jinja
