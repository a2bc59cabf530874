// Runs a template: statements, expressions, filters, tests, methods and functions.
#include <algorithm>
#include <ctime>

#include "base/utf8.h"
#include "model/jinja/jinja_node.h"

namespace xpyd::model::jinja {
namespace {

constexpr size_t kMaxOutput = size_t{64} << 20;
constexpr uint64_t kMaxSteps = uint64_t{1} << 26, kMaxValue = uint64_t{1} << 22;
constexpr int kMaxNesting = 500;
constexpr std::string_view kFunctions[] = {"namespace", "raise_exception", "strftime_now"};

const std::string& text_of(const Value& value) {
  if (value.text()) return *value.text();
  throw Fault{"expected a string"};
}
int64_t integer_of(const Value& value) {
  if (auto* integer = std::get_if<int64_t>(&value.as)) return *integer;
  throw Fault{"expected an integer"};
}
const List& list_of(const Value& value) {
  if (value.list()) return *value.list();
  throw Fault{"expected a list"};
}
const Dict& dict_of(const Value& value) {
  if (value.dict()) return *value.dict();
  throw Fault{"expected a dict"};
}

// As Python's str.strip().
std::string stripped(std::string_view text, const Value& set, bool left, bool right) {
  static const std::string kSpaces =
      "\t\n\v\f\r\x1c\x1d\x1e\x1f \u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
      "\u2028\u2029\u202f\u205f\u3000";
  const std::string& chars = set.is_undefined() ? kSpaces : text_of(set);
  while (left && !text.empty()) {
    const size_t bytes = size_t(next_code_point(text).bytes);
    if (chars.find(text.substr(0, bytes)) == chars.npos) break;
    text.remove_prefix(bytes);
  }
  while (right && !text.empty()) {
    size_t begin = text.size() - 1;
    while ((uint8_t(text[begin]) & 0xc0) == 0x80) --begin;
    if (chars.find(text.substr(begin)) == chars.npos) break;
    text = text.substr(0, begin);
  }
  return std::string(text);
}

List split(const std::string& text, const std::string& by) {
  if (by.empty()) throw Fault{"split by an empty string"};
  List parts;
  size_t begin = 0;
  for (size_t at; (at = text.find(by, begin)) != text.npos; begin = at + by.size())
    parts.push_back(text_value(text.substr(begin, at - begin)));
  parts.push_back(text_value(text.substr(begin)));
  return parts;
}

List pairs(const Dict& dict) {
  List out;
  for (const auto& [key, value] : dict) out.push_back(list_value({text_value(key), value}));
  return out;
}

// The byte where this code point of a text begins.
size_t byte_of(std::string_view text, int64_t code_point) {
  size_t at = 0;
  for (; code_point > 0; --code_point) at += size_t(next_code_point(text.substr(at)).bytes);
  return at;
}

Value length(const Value& v) {
  if (v.text()) return {int64_t(count_code_points(*v.text()))};
  if (v.dict()) return {int64_t(v.dict()->size())};
  return {int64_t(v.is_undefined() ? 0 : list_of(v).size())};
}

// Undefined stands for an argument that is not given.
Value apply_filter(std::string_view name, const Value& v, const List& a);

bool apply_test(std::string_view name, const Value& v, const List& a) {
  if (name == "defined") return !v.is_undefined();
  if (name == "undefined") return v.is_undefined();
  if (name == "none") return v.is_none();
  if (name == "string") return v.text();
  if (name == "mapping") return v.dict();
  if (name == "iterable" || name == "sequence") return v.text() || v.list() || v.dict() || v.is_undefined();
  if (name == "true" || name == "false") return equal(v, {name == "true"});
  return equal(v, a[0]);  // equalto, eq
}

Value field_of(const Value& item, const Value& attribute) {
  const Value* field = item.dict() ? find(*item.dict(), text_of(attribute)) : nullptr;
  return field ? *field : Value();
}

// Items that pass the test named in `a`, or of which the attribute does.
Value choose(const Value& v, List a, bool by_attribute, bool keep) {
  List out;
  const Value attribute = a[0];
  if (by_attribute) a.erase(a.begin());
  if (a[0].text() && !find_builtin(Kind::test, *a[0].text())) throw Fault{"the test " + *a[0].text() + " is not supported"};
  for (const Value& item : list_of(v)) {
    const Value judged = by_attribute ? field_of(item, attribute) : item;
    const bool passes = a[0].is_undefined() ? judged.truth() : apply_test(text_of(a[0]), judged, {a[1]});
    if (passes == keep) out.push_back(item);
  }
  return list_value(std::move(out));
}

Value map(const Value& v, const Value& filter, const Value& attribute) {
  List out;
  if (filter.text() && !find_builtin(Kind::filter, *filter.text()))
    throw Fault{"the filter " + *filter.text() + " is not supported"};
  for (const Value& item : list_of(v))
    out.push_back(filter.text() ? apply_filter(*filter.text(), item, List(3)) : field_of(item, attribute));
  return list_value(std::move(out));
}

Value apply_filter(std::string_view name, const Value& v, const List& a) {
  if (name == "trim") return text_value(stripped(str(v), a[0], true, true));
  if (name == "string") return text_value(str(v));
  if (name == "safe") return v;
  if (name == "length") return length(v);
  if (name == "tojson") {
    if (a[0].truth()) throw Fault{"tojson with ensure_ascii is not supported"};
    return text_value(tojson(v, a[1].is_undefined() ? -1 : int(std::clamp<int64_t>(integer_of(a[1]), 0, 16))));
  }
  if (name == "join") {
    std::string out;
    for (const Value& item : list_of(v)) out += (&item == &list_of(v)[0] ? "" : str(a[0])) + str(item);
    return text_value(std::move(out));
  }
  if (name == "list") return list_value(list_of(v));
  if (name == "items") return list_value(v.is_undefined() ? List() : pairs(dict_of(v)));
  if (name == "map") return map(v, a[0], a[1]);
  if (name == "default") return v.is_undefined() || (a[1].truth() && !v.truth()) ? a[0] : v;
  if (name == "first" || name == "last") {
    const List& items = list_of(v);
    return items.empty() ? Value() : name == "first" ? items.front() : items.back();
  }
  return choose(v, a, name.ends_with("attr"), name.starts_with("select"));
}

Value call_method(std::string_view name, const Value& v, const List& a) {
  if (name == "items") return list_value(pairs(dict_of(v)));
  if (name == "get") {
    const Value* found = find(dict_of(v), text_of(a[0]));
    return found ? *found : a[1].is_undefined() ? Value{None()} : a[1];
  }
  const std::string& text = text_of(v);
  if (name == "startswith") return {text.starts_with(text_of(a[0]))};
  if (name == "endswith") return {text.ends_with(text_of(a[0]))};
  if (name == "split") return list_value(split(text, text_of(a[0])));
  return text_value(stripped(text, a[0], name != "rstrip", name != "lstrip"));
}

class Evaluator {
 public:
  Evaluator(Dict variables, int64_t now) : now_(now) { scopes_.push_back(std::move(variables)); }
  ~Evaluator() {  // a namespace may contain itself
    for (auto& space : spaces_) space->attributes.clear();
  }
  std::string render(const Node& block) {
    run(block);
    return std::move(out_);
  }

