// Runs a template: statements, calls and expressions.
#include "model/jinja/jinja_eval.h"

#include <algorithm>

#include "base/utf8.h"
#include "model/jinja/jinja.h"

namespace xpyd::model::jinja {

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
  if (work_ > bounds_.work) throw Fault{"rendering takes too much time or memory"};
}

// A comparison of two dicts makes a table of one.
void Evaluator::charge_comparison(const Value& a, const Value& b) {
  charge(1 + std::min(weight_of(a), weight_of(b)) * (a.list() || a.dict() ? 8 : 1));
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
  charge(1 + weight_of(text));
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

// ---- Statements

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
  if (const Node* condition = node.kids[2].get()) {  // it sees the target but not this loop's `loop`
    std::vector<Value> all = std::exchange(items, {});
    for (Value& one : all) {
      const Inside inside(*this, scope_);
      assign(target, one);
      if (eval(*condition).truth()) items.push_back(std::move(one));
    }
  }
  const Value held = loop_value(std::move(items));
  Loop& loop = *std::get<std::shared_ptr<Loop>>(held.as);
  bool ended = false;  // an iteration ended without break or continue; only then is else skipped, as in Jinja
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

// ---- Calls

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

// Puts named arguments in the parameters' places, and undefined values in empty ones.
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
  if (builtin.parameters != std::string_view("*"))
    charge(given.named.size()), place(words(builtin.parameters), builtin.name, given);
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
  charge(n * (n + given.named.size()) / 8);  // each is searched among the others
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

// ---- Expressions: names, operators, attributes, items, slices, iteration

bool among(std::string_view words, std::string_view word) {
  return words.find(std::string(1, ' ').append(word).append(1, ' ')) != words.npos;
}

void fail_undefined(const Value& value) { throw Fault{"'" + std::get<Undefined>(value.as).name + "' is undefined"}; }

Value Evaluator::eval(const Node& node) try {
  const Counted counted(*this);
  return eval_kind(node);
} catch (Fault& fault) {
  if (fault.line == 0) fault.line = node.line;
  throw;
}

Value Evaluator::eval_kind(const Node& node) {
  auto kid = [&](size_t i) { return eval(*node.kids[i]); };
  switch (node.kind) {
    case Kind::constant: return node.value;
    case Kind::name: {
      for (Scope* s = scope_; s; s = s->parent) {
        charge(s->variables.size() / 8);
        if (Value* found = s->find(node.name)) return *found;
      }
      if (const Builtin* found = find_builtin("function", node.name))
        return std::make_shared<const Function>(Function{nullptr, found, {}, {}});
      return Undefined{node.name};
    }
    case Kind::attribute: return attribute(kid(0), node.name);
    case Kind::item: {
      const Value object = kid(0);
      return item(object, kid(1));
    }
    case Kind::slice: return slice(node);
    case Kind::list:
    case Kind::tuple: {
      std::vector<Value> items;
      for (const NodePtr& each : node.kids) items.push_back(eval(*each));
      charge(items.size());
      return list_value(std::move(items), node.kind == Kind::tuple ? List::Form::tuple : List::Form::list);
    }
    case Kind::dict: {
      std::vector<std::pair<Value, Value>> items;
      for (size_t i = 0; i < node.kids.size(); i += 2) {
        Value key = kid(i), value = kid(i + 1);
        auto same = std::find_if(items.begin(), items.end(), [&](auto& x) { return equal(x.first, key); });
        charge((items.size() + 2) * weight_of(key));
        if (same != items.end())
          same->second = std::move(value);
        else
          items.emplace_back(std::move(key), std::move(value));
      }
      return dict_value(std::move(items));
    }
    case Kind::call: {
      const Value callee = kid(0);
      return call(callee, arguments(node));
    }
    case Kind::filter:
    case Kind::test: {
      Value self = node.kids[0] ? kid(0) : block_text_;
      return call(*node.builtin, std::move(self), arguments(node));
    }
    case Kind::not_: return !kid(0).truth();
    case Kind::negative: return arithmetic("-", int64_t{0}, kid(0));
    case Kind::binary: return binary(node);
    case Kind::conditional:
      if (kid(1).truth()) return kid(0);
      return node.kids[2] ? kid(2) : Value(Undefined{"the inline if without else"});
    default: throw Fault{"not an expression"};
  }
}

Value Evaluator::binary(const Node& node) {
  const std::string& op = node.name;
  const Value a = eval(*node.kids[0]);
  if (op == "and" || op == "or") return a.truth() == (op == "and") ? eval(*node.kids[1]) : a;
  const Value b = eval(*node.kids[1]);
  charge_comparison(a, b);
  if (op == "==") return equal(a, b);
  if (op == "!=") return !equal(a, b);
  if (op == "in") return contains(b, a);
  if (op == "not in") return !contains(b, a);
  if (op == "~") return text_value(joined(*this, {a, b}, {}));
  for (const Value* side : {&a, &b})
    if (side->is_undefined()) fail_undefined(*side);
  if (op == "<") return less(a, b);
  if (op == ">") return less(b, a);
  if (op == "<=") return !less(b, a);
  if (op == ">=") return !less(a, b);
  return arithmetic(op, a, b);
}

bool Evaluator::contains(const Value& container, const Value& value) {
  if (container.text()) {
    const std::string &text = container.text()->bytes, &part = text_of(value).bytes;
    charge(1 + text.size() / 8 * (1 + part.size() / 32));
    return text.find(part) != text.npos;
  }
  bool found = false;
  for (const Value& each : iterate(container)) {
    charge_comparison(value, each);
    found = found || equal(value, each);
  }
  return found;
}

Value Evaluator::arithmetic(const std::string& op, const Value& a, const Value& b) {
  if (op == "+" && a.text() && b.text()) {
    const Text &x = *a.text(), &y = *b.text();
    Text sum = y.safe && !x.safe ? escaped(x) : x;
    sum.append(x.safe && !y.safe ? escaped(y) : y);
    sum.safe = x.safe || y.safe;
    charge(1 + weight_of(sum));
    return text_value(std::move(sum));
  }
  if (op == "+" && a.list() && b.list() && a.list()->form == b.list()->form && a.list()->is_sequence()) {
    std::vector<Value> items = a.list()->items;
    items.insert(items.end(), b.list()->items.begin(), b.list()->items.end());
    charge(2 + 2 * items.size());
    return list_value(std::move(items), a.list()->form);
  }
  if (op == "*" && (a.text() || b.text())) {
    const Text& unit = a.text() ? *a.text() : *b.text();
    Text text;
    for (int64_t i = (a.text() ? b : a).integer(); i > 0; --i) {
      charge(1 + weight_of(unit));
      text.append(unit);
    }
    return text_value(std::move(text));
  }
  if (a.real() || b.real() || !a.is_number() || !b.is_number())
    throw Fault{"no '" + op + "' of " + a.type_name() + " and " + b.type_name()};
  const int64_t x = a.integer(), y = b.integer();
  int64_t out = 0;
  bool beyond = false;
  if (op == "+") beyond = __builtin_add_overflow(x, y, &out);
  if (op == "-") beyond = __builtin_sub_overflow(x, y, &out);
  if (op == "*") beyond = __builtin_mul_overflow(x, y, &out);
  if (op == "%") {
    if (y <= 0) throw Fault{"% by a number that is not positive is not supported"};
    out = (x % y + y) % y;
  }
  if (beyond) throw Fault{"an integer beyond 64 bits"};
  return out;
}

Value Evaluator::slice(const Node& node) {
  auto part = [&](size_t i) { return node.kids[i] ? eval(*node.kids[i]) : Value(None()); };
  const Value object = part(0), begin = part(1), end = part(2), stride = part(3);
  if (object.is_undefined()) fail_undefined(object);
  const Text* text = object.text();
  const List* list = object.list();
  if (list && !list->is_sequence()) throw Fault{"a slice of a view is not supported"};
  if (!text && !list) return Undefined{"a slice"};
  const int64_t n = int64_t(text ? count_code_points(text->bytes) : list->items.size());
  const int64_t step = stride.is_none() ? 1 : std::clamp(stride.integer(), -n - 1, n + 1);
  if (step == 0) throw Fault{"a slice's step may not be 0"};
  auto bound = [&](const Value& v, int64_t fallback) {
    if (v.is_none()) return fallback;
    const int64_t i = v.integer();
    return std::clamp<int64_t>(i < 0 ? i + n : i, step < 0 ? -1 : 0, step < 0 ? n - 1 : n);
  };
  const int64_t first = bound(begin, step < 0 ? n - 1 : 0), last = bound(end, step < 0 ? -1 : n);
  charge(weight_of(object));
  if (text && step == 1) {
    const size_t from = code_point_at(text->bytes, size_t(first));
    const size_t length = size_t(std::max<int64_t>(0, last - first));
    return text_value(text->substr(from, from + code_point_at(std::string_view(text->bytes).substr(from), length)));
  }
  const std::vector<Value> all = iterate(object);
  std::vector<Value> items;
  for (int64_t i = first; step > 0 ? i < last : i > last; i += step) items.push_back(all[size_t(i)]);
  if (!text) return list_value(std::move(items), list->form);
  Text out = joined(*this, items, {});
  out.safe = text->safe;
  return text_value(std::move(out));
}

Value Evaluator::item(const Value& object, const Value& key) {
  if (object.is_undefined()) fail_undefined(object);
  const Text* name = key.text();
  if (const Dict* dict = object.dict()) {
    charge((dict->items.size() + 7) / 8 * weight_of(key));
    for (const auto& [known, value] : dict->items)
      if (equal(known, key)) return value;
  }
  if (name) return attribute(object, name->bytes);
  const List* list = object.list();
  const Text* text = object.text();
  if (list && list->form == List::Form::view) throw Fault{"an item of a view is not supported"};
  if ((key.is_integer() || key.is_bool()) && (text || (list && list->is_sequence()))) {
    const int64_t n = int64_t(text ? count_code_points(text->bytes) : list->items.size());
    const int64_t i = key.integer() + (key.integer() < 0 ? n : 0);
    if (i >= 0 && i < n && list) return list->items[size_t(i)];
    if (text) charge(1 + text->bytes.size() / 16);
    if (i >= 0 && i < n) {
      const size_t from = code_point_at(text->bytes, size_t(i));
      return text_value(text->substr(from, from + code_point_at(std::string_view(text->bytes).substr(from), 1)));
    }
  }
  return Undefined{"an item of " + std::string(object.type_name())};
}

static Value loop_attribute(const Loop& loop, std::string_view name) {
  const int64_t i = int64_t(loop.index), n = int64_t(loop.items.size());
  if (name == "index") return i + 1;
  if (name == "index0") return i;
  if (name == "revindex") return n - i;
  if (name == "revindex0") return n - i - 1;
  if (name == "first") return i == 0;
  if (name == "last") return i == n - 1;
  if (name == "length") return n;
  if (name == "previtem") return i > 0 ? loop.items[size_t(i - 1)] : Undefined{"loop.previtem"};
  if (name == "nextitem") return i + 1 < n ? loop.items[size_t(i + 1)] : Undefined{"loop.nextitem"};
  throw Fault{"loop." + std::string(name) + " is not supported"};
}

Value Evaluator::attribute(const Value& object, const std::string& name) {
  if (object.is_undefined()) fail_undefined(object);
  if (const Loop* loop = object.get<Loop>()) return loop_attribute(*loop, name);
  if (const Namespace* space = object.get<Namespace>()) {
    charge(space->attributes.size() / 8);
    for (const auto& [known, value] : space->attributes)
      if (known == name) return value;
    return Undefined{name};
  }
  if (const Builtin* method = find_method(object, name)) return method_value(*method, object);
  if (const Dict* dict = object.dict()) {
    charge((dict->items.size() + 7) / 8 * (1 + name.size() / 16));
    if (const Value* found = dict->find(name)) return *found;
  }
  return Undefined{name};
}

std::vector<Value> Evaluator::iterate(const Value& value) {
  std::vector<Value> items;
  if (value.is_undefined()) return items;
  if (const List* list = value.list()) {
    charge(list->items.size());
    if (list->form == List::Form::lazy && std::exchange(list->spent, true)) return items;
    return list->items;
  }
  if (const Dict* dict = value.dict()) {
    charge(dict->items.size());
    for (const auto& [key, unused] : dict->items) items.push_back(key);
    return items;
  }
  const Text* text = value.text();
  if (!text) throw Fault{std::string("cannot iterate over ") + value.type_name()};
  charge(4 * text->bytes.size());
  for (size_t at = 0; at < text->bytes.size();) {
    const size_t end = at + code_point_at(std::string_view(text->bytes).substr(at, 4), 1);
    items.push_back(text_value(text->substr(at, end)));
    at = end;
  }
  return items;
}

// ---- A template

constexpr int kMaxRunDepth = 800;

Template::Template() = default;
Template::Template(Template&&) noexcept = default;
Template& Template::operator=(Template&&) noexcept = default;
Template::~Template() = default;

static Error error_of(const Fault& fault) {
  return invalid((fault.line > 0 ? "line " + std::to_string(fault.line) + ": " : "") + fault.what);
}

Result<Template> Template::parse(std::string_view source) try {
  if (source.size() > kMaxBytes) return invalid("a template of more than 1 MiB");
  std::vector<Token> tokens = lex(source);
  Template made;
  for (const Token& token : tokens)
    if (token.kind == Token::Kind::name || token.kind == Token::Kind::text) made.words_.push_back(token.text);
  made.block_ = jinja::parse(std::move(tokens));
  return made;
} catch (const Fault& fault) {
  return error_of(fault);
}

Result<Text> Template::render(std::vector<std::pair<std::string, Value>> variables, int64_t now_unix_s,
                              const Limits& limits) const try {
  Scope given{nullptr, std::move(variables)};
  Evaluator evaluator({limits.work, limits.output_bytes, kMaxRunDepth}, given, now_unix_s);
  return evaluator.render(*block_);
} catch (const Fault& fault) {
  return error_of(fault);
}

bool Template::iterates_over_content() const { return jinja::iterates_over_content(*block_); }

bool Template::mentions(std::string_view word) const {
  return std::find(words_.begin(), words_.end(), word) != words_.end();
}

}  // namespace xpyd::model::jinja
