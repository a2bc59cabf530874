// Runs a template's tree. Names are looked up through frames as Jinja scopes them: loops, macros,
// blocks and {% with %} open one, {% if %} does not.

#include "model/jinja_eval.h"

#include <algorithm>

namespace xpyd::jinja {

Value* Frame::find(std::string_view name) {
  for (auto& [known, value] : variables)
    if (known == name) return &value;
  return nullptr;
}

void Frame::set(const std::string& name, Value value) {
  if (Value* known = find(name))
    *known = std::move(value);
  else
    variables.emplace_back(name, std::move(value));
}

Evaluator::Evaluator(const Bounds& bounds, std::shared_ptr<Frame> variables)
    : bounds_(bounds), frame_(std::move(variables)) {}

// Macros remember frames that hold them, and a namespace may hold itself.
Evaluator::~Evaluator() {
  for (auto& frame : captured_) frame->variables.clear();
  for (auto& space : namespaces_) space->attributes.clear();
}

Text Evaluator::render(const std::vector<NodePtr>& body) { return captured(body); }

void Evaluator::charge(size_t units) {
  work_ += static_cast<int64_t>(std::min(units, size_t{1} << 40));
  if (work_ > bounds_.work) throw Fault{"rendering takes too long or too much memory"};
}

Value Evaluator::make_namespace(std::vector<std::pair<std::string, Value>> attributes) {
  charge(8 + attributes.size());
  namespaces_.push_back(std::make_shared<Namespace>(Namespace{std::move(attributes)}));
  return namespaces_.back();
}

std::shared_ptr<Frame> Evaluator::enter(std::shared_ptr<Frame> parent) {
  charge(2);
  auto frame = std::make_shared<Frame>();
  frame->parent = std::move(parent);
  return std::exchange(frame_, std::move(frame));
}

void Evaluator::print(const Text& text) {
  charge(1 + text.bytes.size() / 16);
  if (out_->bytes.size() + text.bytes.size() > bounds_.output_bytes)
    throw Fault{"the output has more than " + std::to_string(bounds_.output_bytes) + " bytes"};
  out_->append(text);
}

Text Evaluator::captured(const std::vector<NodePtr>& body) {
  Text text;
  Text* outer = std::exchange(out_, &text);
  auto frame = enter(frame_);
  run(body);
  frame_ = std::move(frame);
  out_ = outer;
  return text;
}

// ---- statements

Evaluator::Flow Evaluator::run(const std::vector<NodePtr>& body) {
  for (const NodePtr& node : body)
    if (Flow flow = run(*node); flow != Flow::next) return flow;
  return Flow::next;
}

Evaluator::Flow Evaluator::run(const Node& node) try {
  charge(1);
  if (++depth_ > bounds_.depth) throw Fault{"nested too deeply"};
  struct Leave {
    int& depth;
    ~Leave() { --depth; }
  } leave{depth_};
  switch (node.kind) {
    case Kind::data:
      print(*node.value.text());
      break;
    case Kind::output:
      print(str(eval(*node.kids[0])));
      break;
    case Kind::set:
      assign(*node.kids[0], eval(*node.kids[1]));
      break;
    case Kind::set_block: {
      Value text = text_value(captured(node.body));
      assign(*node.kids[0], node.kids.size() > 1 ? filter_block(*node.kids[1], text) : text);
      break;
    }
    case Kind::if_else:
      if (eval(*node.kids[0]).truth()) return run(node.body);
      for (size_t i = 1; i < node.kids.size(); ++i)
        if (eval(*node.kids[i]->kids[0]).truth()) return run(node.kids[i]->body);
      return run(node.orelse);
    case Kind::for_loop:
      return run_for(node, iterate(eval(*node.kids[1])), 1);
    case Kind::macro:
      charge(8);
      captured_.push_back(frame_);
      frame_->set(node.name,
                  std::make_shared<const Function>(Function{&node, frame_, nullptr, {}}));
      break;
    case Kind::call_block: {
      const Node& call_node = *node.kids[0];
      Arguments given = arguments(call_node, 1);
      captured_.push_back(frame_);
      given.named.emplace_back(
          "caller", std::make_shared<const Function>(Function{&node, frame_, nullptr, {}}));
      print(str(call(eval(*call_node.kids[0]), std::move(given))));
      break;
    }
    case Kind::filter_block: {
      Value text = text_value(captured(node.body));
      print(str(filter_block(*node.kids[0], text)));
      break;
    }
    case Kind::with:
    case Kind::scope: {
      std::vector<Value> values;
      for (size_t i = 1; i < node.kids.size(); i += 2) values.push_back(eval(*node.kids[i]));
      auto outer = enter(frame_);
      for (size_t i = 0; i < values.size(); ++i) assign(*node.kids[2 * i], values[i]);
      const Flow flow = run(node.body);
      frame_ = std::move(outer);
      return flow;
    }
    case Kind::break_loop:
      return Flow::break_loop;
    case Kind::continue_loop:
      return Flow::continue_loop;
    default:
      break;
  }
  return Flow::next;
} catch (Fault& fault) {
  if (fault.line == 0) fault.line = node.line;
  throw;
}

Evaluator::Flow Evaluator::run_for(const Node& node, std::vector<Value> items, int depth) {
  auto outer = frame_;
  if (node.kids[2]) {  // the condition sees the target and no `loop` of this one
    std::vector<Value> kept;
    for (Value& one : items) {
      enter(outer);
      assign(*node.kids[0], one);
      if (eval(*node.kids[2]).truth()) kept.push_back(std::move(one));
      frame_ = outer;
    }
    items = std::move(kept);
  }
  auto loop = std::make_shared<Loop>(Loop{&node, outer, std::move(items), 0, depth, {}});
  Flow flow = Flow::next;
  for (; loop->index < loop->items.size() && flow != Flow::break_loop; ++loop->index) {
    enter(outer);
    frame_->set("loop", loop);
    assign(*node.kids[0], loop->items[loop->index]);
    flow = run(node.body);
    frame_ = outer;
  }
  if (loop->items.empty()) {
    enter(outer);
    flow = run(node.orelse);
    frame_ = outer;
    return flow;
  }
  return Flow::next;
}

void Evaluator::assign(const Node& target, Value value) {
  if (target.kind == Kind::tuple) {
    std::vector<Value> values = iterate(value);
    if (values.size() != target.kids.size())
      throw Fault{"cannot unpack " + std::to_string(values.size()) + " values into " +
                  std::to_string(target.kids.size())};
    for (size_t i = 0; i < values.size(); ++i) assign(*target.kids[i], values[i]);
  } else if (target.kind == Kind::attribute) {
    Value space;
    for (Frame* f = frame_.get(); f && space.is_undefined(); f = f->parent.get())
      if (Value* found = f->find(target.name)) space = *found;
    auto* held = std::get_if<std::shared_ptr<Namespace>>(&space.as);
    if (!held)
      throw Fault{"cannot set an attribute of '" + target.name + "', which is no namespace"};
    const std::string& name = target.value.text()->bytes;
    if (name.starts_with("_")) throw Fault{"an attribute of a namespace may not begin with _"};
    for (auto& [known, old] : (*held)->attributes)
      if (known == name) {
        old = std::move(value);
        return;
      }
    charge((*held)->attributes.size() + 1);
    (*held)->attributes.emplace_back(name, std::move(value));
  } else {
    charge(frame_->variables.size() / 8);
    frame_->set(target.name, std::move(value));
  }
}

// ---- calls

Arguments Evaluator::arguments(const Node& node, size_t first) {
  Arguments given;
  for (size_t i = 0; i < node.names.size(); ++i) {
    Value value = eval(*node.kids[first + i]);
    const std::string& how = node.names[i];
    if (how.empty()) {
      given.positional.push_back(std::move(value));
    } else if (how == "*") {
      for (Value& each : iterate(value)) given.positional.push_back(std::move(each));
    } else if (how == "**") {
      if (!value.dict())
        throw Fault{std::string("expected a dict after **, got ") + value.type_name()};
      charge(value.dict()->items.size());
      for (const auto& [key, each] : value.dict()->items)
        given.named.emplace_back(str(key).bytes, each);
    } else {
      given.named.emplace_back(how, std::move(value));
    }
  }
  return given;
}

Value Evaluator::filter_block(const Node& node, const Value& text) {
  const Value self = node.kids[0] ? filter_block(*node.kids[0], text) : text;
  return call(*node.builtin, self, arguments(node, 1));
}

// Puts named arguments where the parameters are.
static void bind(std::string_view parameters, const std::string& name, Arguments& given) {
  size_t count = 0;
  std::vector<std::string_view> names;
  for (size_t at = 0; at < parameters.size(); ++count) {
    const size_t end = std::min(parameters.find(' ', at), parameters.size());
    names.push_back(parameters.substr(at, end - at));
    at = end + 1;
  }
  if (given.positional.size() > names.size()) throw Fault{"too many arguments for " + name};
  given.positional.resize(names.size());
  for (auto& [key, value] : given.named) {
    const auto at = std::find(names.begin(), names.end(), key);
    if (at == names.end()) throw Fault{name + " takes no argument '" + key + "'"};
    given.positional[size_t(at - names.begin())] = std::move(value);
  }
}

Value Evaluator::call(const Builtin& builtin, const Value& self, Arguments given) {
  charge(2 + weight_of(self) / 4);
  if (builtin.parameters != std::string_view("*")) bind(builtin.parameters, builtin.name, given);
  return builtin.run(*this, self, given);
}

Value Evaluator::call(const Value& callee, Arguments given) {
  if (callee.is_undefined()) fail_undefined(callee);
  if (const Loop* loop = callee.get<Loop>(); loop && loop->node->flag) {
    if (given.positional.size() != 1) throw Fault{"loop() takes one argument"};
    Text text;
    Text* outer = std::exchange(out_, &text);
    auto frame = std::exchange(frame_, loop->frame);
    run_for(*loop->node, iterate(given.positional[0]), loop->depth + 1);
    frame_ = std::move(frame);
    out_ = outer;
    return text_value(std::move(text));
  }
  const Function* function = callee.get<const Function>();
  if (!function) throw Fault{std::string("cannot call ") + callee.type_name()};
  if (function->builtin) {
    if (const Text* text = function->self.text();
        text && text->safe && !function->builtin->keeps_safe)
      throw Fault{std::string("the method ") + function->builtin->name +
                  "() of a |safe string is not supported"};
    return call(*function->builtin, function->self, std::move(given));
  }
  return call_macro(*function, std::move(given));
}

Value Evaluator::call_macro(const Function& function, Arguments given) {
  const Node& node = *function.node;
  const size_t n = node.names.size(), first_kid = node.kind == Kind::call_block;
  const size_t first_default = n - (node.kids.size() - first_kid);
  if (given.positional.size() > n)
    throw Fault{"too many arguments for the macro '" + node.name + "'"};
  auto outer = enter(function.closure);
  for (auto& [key, value] : given.named) {
    const auto at = std::find(node.names.begin(), node.names.end(), key);
    if (key != "caller" &&
        (at == node.names.end() || size_t(at - node.names.begin()) < given.positional.size()))
      throw Fault{"the macro '" + node.name + "' takes no argument '" + key + "'"};
    frame_->set(key, std::move(value));
  }
  for (size_t i = 0; i < n; ++i) {
    if (i < given.positional.size())
      frame_->set(node.names[i], given.positional[i]);
    else if (frame_->find(node.names[i]))
      continue;
    else if (i >= first_default)
      frame_->set(node.names[i], eval(*node.kids[first_kid + i - first_default]));
    else
      frame_->set(node.names[i], Undefined{node.names[i]});
  }
  Text text;
  Text* out = std::exchange(out_, &text);
  run(node.body);
  frame_ = std::move(outer);
  out_ = out;
  return text_value(std::move(text));
}

}  // namespace xpyd::jinja