 private:
  // A node that is evaluated is a step, and so are 16 bytes of a value that is made or read through.
  void take(uint64_t steps) {
    if (steps > left_) throw Fault{"the rendering takes more than " + std::to_string(kMaxSteps) + " steps"};
    left_ -= steps;
  }
  // Of a text, or of a list or dict that refers to its items.
  static uint64_t bytes16(const Value& v) { return v.list() ? 1 + 2 * v.list()->size() : v.weight; }
  Value made(Value value) {
    if (value.weight > kMaxValue) throw Fault{"a value has more than 64 MiB"};
    take(bytes16(value));
    return value;
  }

  void set(const std::string& name, Value value) { set_in(scopes_.back(), name, std::move(value)); }
  void set_in(Dict& dict, const std::string& name, Value value) {
    take(dict.size() / 16);
    for (auto& [known, old] : dict)
      if (known == name) return void(old = std::move(value));
    dict.emplace_back(name, std::move(value));
  }

  struct Deeper {
    explicit Deeper(Evaluator& of) : depth(of.depth_) {
      if (++depth > kMaxNesting) throw Fault{"the template is nested too deeply"};
    }
    ~Deeper() { --depth; }
    int& depth;
  };

  void run(const Node& node) try {
    const Deeper deeper(*this);
    switch (node.kind) {
      case Kind::block:
        for (const NodePtr& kid : node.kids) run(*kid);
        break;
      case Kind::output:
        out_ += str(made(eval(*node.kids[0])));
        if (out_.size() > kMaxOutput) throw Fault{"the output has more than 64 MiB"};
        break;
      case Kind::set: assign(*node.kids[0], eval(*node.kids[1])); break;
      case Kind::macro: set(node.name, {&node}); break;
      case Kind::for_loop: run_for(node); break;
      default:  // if_else
        for (size_t i = 0; i + 1 < node.kids.size(); i += 2)
          if (eval(*node.kids[i]).truth()) return run(*node.kids[i + 1]);
        if (node.kids.size() % 2 == 1) run(*node.kids.back());
    }
  } catch (Fault& fault) {
    if (fault.line == 0) fault.line = node.line;
    throw;
  }

