// What rendering a chat template needs: its variables, its work so far, and the built-in functions.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/jinja_ast.h"

namespace xpyd::jinja {

struct Frame {
  std::shared_ptr<Frame> parent;
  std::vector<std::pair<std::string, Value>> variables;
  Value* find(std::string_view name);
  void set(const std::string& name, Value value);
};

struct Loop {
  const Node* node;
  std::shared_ptr<Frame> frame;  // around the loop, for loop(...)
  std::vector<Value> items;
  size_t index = 0;
  int depth = 1;
  Value last_changed;
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

class Evaluator {
 public:
  struct Bounds {
    int64_t work = 0;
    size_t output_bytes = 0;
    int depth = 0;
    int64_t now_unix_s = 0;
  };
  Evaluator(const Bounds& bounds, std::shared_ptr<Frame> variables);
  ~Evaluator();  // frees what refers to itself
  Text render(const std::vector<NodePtr>& body);

  // Counts as much work; a Fault beyond the bound. A unit is a node, a value made or 16 bytes of
  // text: some 50 ns and at most 80 bytes of memory.
  void charge(size_t units);
  void charge_search(std::string_view text, std::string_view part) {
    charge(1 + text.size() / 16 * (1 + part.size() / 64));
  }
  // The items that iteration yields.
  std::vector<Value> iterate(const Value& value);
  Value attribute(const Value& object, const std::string& name);
  Value item(const Value& object, const Value& key);
  Value call(const Value& callee, Arguments arguments);
  Value call(const Builtin& builtin, const Value& self, Arguments arguments);
  int64_t now_unix_s() const { return bounds_.now_unix_s; }
  Value make_namespace(std::vector<std::pair<std::string, Value>> attributes);

 private:
  enum class Flow { next, break_loop, continue_loop };
  Flow run(const std::vector<NodePtr>& body);
  Flow run(const Node& node);
  Flow run_for(const Node& node, std::vector<Value> items, int depth);
  Text captured(const std::vector<NodePtr>& body);  // in a frame of its own
  Value eval(const Node& node);
  Value eval_node(const Node& node);
  Value binary(const std::string& op, const Value& a, const Value& b);
  bool compare(const std::string& op, const Value& a, const Value& b);
  Value slice(const Value& object, const Node& node);
  Value call_macro(const Function& function, Arguments arguments);
  Value filter_block(const Node& node, const Value& text);
  Arguments arguments(const Node& node, size_t first);
  void assign(const Node& target, Value value);
  void print(const Text& text);
  std::shared_ptr<Frame> enter(std::shared_ptr<Frame> parent);

  const Bounds bounds_;
  int64_t work_ = 0;
  int depth_ = 0;
  std::shared_ptr<Frame> frame_;
  Text* out_ = nullptr;
  std::vector<std::shared_ptr<Frame>> captured_;
  std::vector<std::shared_ptr<Namespace>> namespaces_;
};

// A filter, test, method or global function. `args` are as many as `parameters` has names, in
// their order, undefined where not given; with parameters "*", those given.
struct Builtin {
  const char* on;  // methods: the type's name as Value::type_name() has it; else ""
  const char* name;
  const char* parameters;
  Value (*run)(Evaluator& e, const Value& self, Arguments& args);
  bool keeps_safe = false;  // methods: right for a |safe string too
};
const Builtin* find_filter(std::string_view name);
const Builtin* find_test(std::string_view name);
const Builtin* find_function(std::string_view name);
const Builtin* find_method(const Value& object, std::string_view name);
bool is_method(std::string_view name);  // of any type

[[noreturn]] void fail_undefined(const Value& value);
Text joined(Evaluator& e, const std::vector<Value>& items, const Text& between);
Text printf_text(Evaluator& e, const Text& format, const Value& values);  // format % values
Text escaped(const Text& text);                                           // for HTML

}  // namespace xpyd::jinja
