// The values of a chat template: Python's, as far as Jinja shows them.
//
// Thread safety: a value of json_value() or of constants is const and may be shared; a value that a rendering makes
// belongs to it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace xpyd::model::jinja {

// Any error within the interpreter; the functions of jinja.h return it as an Error.
struct Fault {
  std::string what;
  int line = 0;  // 0: not known yet
};

// UTF-8 that records which of its bytes came from a client, so that these never become control tokens. All texts are
// made by append() and substr(), so the record survives any operation of a template.
struct Text {
  std::string bytes;
  struct Run {
    size_t end;
    bool from_client;
  };
  std::vector<Run> runs;  // consecutive, up to bytes.size(); neighbours differ
  bool safe = false;      // Jinja's Markup: `+` would escape its other operand

  Text() = default;
  Text(std::string_view text, bool from_client = false) { append(text, from_client); }  // NOLINT
  void append(std::string_view text, bool from_client = false);
  void append(const Text& text, size_t begin = 0, size_t end = std::string::npos);
  Text substr(size_t begin, size_t end) const;
  bool any_from_client() const;
};

struct Value;
struct Node;
struct Builtin;

struct Undefined {
  std::string name;        // the name that was looked up
  bool not_given = false;  // an argument
};
struct None {};
// Depth and weight are bounded when a container is made. So code may recurse through a value, and visits a shared part
// as often as it occurs.
struct Extent {
  int depth = 1;      // of nested lists and dicts
  size_t weight = 1;  // values inside; 16 bytes of text, or two of its runs, count as one more
};
struct List {
  enum class Form { list, tuple, view, lazy };  // view: of a dict, or a range; lazy: a generator
  Form form = Form::list;
  std::vector<Value> items;
  mutable bool spent = false;  // a generator can be used once
  Extent extent;
  bool is_sequence() const { return form <= Form::tuple; }
};
struct Dict {
  std::vector<std::pair<Value, Value>> items;  // as inserted; keys are texts or integers
  Extent extent;
  const Value* find(std::string_view key) const;
};
struct Namespace {
  std::vector<std::pair<std::string, Value>> attributes;
};
struct Loop {  // the variable `loop`
  std::vector<Value> items;
  size_t index = 0;
  Extent extent;
};
struct Function;

struct Value {
  std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const Text>, std::shared_ptr<const List>,
               std::shared_ptr<const Dict>, std::shared_ptr<Namespace>, std::shared_ptr<Loop>,
               std::shared_ptr<const Function>>
      as;
  Value() = default;
  template <class T>
  requires(!std::is_same_v<std::decay_t<T>, Value>) Value(T&& value)
      : as(std::forward<T>(value)) {}  // NOLINT: implicit on purpose

  template <class T>
  const T* get() const {
    auto* held = std::get_if<std::shared_ptr<T>>(&as);
    return held ? held->get() : nullptr;
  }
  const Text* text() const { return get<const Text>(); }
  const List* list() const { return get<const List>(); }
  const Dict* dict() const { return get<const Dict>(); }
  bool is_undefined() const { return std::holds_alternative<Undefined>(as); }
  bool is_none() const { return std::holds_alternative<None>(as); }
  bool given() const { return !is_undefined() && !is_none(); }
  bool is_bool() const { return std::holds_alternative<bool>(as); }
  bool is_integer() const { return std::holds_alternative<int64_t>(as); }
  const double* real() const { return std::get_if<double>(&as); }
  bool is_number() const { return is_bool() || is_integer() || real(); }
  int64_t integer() const;  // of an integer or bool; else throws a Fault
  double number() const;    // of a number; else throws a Fault

  bool truth() const;
  bool any_from_client() const;
  const char* type_name() const;
};

struct Function {  // either macro or builtin
  const Node* macro = nullptr;
  const Builtin* builtin = nullptr;
  Value self;  // of a method
  Extent extent;
};

Value text_value(Text text);
Value method_value(const Builtin& method, Value self);
Value loop_value(std::vector<Value> items);
Value list_value(std::vector<Value> items, List::Form form = List::Form::list);
Value dict_value(std::vector<std::pair<Value, Value>> items);

// Converts JSON that parse_json() has accepted; objects keep their order. All its text counts as a client's.
Value json_value(std::string_view json);
size_t weight_of(const Value& value);
size_t weight_of(const Text& text);  // without the 1 of a value; a run counts half

bool equal(const Value& a, const Value& b);
bool less(const Value& a, const Value& b);  // numbers or texts; else throws a Fault
Text str(const Value& value);               // Python's str()

// Returns the end of the white space (Python's str.isspace) at `at`; the begin of the white space at the text's end.
size_t skip_space(std::string_view text, size_t at);
size_t trailing_space(std::string_view text);
// Returns the byte offset of the code point with this index; the text's end if there are fewer.
size_t code_point_at(std::string_view text, size_t index);

}  // namespace xpyd::model::jinja