  void assign(const Node& target, Value value) {
    if (target.kind == Kind::name) return set(target.name, std::move(value));
    if (target.kind == Kind::tuple) {
      if (target.kids.size() == 1) return assign(*target.kids[0], std::move(value));
      const List& values = list_of(value);
      if (values.size() != target.kids.size()) throw Fault{"the wrong number of values to unpack"};
      for (size_t i = 0; i < values.size(); ++i) assign(*target.kids[i], values[i]);
      return;
    }
    const Value space = eval(*target.kids[0]);  // the target is an attribute
    auto* held = std::get_if<std::shared_ptr<Namespace>>(&space.as);
    if (!held) throw Fault{"'" + target.kids[0]->name + "' is no namespace"};
    set_in((*held)->attributes, target.name, std::move(value));
  }

  void run_for(const Node& node) {
    const Value over = eval(*node.kids[1]);
    take(bytes16(over));
    List items;
    if (over.dict())
      for (const auto& [key, value] : *over.dict()) items.push_back(text_value(key));
    else if (!over.is_undefined())
      items = list_of(over);
    scopes_.emplace_back();
    if (node.kids[2])
      std::erase_if(items, [&](const Value& item) { return assign(*node.kids[0], item), !eval(*node.kids[2]).truth(); });
    const int64_t n = int64_t(items.size());
    for (int64_t i = 0; i < n; ++i) {
      take(35);  // the dict `loop`
      const auto item = [&](int64_t at) { return at >= 0 && at < n ? items[size_t(at)] : Value(); };
      scopes_.back() = {{"loop", dict_value({{"index0", {i}},
                                             {"index", {i + 1}},
                                             {"first", {i == 0}},
                                             {"last", {i + 1 == n}},
                                             {"length", {n}},
                                             {"previtem", item(i - 1)},
                                             {"nextitem", item(i + 1)}})}};
      assign(*node.kids[0], items[size_t(i)]);
      run(*node.kids[3]);
    }
    scopes_.pop_back();
  }

  // The arguments of a filter, test or method.
  List arguments(const Node& node) {
    List given;
    for (size_t i = 1; i < node.kids.size(); ++i) given.push_back(node.kids[i] ? eval(*node.kids[i]) : Value());
    return given;
  }

