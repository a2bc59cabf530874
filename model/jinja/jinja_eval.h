// A chat template as tokens and as a tree, and the state of a rendering: variables, work so far and built-in functions.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/jinja/jinja_value.h"

namespace xpyd::model::jinja {

struct Token {
  enum class Kind { data, name, text, integer, op, end };  // op includes {{ }} {% %}
  Kind kind;
  std::string text;
  int line;
  bool is(std::string_view op_or_name) const { return (kind == Kind::op || kind == Kind::name) && text == op_or_name; }
};
std::vector<Token> lex(std::string_view source);  // throws Fault

enum class Kind {
  // Statements.
  block,         // kids in a row
  output,        // kids[0]
  set,           // kids[0] = kids[1]
  set_block,     // kids[0] = the text of block kids[1]
  for_loop,      // kids: target, iterable, condition or null, block, else block or null
  if_else,       // kids: condition, block, condition, block, ..., then perhaps the else block
  macro,         // name, block kids[0], parameters `names`; the last of them have defaults kids[1..]
  filter_block,  // filters kids[0] around a null; block kids[1]
  scope,         // block kids[0]: {% generation %}
  break_loop,
  continue_loop,
  // Expressions.
  constant,   // value
  name,       // name
  attribute,  // kids[0].name
  item,       // kids[0][kids[1]]
  slice,      // kids[0][kids[1]:kids[2]:kids[3]]; the last three may be null
  list,
  tuple,
  dict,    // kids: key, value, key, value, ...
  call,    // kids[0](kids[1..]), named `names`: "" is positional, "*" is spread
  filter,  // kids[0]|builtin(kids[1..]); kids[0] is null in place of a block's text
  test,    // kids[0] is builtin(kids[1..])
  not_,
  negative,
  binary,       // kids[0] name kids[1]
  conditional,  // kids[0] if kids[1] else kids[2], which may be null
};

struct Node {
  Kind kind;
  int line;
  std::string name;
  int height = 1;  // bounded, so that code may recurse through a tree
  Value value = {};
  const Builtin* builtin = nullptr;
  std::vector<std::unique_ptr<Node>> kids = {};
  std::vector<std::string> names = {};
};
using NodePtr = std::unique_ptr<Node>;

// Throws a Fault with its line for input that is not Jinja or not supported.
NodePtr parse(std::vector<Token> tokens);

// See Template::iterates_over_content().
bool iterates_over_content(const Node& block);

// ---- Rendering

using Named = std::vector<std::pair<std::string, Value>>;

// Variables. Loops, macros and captured blocks open a scope; {% if %} does not.
struct Scope {
  Scope* parent;
  Named variables;
  Value* find(std::string_view name);
  void set(const std::string& name, Value value);
};

struct Arguments {
  std::vector<Value> positional;
  Named named;
  const Value& operator[](size_t i) const { return positional[i]; }
};

class Evaluator {
 public:
  struct Bounds {
    int64_t work = 0;
    size_t output_bytes = 0;
    int depth = 0;
  };
  Evaluator(const Bounds& bounds, Scope& variables, int64_t now)
      : now_unix_s(now), bounds_(bounds), root_(&variables), scope_(&variables) {}
  ~Evaluator();  // frees namespaces, which may contain themselves
  Text render(const Node& block);

  // Counts work, and throws a Fault beyond the bound. A unit is a node, a value made or 16 bytes of text: some 50 ns
  // and at most 80 bytes of memory.
  void charge(size_t units);
  void charge_comparison(const Value& a, const Value& b);
  Text shown(const Value& value);  // str(), after counting its work
  // Returns the items that iteration yields.
  std::vector<Value> iterate(const Value& value);
  Value item(const Value& object, const Value& key);
  bool contains(const Value& container, const Value& value);
  Value call(const Builtin& builtin, Value self, Arguments arguments);
  Value make_namespace(Named attributes);
  const int64_t now_unix_s;

 private:
  enum class Flow { next, break_loop, continue_loop };
  class Inside;   // opens a scope
  class Counted;  // a node that is being run
  Flow run(const Node& node);
  Flow run_block(const Node& block);
  Flow run_for(const Node& node);
  Text captured(const Node& block);  // runs in a scope of its own
  void print(const Text& text);
  void assign(const Node& target, Value value);

  Value eval(const Node& node);
  Value eval_kind(const Node& node);
  Value binary(const Node& node);
  Value arithmetic(const std::string& op, const Value& a, const Value& b);
  Value slice(const Node& node);
  Value attribute(const Value& object, const std::string& name);
  Arguments arguments(const Node& node);
  Value call(const Value& callee, Arguments arguments);
  Value call_macro(const Node& macro, Arguments arguments);

  const Bounds bounds_;
  int64_t work_ = 0;
  int depth_ = 0;
  Scope *const root_, *scope_;
  Text* out_ = nullptr;
  Value block_text_;  // text that a {% filter %} works on
  std::vector<std::shared_ptr<Namespace>> namespaces_;
};

class Evaluator::Counted {
 public:
  explicit Counted(Evaluator& e) : e_(e) {
    e.charge(1);
    if (e.depth_ >= e.bounds_.depth) throw Fault{"nested too deeply"};
    ++e.depth_;
  }
  ~Counted() { --e_.depth_; }

 private:
  Evaluator& e_;
};

// `args` has one value per name of `parameters`, in their order, undefined if not given. With parameters "*" it has the
// given ones.
struct Builtin {
  // "filter", "text filter" (applied to str() of its operand), "test", "function", or for a method the type's name as
  // in Value::type_name().
  const char* of;
  const char* name;
  const char* parameters;
  Value (*run)(Evaluator& e, const Value& self, const Arguments& args);
};
// "filter" also finds text filters.
const Builtin* find_builtin(std::string_view of, std::string_view name);
// Throws a Fault for a method that Python's type has and these tables lack.
const Builtin* find_method(const Value& object, std::string_view name);
bool is_method(std::string_view name);  // of any type
bool takes(const Builtin& builtin, std::string_view parameter);

bool among(std::string_view words, std::string_view word);  // " such as these "
[[noreturn]] void fail_undefined(const Value& value);
const Text& text_of(const Value& value);  // throws a Fault for other values
Text escaped(const Text& text);           // for HTML, as + does beside a |safe string
Text joined(Evaluator& e, const std::vector<Value>& items, const Text& between);
Value tojson(Evaluator& e, const Value& value, const Arguments& args);

}  // namespace xpyd::model::jinja
