// Jinja as the chat templates of the served models use it, with the settings of Hugging Face's transformers:
// trim_blocks, lstrip_blocks, its own tojson, raise_exception() and strftime_now().
//
// It has if, for, set, macro and comments; the operators == != < <= > >= in not and or + - % ~, inline if, slices,
// lists and dicts; and the filters, tests and methods of the table in jinja_eval.cc. parse() refuses everything else,
// with line and name.
//
// A template comes from the model's folder or from the operator. Its nesting, its output and the steps of a rendering
// are bounded, and with the steps its time and the bytes of its values.
//
// Thread safety: const after parsing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"

namespace xpyd::model::jinja {

struct Value;
struct Node;
struct Namespace;
struct Undefined {};
struct None {};
using List = std::vector<Value>;
using Dict = std::vector<std::pair<std::string, Value>>;  // as inserted

struct Value {
  std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const std::string>, std::shared_ptr<const List>,
               std::shared_ptr<const Dict>, std::shared_ptr<Namespace>, const Node*>
      as;  // a Node is a macro; null stands for a function of ours
  uint32_t weight = 1;  // the values inside, itself included; 16 bytes of text count as one more; at most kMaxWeight
  uint32_t height = 0;  // of the lists and dicts inside
  template <class T>
  const T* get() const {
    auto* held = std::get_if<std::shared_ptr<T>>(&as);
    return held ? held->get() : nullptr;
  }
  const std::string* text() const { return get<const std::string>(); }
  const List* list() const { return get<const List>(); }
  const Dict* dict() const { return get<const Dict>(); }
  bool is_undefined() const { return std::holds_alternative<Undefined>(as); }
  bool is_none() const { return std::holds_alternative<None>(as); }
  bool truth() const;
};
struct Namespace {
  Dict attributes;
};

constexpr uint32_t kMaxWeight = 1u << 31;
Value text_value(std::string text);
Value list_value(List items);  // the evaluator refuses nesting beyond a bound, here and in dicts
Value dict_value(Dict items);
// Converts JSON that parse_json() has accepted; objects keep their order.
Value json_value(std::string_view json);
const Value* find(const Dict& dict, std::string_view key);

class Template {
 public:
  // Parses a template. The error reads "line N: ...".
  static Result<Template> parse(std::string_view source);
  // Renders with these variables. `now_unix_s` is for strftime_now (local time).
  Result<std::string> render(Dict variables, int64_t now_unix_s) const;
  // True if a name, attribute or string of the template equals `word`.
  bool mentions(std::string_view word) const;

 private:
  std::shared_ptr<const Node> block_;
};

}  // namespace xpyd::model::jinja