  // A filter, test or method may read each argument once for each of the values in `v`.
  Value call_builtin(const Node& node) {
    const Value v = eval(*node.kids[0]);
    const List given = arguments(node);
    uint64_t each = 1 + v.height;
    for (const Value& one : given) each += one.weight;
    const bool at_once = find_builtin(node.kind, node.name)->at_once || (node.name == "length" && !v.text());
    if (!at_once) take(each * v.weight);
    if (node.kind == Kind::test) return {apply_test(node.name, v, given)};
    return made(node.kind == Kind::filter ? apply_filter(node.name, v, given) : call_method(node.name, v, given));
  }

  // Calls a function or a macro.
  Value call(const Node& node) {
    const Value function = eval_name(node.name);
    auto* held = std::get_if<const Node*>(&function.as);
    if (!held) throw Fault{"'" + node.name + "' is no function"};
    Dict given;
    for (size_t i = 0; i < node.kids.size(); ++i) given.emplace_back(node.names[i], eval(*node.kids[i]));
    const Node* macro = *held;
    if (macro) return call_macro(*macro, given);
    if (node.name == "namespace") {
      take(64 * given.size());  // it lives until the rendering ends
      spaces_.push_back(std::make_shared<Namespace>(Namespace{std::move(given)}));
      return {spaces_.back()};
    }
    if (given.size() != 1) throw Fault{node.name + "() takes one argument"};
    take(bytes16(given[0].second));
    const std::string text = str(given[0].second);
    if (node.name == "raise_exception") throw Fault{text};
    const time_t now = now_;
    tm local{};
    localtime_r(&now, &local);
    char buffer[256];
    return text_value({buffer, strftime(buffer, sizeof buffer, text.c_str(), &local)});
  }

  Value call_macro(const Node& macro, const Dict& given) {
    Dict parameters;
    for (const std::string& name : macro.names) parameters.emplace_back(name, Value());
    for (size_t i = 0; i < given.size(); ++i) {
      const auto& [name, value] = given[i];
      if (name.empty() ? i >= parameters.size() : !find(parameters, name))
        throw Fault{"the macro " + macro.name + " does not take these arguments"};
      set_in(parameters, name.empty() ? parameters[i].first : name, value);
    }
    take(5 * scopes_[0].size());
    std::vector<Dict> outer = std::exchange(scopes_, {scopes_[0], std::move(parameters)});
    std::string before = std::exchange(out_, "");
    run(*macro.kids[0]);
    scopes_ = std::move(outer);
    return text_value(std::exchange(out_, std::move(before)));
  }

  Value eval_name(const std::string& name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      take(1 + scope->size() / 16);
      if (const Value* found = find(*scope, name)) return *found;
    }
    const bool ours = std::find(std::begin(kFunctions), std::end(kFunctions), name) != std::end(kFunctions);
    return ours ? Value{static_cast<const Node*>(nullptr)} : Value();
  }

  Value eval(const Node& node) {
    const Deeper deeper(*this);
    take(1);
    auto kid = [&](size_t i) { return eval(*node.kids[i]); };
    switch (node.kind) {
      case Kind::constant: return node.value;
      case Kind::name: return eval_name(node.name);
      case Kind::attribute: return attribute(kid(0), node.name);
      case Kind::item: return item(kid(0), kid(1));
      case Kind::slice: return slice(node);
      case Kind::list: {
        List items;
        for (const NodePtr& each : node.kids) items.push_back(eval(*each));
        return made(list_value(std::move(items)));
      }
      case Kind::dict: {
        Dict items;
        for (size_t i = 0; i < node.kids.size(); i += 2) items.emplace_back(text_of(kid(i)), kid(i + 1));
        return made(dict_value(std::move(items)));
      }
      case Kind::call: return call(node);
      case Kind::filter:
      case Kind::test:
      case Kind::method: return call_builtin(node);
      case Kind::not_: return {!kid(0).truth()};
      case Kind::binary: return binary(node);
      default:  // conditional
        return kid(1).truth() ? kid(0) : node.kids[2] ? kid(2) : Value();
    }
  }

