// Jinja templates as chat templates use them. The source is the Template Designer Documentation of Jinja 3.1
// (jinja.palletsprojects.com/en/stable/templates), with the settings of Hugging Face's transformers for chats: a
// sandbox that changes no list or dict, trim_blocks, lstrip_blocks, break and continue, {% generation %}, its own
// tojson, raise_exception() and strftime_now().
//
// It supports what known chat templates use (tests/data/chat_templates and 169 more), and no more.
// parse() refuses, with line and name: every other tag ({% include %}, {% call %}, {% with %}, ...), macros inside
// loops, recursive loops, chains of comparisons, / // and **, float literals, and filters, tests, methods and arguments
// that are not in the tables of jinja_builtins.cc.
// render() refuses: arithmetic with floats, integers beyond 64 bits, characters without a single capital, and anything
// that Python refuses.
//
// A template is untrusted. Expressions nest at most 200 deep, a rendering at most 800. Work and output are bounded;
// memory is bounded with the work. Beyond a bound, parse() or render() returns an error.
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
  // Parses a template. The error reads "line N: ...".
  static Result<Template> parse(std::string_view source);
  Template(Template&&) noexcept;
  Template& operator=(Template&&) noexcept;
  ~Template();

  // Renders with these variables. `now_unix_s` is for strftime_now (local time). The result marks bytes as a client's
  // if they come from variables whose Text says so.
  Result<Text> render(std::vector<std::pair<std::string, Value>> variables, int64_t now_unix_s,
                      const Limits& limits = {}) const;
  // True if the template iterates over the content of a message: a loop, map or selectattr over `message.content`,
  // under any name. vLLM uses this to tell "openai" from "string" contents (_detect_content_format).
  bool iterates_over_content() const;
  // True if a name, attribute or string of the template equals `word`.
  bool mentions(std::string_view word) const;

 private:
  Template();
  std::unique_ptr<Node> block_;
  std::vector<std::string> words_;
};

}  // namespace xpyd::model::jinja
