// What an expression's tree is worth: names, operators, attributes, items, slices, iteration.

#include <algorithm>
#include <cmath>

#include "model/jinja_eval.h"

namespace xpyd::jinja {

void fail_undefined(const Value& value) {
  throw Fault{"'" + std::get<Undefined>(value.as).name + "' is undefined"};
}

Value Evaluator::eval(const Node& node) try {
  charge(1);
  if (++depth_ > bounds_.depth) throw Fault{"nested too deeply"};
  struct Leave {
    int& depth;
    ~Leave() { --depth; }
  } leave{depth_};
  return eval_node(node);
} catch (Fault& fault) {
  if (fault.line == 0) fault.line = node.line;
  throw;
}

Value Evaluator::eval_node(const Node& node) {
  auto kid = [&](size_t i) { return eval(*node.kids[i]); };
  auto all = [&] {
    std::vector<Value> values;
    for (const NodePtr& each : node.kids) values.push_back(eval(*each));
    charge(values.size());
    return values;
  };
  switch (node.kind) {
    case Kind::constant:
      return node.value;
    case Kind::name: {
      for (Frame* f = frame_.get(); f; f = f->parent.get()) {
        charge(f->variables.size() / 8);
        if (Value* found = f->find(node.name)) return *found;
      }
      if (const Builtin* b = find_function(node.name))
        return std::make_shared<const Function>(Function{nullptr, nullptr, b, {}});
      return Undefined{node.name};
    }
    case Kind::attribute:
      return attribute(kid(0), node.name);
    case Kind::item: {
      const Value object = kid(0);
      if (node.kids[1]->kind == Kind::slice) return slice(object, *node.kids[1]);
      return item(object, kid(1));
    }
    case Kind::list:
      return list_value(all());
    case Kind::tuple:
      return list_value(all(), List::Form::tuple);
    case Kind::dict: {
      std::vector<std::pair<Value, Value>> items;
      for (size_t i = 0; i < node.kids.size(); i += 2) {
        Value key = kid(i), value = kid(i + 1);
        if (!key.text() && !key.is_number() && !key.is_none())
          throw Fault{std::string("a dict's key may not be ") + key.type_name()};
        auto same =
            std::find_if(items.begin(), items.end(), [&](auto& x) { return equal(x.first, key); });
        charge(items.size() + 2);
        if (same != items.end())
          same->second = std::move(value);
        else
          items.emplace_back(std::move(key), std::move(value));
      }
      return dict_value(std::move(items));
    }
    case Kind::call:
      return call(kid(0), arguments(node, 1));
    case Kind::filter:
    case Kind::test:
      return call(*node.builtin, kid(0), arguments(node, 1));
    case Kind::not_:
      return !kid(0).truth();
    case Kind::negative: {
      const Value v = kid(0);
      if (v.real()) return -*v.real();
      return binary("-", int64_t{0}, v);
    }
    case Kind::positive: {
      const Value v = kid(0);
      return v.real() ? v : Value(v.integer());
    }
    case Kind::and_: {
      Value v = kid(0);
      return v.truth() ? kid(1) : v;
    }
    case Kind::or_: {
      Value v = kid(0);
      return v.truth() ? v : kid(1);
    }
    case Kind::conditional:
      if (kid(0).truth()) return kid(1);
      return node.kids[2] ? kid(2) : Value(Undefined{"the inline if without else"});
    case Kind::compare: {
      Value left = kid(0);
      for (size_t i = 0; i < node.names.size(); ++i) {
        Value right = kid(i + 1);
        if (!compare(node.names[i], left, right)) return false;
        left = std::move(right);
      }
      return true;
    }
    case Kind::binary: {
      const Value a = kid(0), b = kid(1);
      return binary(node.name, a, b);
    }
    case Kind::concat: {
      Text text;
      for (const NodePtr& each : node.kids) {
        const Text part = str(eval(*each));
        charge(1 + part.bytes.size() / 16);
        text.append(part);
      }
      return text_value(std::move(text));
    }
    default:
      throw Fault{"not an expression"};
  }
}

bool Evaluator::compare(const std::string& op, const Value& a, const Value& b) {
  charge(std::min(weight_of(a), weight_of(b)));
  if (op == "==") return equal(a, b);
  if (op == "!=") return !equal(a, b);
  if (op == "in" || op == "not in") {
    bool found = false;
    if (const Text* text = b.text()) {
      if (!a.text())
        throw Fault{std::string("expected a string before 'in', got ") + a.type_name()};
      charge_search(text->bytes, a.text()->bytes);
      found = text->bytes.find(a.text()->bytes) != std::string::npos;
    } else {
      for (const Value& each : iterate(b)) {
        charge(std::min(weight_of(a), weight_of(each)));
        found = found || equal(a, each);
      }
    }
    return found == (op == "in");
  }
  for (const Value* side : {&a, &b})
    if (side->is_undefined()) fail_undefined(*side);
  if (op == "<") return less(a, b);
  if (op == ">") return less(b, a);
  // Not the opposite of the other order, for the sake of NaN.
  return op == "<=" ? less(a, b) || equal(a, b) : less(b, a) || equal(a, b);
}

Value Evaluator::binary(const std::string& op, const Value& a, const Value& b) {
  for (const Value* side : {&a, &b})
    if (side->is_undefined()) fail_undefined(*side);
  if (op == "%" && a.text()) return text_value(printf_text(*this, *a.text(), b));
  if (op == "+" && a.text() && b.text()) {
    const bool safe = a.text()->safe || b.text()->safe;
    Text sum = safe && !a.text()->safe ? escaped(*a.text()) : *a.text();
    sum.append(safe && !b.text()->safe ? escaped(*b.text()) : *b.text());
    sum.safe = safe;
    charge(1 + sum.bytes.size() / 16);
    return text_value(std::move(sum));
  }
  if (op == "+" && a.list() && b.list() && a.list()->form == b.list()->form &&
      a.list()->form <= List::Form::tuple) {
    std::vector<Value> items = a.list()->items;
    items.insert(items.end(), b.list()->items.begin(), b.list()->items.end());
    charge(2 + 2 * items.size());
    return list_value(std::move(items), a.list()->form);
  }
  if (op == "*" && (a.text() || a.list() || b.text() || b.list())) {
    const bool swapped = !a.text() && !a.list();
    const Value& unit = swapped ? b : a;
    const int64_t times = std::max<int64_t>(0, (swapped ? a : b).integer());
    if (unit.list() && unit.list()->form > List::Form::tuple)
      throw Fault{std::string("cannot multiply ") + unit.type_name()};
    Text text;
    std::vector<Value> items;
    for (int64_t i = 0; i < times; ++i) {
      charge(1 + (unit.text() ? unit.text()->bytes.size() / 16 : 2 * unit.list()->items.size()));
      if (unit.text())
        text.append(*unit.text());
      else
        items.insert(items.end(), unit.list()->items.begin(), unit.list()->items.end());
    }
    return unit.text() ? text_value(std::move(text))
                       : list_value(std::move(items), unit.list()->form);
  }
  if (!a.is_number() || !b.is_number())
    throw Fault{"no '" + op + "' of " + a.type_name() + " and " + b.type_name()};
  const bool zero = b.number() == 0;
  if (zero && (op == "/" || op == "//" || op == "%")) throw Fault{"division by zero"};
  if (op == "/") return a.number() / b.number();
  if (a.real() || b.real() || (op == "**" && b.number() < 0)) {
    const double x = a.number(), y = b.number();
    if (op == "+") return x + y;
    if (op == "-") return x - y;
    if (op == "*") return x * y;
    if (op == "**") return std::pow(x, y);
    if (op == "//") return std::floor(x / y);
    const double rest = std::fmod(x, y);
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
  }
  const int64_t x = a.integer(), y = b.integer();
  int64_t out = 0;
  bool beyond = false;
  if (op == "+") beyond = __builtin_add_overflow(x, y, &out);
  if (op == "-") beyond = __builtin_sub_overflow(x, y, &out);
  if (op == "*") beyond = __builtin_mul_overflow(x, y, &out);
  if (op == "**") {
    out = 1;
    for (int64_t i = 0; i < y && !beyond; ++i) {
      charge(1);
      beyond = __builtin_mul_overflow(out, x, &out);
    }
  }
  if (op == "//" || op == "%") {
    beyond = x == INT64_MIN && y == -1;
    if (!beyond) {
      const bool down = x % y != 0 && (x < 0) != (y < 0);
      out = op == "//" ? x / y - down : x % y + (down ? y : 0);
    }
  }
  if (beyond) throw Fault{"an integer beyond 64 bits"};
  return out;
}

Value Evaluator::slice(const Value& object, const Node& node) {
  if (object.is_undefined()) fail_undefined(object);
  auto part = [&](size_t i) { return node.kids[i] ? eval(*node.kids[i]) : Value(None()); };
  const Value begin = part(0), end = part(1), stride = part(2);
  const Text* text = object.text();
  const List* list = object.list();
  if (!text && (!list || list->form > List::Form::range)) return Undefined{"a slice"};
  const int64_t n = int64_t(text ? count_code_points(text->bytes) : list->items.size());
  const int64_t step = stride.is_none() ? 1 : std::clamp(stride.integer(), -n - 1, n + 1);
  if (step == 0) throw Fault{"a slice's step may not be 0"};
  auto clamp = [&](const Value& v, int64_t fallback) {
    if (v.is_none()) return fallback;
    const int64_t i = v.integer();
    return std::clamp<int64_t>(i < 0 ? i + n : i, step < 0 ? -1 : 0, step < 0 ? n - 1 : n);
  };
  const int64_t first = clamp(begin, step < 0 ? n - 1 : 0), last = clamp(end, step < 0 ? -1 : n);
  charge(size_t(n) / 16 + 1);
  if (text && step == 1) {
    if (first >= last) return text_value({});
    const size_t from = code_point_at(text->bytes, size_t(first));
    const size_t to =
        from + code_point_at(std::string_view(text->bytes).substr(from), size_t(last - first));
    Text out = text->substr(from, to);
    charge(out.bytes.size() / 16);
    return text_value(std::move(out));
  }
  const std::vector<Value> all = text ? iterate(object) : list->items;
  std::vector<Value> items;
  for (int64_t i = first; step > 0 ? i < last : i > last; i += step)
    items.push_back(all[size_t(i)]);
  charge(items.size());
  if (text) return text_value(joined(*this, items, {}));
  return list_value(std::move(items), list->form);
}

Value Evaluator::item(const Value& object, const Value& key) {
  if (object.is_undefined()) fail_undefined(object);
  const Text* name = key.text();
  if (const Dict* dict = object.dict()) {
    charge(dict->items.size() / 8);
    if (name) {
      if (const Value* found = dict->find(name->bytes)) return *found;
    } else {
      for (const auto& [known, value] : dict->items)
        if (equal(known, key)) return value;
    }
  }
  if (name) return attribute(object, name->bytes);
  const List* list = object.list();
  const Text* text = object.text();
  if ((key.is_integer() || key.is_bool()) &&
      (text || (list && (list->form <= List::Form::tuple || list->form == List::Form::range)))) {
    const int64_t n = int64_t(text ? count_code_points(text->bytes) : list->items.size());
    const int64_t i = key.integer() + (key.integer() < 0 ? n : 0);
    if (text) charge(1 + text->bytes.size() / 16);
    if (i >= 0 && i < n) {
      if (list) return list->items[size_t(i)];
      const size_t from = code_point_at(text->bytes, size_t(i));
      return text_value(
          text->substr(from, from + code_point_at(std::string_view(text->bytes).substr(from), 1)));
    }
  }
  return Undefined{"an item of " + std::string(object.type_name())};
}

Value Evaluator::attribute(const Value& object, const std::string& name) {
  if (object.is_undefined()) fail_undefined(object);
  if (const Namespace* space = object.get<Namespace>()) {
    for (const auto& [known, value] : space->attributes)
      if (known == name) return value;
    return Undefined{name};
  }
  if (const Loop* loop = object.get<Loop>()) {
    const int64_t i = int64_t(loop->index), n = int64_t(loop->items.size());
    if (name == "index") return i + 1;
    if (name == "index0") return i;
    if (name == "revindex") return n - i;
    if (name == "revindex0") return n - i - 1;
    if (name == "first") return i == 0;
    if (name == "last") return i == n - 1;
    if (name == "length") return n;
    if (name == "depth") return int64_t{loop->depth};
    if (name == "depth0") return int64_t{loop->depth - 1};
    if (name == "previtem") return i > 0 ? loop->items[size_t(i - 1)] : Value(Undefined{name});
    if (name == "nextitem") return i + 1 < n ? loop->items[size_t(i + 1)] : Value(Undefined{name});
  }
  if (const Builtin* method = find_method(object, name))
    return std::make_shared<const Function>(Function{nullptr, nullptr, method, object});
  if (const Dict* dict = object.dict()) {
    charge(dict->items.size() / 8);
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

}  // namespace xpyd::jinja