  Value binary(const Node& node) {
    const std::string& op = node.name;
    const Value a = eval(*node.kids[0]);
    if (op == "and" || op == "or") return a.truth() == (op == "and") ? eval(*node.kids[1]) : a;
    const Value b = eval(*node.kids[1]);
    take(op == "in" || op == "not in" ? uint64_t{a.weight} * b.weight : std::min(a.weight, b.weight));
    if (op == "==") return {equal(a, b)};
    if (op == "!=") return {!equal(a, b)};
    if (op == "in" || op == "not in") return {contains(b, a) == (op == "in")};
    if (op == "~") return made(text_value(str(a) + str(b)));
    if (op == "+" && a.text() && b.text()) return made(text_value(*a.text() + *b.text()));
    if (op == "+" && a.list() && b.list()) {
      List all = *a.list();
      all.insert(all.end(), b.list()->begin(), b.list()->end());
      return made(list_value(std::move(all)));
    }
    const int64_t x = integer_of(a), y = integer_of(b);
    if (op == "<") return {x < y};
    if (op == ">") return {x > y};
    if (op == "<=") return {x <= y};
    if (op == ">=") return {x >= y};
    int64_t result = 0;
    if (op == "+" ? __builtin_add_overflow(x, y, &result) : op == "-" && __builtin_sub_overflow(x, y, &result))
      throw Fault{op + " of integers goes beyond 64 bits"};
    if (op != "%") return {result};
    if (y <= 0) throw Fault{"% by a number that is not positive"};
    return {x % y + (x % y < 0 ? y : 0)};
  }

  static bool contains(const Value& in, const Value& value) {
    if (in.is_undefined()) return false;
    if (in.text()) return in.text()->find(text_of(value)) != std::string::npos;
    if (in.dict()) return value.text() && find(*in.dict(), *value.text());
    const List& list = list_of(in);
    return std::any_of(list.begin(), list.end(), [&](const Value& each) { return equal(each, value); });
  }

  Value attribute(const Value& object, const std::string& name) {
    if (object.is_undefined()) throw Fault{"." + name + " of an undefined value"};
    const Namespace* space = object.get<Namespace>();
    const Dict* dict = space ? &space->attributes : object.dict();
    take(dict ? dict->size() / 16 + dict->size() * (name.size() / 16) : 0);
    const Value* found = dict ? find(*dict, name) : nullptr;
    return found ? *found : Value();
  }

  Value item(const Value& object, const Value& key) {
    if (key.text()) return attribute(object, *key.text());
    if (object.is_undefined() || object.text()) throw Fault{"an item of a string or of an undefined value"};
    auto* index = std::get_if<int64_t>(&key.as);
    if (!object.list() || !index) return {};
    const int64_t n = int64_t(object.list()->size()), i = *index + (*index < 0 ? n : 0);
    return i >= 0 && i < n ? (*object.list())[size_t(i)] : Value();
  }

  // Of a list: [a:b] and [::-1]; of a text: [a:b], in code points.
  Value slice(const Node& node) {
    const Value object = eval(*node.kids[0]);
    take(bytes16(object));
    const int64_t n = std::get<int64_t>(length(object).as);
    auto bound = [&](size_t kid, int64_t fallback) {
      const int64_t i = node.kids[kid] ? integer_of(eval(*node.kids[kid])) : fallback;
      return std::clamp<int64_t>(i < 0 ? i + n : i, 0, n);
    };
    const int64_t begin = bound(1, 0), end = std::max(begin, bound(2, n));
    const int64_t step = node.kids[3] ? integer_of(eval(*node.kids[3])) : 1;
    if (object.text()) {
      if (step != 1) throw Fault{"a slice of a string with a step"};
      const size_t from = byte_of(*object.text(), begin), to = byte_of(*object.text(), end);
      return text_value(object.text()->substr(from, to - from));
    }
    List items(list_of(object).begin() + begin, list_of(object).begin() + end);
    if (step == -1 && int64_t(items.size()) == n)
      std::reverse(items.begin(), items.end());
    else if (step != 1)
      throw Fault{"this step of a slice is not supported"};
    return list_value(std::move(items));
  }

