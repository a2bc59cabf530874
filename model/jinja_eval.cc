// Runs a template's statements, and calls.

#include "model/jinja_eval.h"

#include <algorithm>

namespace xpyd::jinja {

Value* Scope::find(std::string_view name) {
  for (auto& [known, value] : variables)
    if (known == name) return &value;
  return nullptr;
}

void Scope::set(const std::string& name, Value value) {
  if (Value* known = find(name))
    *known = std::move(value);
  else
    variables.emplace_back(name, std::move(value));
}

class Evaluator::Inside {
 public:
  Inside(Evaluator& e, Scope* parent) : e_(e), scope_{parent, {}} {
    e.charge(2);
    outer_ = std::exchange(e.scope_, &scope_);
  }
  ~Inside() { e_.scope_ = outer_; }

 private:
  Evaluator& e_;
  Scope scope_;
  Scope* outer_;
};

Evaluator::~Evaluator() {
  for (auto& space : namespaces_) space->attributes.clear();
}

Text Evaluator::render(const Node& block) { return captured(block); }

void Evaluator::charge(size_t units) {
  work_ += static_cast<int64_t>(std::min(units, size_t{1} << 40));
  if (work_ > bounds_.work) throw Fault{"rendering takes too long or too much memory"};
}

Value Evaluator::make_namespace(Named attributes) {
  charge(8 + attributes.size());
  namespaces_.push_back(std::make_shared<Namespace>(Namespace{std::move(attributes)}));
  return namespaces_.back();
}

Text Evaluator::shown(const Value& value) {
  if (!value.text()) charge(4 * weight_of(value));  // a character may become four
  return str(value);
}

void Evaluator::print(const Text& text) {
  charge(1 + text.bytes.size() / 16);
  if (out_->bytes.size() + text.bytes.size() > bounds_.output_bytes)
    throw Fault{"the output has more than " + std::to_string(bounds_.output_bytes) + " bytes"};
  out_->append(text);
}

Text Evaluator::captured(const Node& block) {
  Text text;
  Text* outer = std::exchange(out_, &text);
  run_block(block);
  out_ = outer;
  return text;
}

// ---- statements

Evaluator::Flow Evaluator::run_block(const Node& block) {
  for (const NodePtr& node : block.kids)
    if (Flow flow = run(*node); flow != Flow::next) return flow;
  return Flow::next;
}

Evaluator::Flow Evaluator::run(const Node& node) try {
  const Counted counted(*this);
  switch (node.kind) {
    case Kind::output: print(shown(eval(*node.kids[0]))); break;
    case Kind::set: assign(*node.kids[0], eval(*node.kids[1])); break;
    case Kind::set_block:
    case Kind::filter_block: {
      const bool sets = node.kind == Kind::set_block;
      Text text;
      {
        const Inside inside(*this, scope_);
        text = captured(*node.kids[1]);
      }
      if (sets) {
        assign(*node.kids[0], text_value(std::move(text)));
      } else {
        block_text_ = text_value(std::move(text));
        print(shown(eval(*node.kids[0])));
      }
      break;
    }
    case Kind::if_else:
      for (size_t i = 0; i + 1 < node.kids.size(); i += 2)
        if (eval(*node.kids[i]).truth()) return run_block(*node.kids[i + 1]);
      return node.kids.size() % 2 == 0 ? Flow::next : run_block(*node.kids.back());
    case Kind::for_loop: return run_for(node);
    case Kind::macro:
      charge(8);
      scope_->set(node.name, std::make_shared<const Function>(Function{&node, nullptr, {}, {}}));
      break;
    case Kind::scope: {
      const Inside inside(*this, scope_);
      return run_block(*node.kids[0]);
    }
    case Kind::break_loop: return Flow::break_loop;
    case Kind::continue_loop: return Flow::continue_loop;
    default: throw Fault{"not a statement"};
  }
  return Flow::next;
} catch (Fault& fault) {
  if (fault.line == 0) fault.line = node.line;
  throw;
}

Evaluator::Flow Evaluator::run_for(const Node& node) {
  const Node &target = *node.kids[0], &body = *node.kids[3];
  std::vector<Value> items = iterate(eval(*node.kids[1]));
  if (const Node* condition = node.kids[2].get()) {  // it sees the target and no `loop` of this one
    std::vector<Value> all = std::exchange(items, {});
    for (Value& one : all) {
      const Inside inside(*this, scope_);
      assign(target, one);
      if (eval(*condition).truth()) items.push_back(std::move(one));
    }
  }
  const Value held = loop_value(std::move(items));
  Loop& loop = *std::get<std::shared_ptr<Loop>>(held.as);
  bool ended = false;  // a turn, by neither break nor continue: only then no else, as in Jinja
  for (Flow flow = Flow::next; loop.index < loop.items.size() && flow != Flow::break_loop; ++loop.index) {
    const Inside inside(*this, scope_);
    scope_->set("loop", held);
    assign(target, loop.items[loop.index]);
    flow = run_block(body);
    ended |= flow == Flow::next;
  }
  if (ended || !node.kids[4]) return Flow::next;
  const Inside inside(*this, scope_);
  return run_block(*node.kids[4]);
}

void Evaluator::assign(const Node& target, Value value) {
  if (target.kind == Kind::tuple) {
    std::vector<Value> values = iterate(value);
    if (values.size() != target.kids.size())
      throw Fault{"cannot unpack " + std::to_string(values.size()) + " values into " +
                  std::to_string(target.kids.size())};
    for (size_t i = 0; i < values.size(); ++i) assign(*target.kids[i], values[i]);
  } else if (target.kind == Kind::attribute) {
    const Value space = eval(*target.kids[0]);
    auto* held = std::get_if<std::shared_ptr<Namespace>>(&space.as);
    if (!held) throw Fault{"cannot set an attribute of '" + target.kids[0]->name + "', which is no namespace"};
    charge((*held)->attributes.size() / 8);
    for (auto& [known, old] : (*held)->attributes)
      if (known == target.name) return void(old = std::move(value));
    (*held)->attributes.emplace_back(target.name, std::move(value));
  } else {
    charge(scope_->variables.size() / 8);
    scope_->set(target.name, std::move(value));
  }
}

// ---- calls

Arguments Evaluator::arguments(const Node& node) {
  Arguments given;
  for (size_t i = 0; i < node.names.size(); ++i) {
    Value value = eval(*node.kids[i + 1]);
    const std::string& how = node.names[i];
    if (how == "*")
      for (Value& each : iterate(value)) given.positional.push_back(std::move(each));
    else if (how.empty())
      given.positional.push_back(std::move(value));
    else
      given.named.emplace_back(how, std::move(value));
  }
  return given;
}

// Puts named arguments where the parameters are, and undefined values where there are none.
static void place(const std::vector<std::string>& parameters, const std::string& of, Arguments& given) {
  const size_t n = given.positional.size();
  if (n > parameters.size()) throw Fault{"too many arguments for " + of};
  given.positional.resize(parameters.size(), Undefined{"", true});
  for (auto& [key, value] : given.named) {
    const auto at = std::find(parameters.begin() + long(n), parameters.end(), key);
    if (at == parameters.end()) throw Fault{of + " takes no argument '" + key + "'"};
    given.positional[size_t(at - parameters.begin())] = std::move(value);
  }
}

static std::vector<std::string> words(std::string_view text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    out.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

bool takes(const Builtin& builtin, std::string_view parameter) {
  const std::vector<std::string> known = words(builtin.parameters);
  return builtin.parameters == std::string_view("*") || std::find(known.begin(), known.end(), parameter) != known.end();
}

Value Evaluator::call(const Builtin& builtin, Value self, Arguments given) {
  charge(2 + weight_of(self) / 4);
  if (builtin.parameters != std::string_view("*")) place(words(builtin.parameters), builtin.name, given);
  if (builtin.of == std::string_view("text filter")) self = text_value(shown(self));
  return builtin.run(*this, self, given);
}

Value Evaluator::call(const Value& callee, Arguments given) {
  if (callee.is_undefined()) fail_undefined(callee);
  const Function* function = callee.get<const Function>();
  if (!function) throw Fault{std::string("cannot call ") + callee.type_name()};
  if (function->builtin) return call(*function->builtin, function->self, std::move(given));
  return call_macro(*function->macro, std::move(given));
}

Value Evaluator::call_macro(const Node& macro, Arguments given) {
  const size_t n = macro.names.size(), first_default = n - (macro.kids.size() - 1);
  place(macro.names, "the macro '" + macro.name + "'", given);
  const Inside inside(*this, root_);
  for (size_t i = 0; i < n; ++i) {
    Value& value = given.positional[i];
    const Undefined* nothing = std::get_if<Undefined>(&value.as);
    if (nothing && nothing->not_given)
      value = i < first_default ? Undefined{macro.names[i]} : eval(*macro.kids[1 + i - first_default]);
    scope_->set(macro.names[i], std::move(value));
  }
  return text_value(captured(*macro.kids[0]));
}

}  // namespace xpyd::jinja