  const int64_t now_;
  std::vector<Dict> scopes_;  // innermost last
  std::vector<std::shared_ptr<Namespace>> spaces_;
  std::string out_;
  uint64_t left_ = kMaxSteps;
  int depth_ = 0;
};

Error error_of(const Fault& fault) {
  return invalid((fault.line > 0 ? "line " + std::to_string(fault.line) + ": " : "") + fault.what);
}

}  // namespace

const Builtin* find_builtin(Kind kind, std::string_view name) {
  static const Builtin kBuiltins[] = {
      {Kind::filter, "default", {"default_value", "boolean"}, true},
      {Kind::filter, "first", {}, true},
      {Kind::filter, "items"},
      {Kind::filter, "join", {"d"}},
      {Kind::filter, "last", {}, true},
      {Kind::filter, "length"},
      {Kind::filter, "list"},
      {Kind::filter, "map", {"filter", "attribute"}},
      {Kind::filter, "reject", {"test", "value"}},
      {Kind::filter, "rejectattr", {"attribute", "test", "value"}},
      {Kind::filter, "safe", {}, true},
      {Kind::filter, "select", {"test", "value"}},
      {Kind::filter, "selectattr", {"attribute", "test", "value"}},
      {Kind::filter, "string"},
      {Kind::filter, "tojson", {"ensure_ascii", "indent"}},
      {Kind::filter, "trim", {"chars"}},
      {Kind::test, "defined", {}, true},
      {Kind::test, "eq", {"other"}},
      {Kind::test, "equalto", {"other"}},
      {Kind::test, "false"},
      {Kind::test, "iterable", {}, true},
      {Kind::test, "mapping", {}, true},
      {Kind::test, "none", {}, true},
      {Kind::test, "sequence", {}, true},
      {Kind::test, "string", {}, true},
      {Kind::test, "true"},
      {Kind::test, "undefined", {}, true},
      {Kind::method, "endswith", {"suffix"}},
      {Kind::method, "get", {"key", "default"}},
      {Kind::method, "items"},
      {Kind::method, "lstrip", {"chars"}},
      {Kind::method, "rstrip", {"chars"}},
      {Kind::method, "split", {"sep"}},
      {Kind::method, "startswith", {"prefix"}},
      {Kind::method, "strip", {"chars"}},
  };
  const auto found = std::find_if(std::begin(kBuiltins), std::end(kBuiltins),
                                  [&](const Builtin& one) { return one.kind == kind && one.name == name; });
  return found == std::end(kBuiltins) ? nullptr : found;
}

namespace {

bool mentions_word(const Node& node, std::string_view word) {
  if (node.name == word || (node.value.text() && *node.value.text() == word)) return true;
  return std::any_of(node.kids.begin(), node.kids.end(), [&](auto& kid) { return kid && mentions_word(*kid, word); });
}

}  // namespace

bool Template::mentions(std::string_view word) const { return mentions_word(*block_, word); }

Result<Template> Template::parse(std::string_view source) try {
  Template made;
  made.block_ = parse_nodes(source);
  return made;
} catch (const Fault& fault) {
  return error_of(fault);
}

Result<std::string> Template::render(Dict variables, int64_t now_unix_s) const try {
  return Evaluator(std::move(variables), now_unix_s).render(*block_);
} catch (const Fault& fault) {
  return error_of(fault);
}

}  // namespace xpyd::model::jinja
