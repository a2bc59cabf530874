// Jinja's filters and tests, the methods of dicts, and the global functions, by its documentation;
// `tojson`, `raise_exception` and `strftime_now` are transformers'. What is a string's is in
// jinja_text.cc.

#include <algorithm>
#include <charconv>
#include <ctime>

#include "model/jinja_eval.h"

namespace xpyd::jinja {
namespace {

using E = Evaluator;
using V = const Value&;
using A = const Arguments&;

// ---- filters

Value default_(E&, V v, A a) {
  if (!v.is_undefined() && (!a[1].truth() || v.truth())) return v;
  return a[0].is_undefined() ? text_value({}) : a[0];
}

template <bool last>
Value end_of(E& e, V v, A) {
  if (last && v.list() && v.list()->form == List::Form::lazy) throw Fault{"last of a generator"};
  std::vector<Value> items = e.iterate(v);
  if (items.empty()) return Undefined{last ? "the last item of nothing" : "the first item of nothing"};
  return last ? items.back() : items.front();
}

Value int_(E&, V v, A) {
  if (!v.text()) {
    if (v.real() && std::abs(*v.real()) > 9e18) throw Fault{"an integer beyond 64 bits"};
    if (v.real()) return int64_t(*v.real());
    return v.is_number() ? v.integer() : int64_t{0};
  }
  const std::string& text = v.text()->bytes;
  int64_t out = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error == std::errc() && end == text.data() + text.size()) return out;
  if (text.find_first_of("0123456789") == text.npos && count_code_points(text) == text.size())
    return int64_t{0};  // no number of any kind
  throw Fault{"int of a string that is no plain integer is not supported"};
}

Value length(E&, V v, A) {
  if (v.is_undefined()) return int64_t{0};
  if (v.text()) return int64_t(count_code_points(v.text()->bytes));
  if (v.list() && v.list()->form != List::Form::lazy) return int64_t(v.list()->items.size());
  if (v.dict()) return int64_t(v.dict()->items.size());
  throw Fault{std::string("length of ") + v.type_name()};
}

template <int which, List::Form form = List::Form::view>  // 0 keys, 1 values, 2 items
Value view(E& e, V v, A) {
  if (form == List::Form::lazy && v.is_undefined()) return list_value({}, form);
  if (!v.dict()) throw Fault{std::string("items of ") + v.type_name()};
  std::vector<Value> out;
  e.charge(2 * v.dict()->items.size());
  for (const auto& [key, value] : v.dict()->items)
    out.push_back(which == 0 ? key : which == 1 ? value : list_value({key, value}, List::Form::tuple));
  return list_value(std::move(out), form);
}

// In order of what `path` (an attribute, an index, or none) leads to, small letters as capitals.
Value sort(E& e, const std::vector<Value>& items, V path) {
  std::vector<std::pair<Value, Value>> keyed;
  for (V item : items) keyed.emplace_back(lower_case(e, path.given() ? e.item(item, path) : item), item);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    e.charge(1 + std::min(weight_of(a.first), weight_of(b.first)));
    return less(a.first, b.first);
  });
  std::vector<Value> out;
  for (auto& [key, item] : keyed) out.push_back(std::move(item));
  return list_value(std::move(out));
}

Value min(E& e, V v, A) {
  const Value sorted = sort(e, e.iterate(v), {});
  return sorted.truth() ? sorted.list()->items[0] : Value(Undefined{"the least of nothing"});
}

Value unique(E& e, V v, A) {
  std::vector<Value> out, keys;
  for (Value& item : e.iterate(v)) {
    Value key = lower_case(e, item);
    e.charge((keys.size() + 1) * weight_of(key));
    if (std::any_of(keys.begin(), keys.end(), [&](V known) { return equal(known, key); })) continue;
    keys.push_back(std::move(key));
    out.push_back(item);
  }
  return list_value(std::move(out), List::Form::lazy);
}

// The filter or test that the argument with this index names, and what it is given.
const Builtin* named_builtin(A a, size_t index, std::string_view of, Arguments& rest) {
  if (index >= a.positional.size()) return nullptr;
  const std::string& name = text_of(a[index]).bytes;
  rest.positional.assign(a.positional.begin() + long(index) + 1, a.positional.end());
  rest.named = a.named;
  if (const Builtin* found = find_builtin(of, name)) return found;
  throw Fault{"the filter or test '" + name + "' is not supported"};
}

// map('filter', ...) or map(attribute='a').
Value map(E& e, V v, A a) {
  Arguments rest;
  const Builtin* filter = named_builtin(a, 0, "filter", rest);
  if (!filter && (a.named.size() != 1 || a.named[0].first != "attribute"))
    throw Fault{"map: expected a filter or attribute="};
  std::vector<Value> out;
  for (V item : v.is_none() ? std::vector<Value>() : e.iterate(v)) {
    e.charge(2);
    out.push_back(filter ? e.call(*filter, item, rest) : e.item(item, a.named[0].second));
  }
  return list_value(std::move(out), List::Form::lazy);
}

template <bool keep, bool by_attribute>
Value choose(E& e, V v, A a) {
  if (by_attribute && a.positional.empty()) throw Fault{"expected an attribute to choose by"};
  Arguments rest;
  const Builtin* test = named_builtin(a, by_attribute, "test", rest);
  std::vector<Value> out;
  for (V item : v.is_none() ? std::vector<Value>() : e.iterate(v)) {
    e.charge(2);
    const Value of = by_attribute ? e.item(item, a[0]) : item;
    if ((test ? e.call(*test, of, rest) : of).truth() == keep) out.push_back(item);
  }
  return list_value(std::move(out), List::Form::lazy);
}

Value safe(E& e, V v, A) {
  Text text = e.shown(v);
  text.safe = true;
  return text_value(std::move(text));
}

// ---- methods and functions

Value get(E& e, V v, A a) {
  e.charge((v.dict()->items.size() + 7) / 8 * weight_of(a[0]));
  const Value* found = v.dict()->find(text_of(a[0]).bytes);
  return found ? *found : a[1].is_undefined() ? Value(None()) : a[1];
}

Value forbidden(E&, V, A) { throw Fault{"a method that changes a list or dict is not allowed"}; }

Value range(E& e, V, A a) {
  if (a.positional.empty() || a.positional.size() > 3) throw Fault{"range: expected one to three integers"};
  const int64_t begin = a.positional.size() > 1 ? a[0].integer() : 0;
  const int64_t end = a[a.positional.size() > 1].integer();
  const int64_t step = a.positional.size() > 2 ? a[2].integer() : 1;
  if (step == 0) throw Fault{"range: a step of 0"};
  std::vector<Value> items;
  for (int64_t i = begin; step > 0 ? i < end : i > end;) {
    e.charge(2);
    if (items.size() >= 100000) throw Fault{"range: more than 100000 numbers"};  // Jinja's sandbox
    items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return list_value(std::move(items), List::Form::view);
}

Value make_namespace(E& e, V, A a) {
  if (!a.positional.empty()) throw Fault{"namespace of a dict is not supported"};
  return e.make_namespace(a.named);
}

// datetime.now().strftime(), local time.
Value strftime_now(E& e, V, A a) {
  const std::string& format = text_of(a[0]).bytes;
  if (format.size() > 256) throw Fault{"strftime_now: a format of more than 256 bytes"};
  const time_t now = e.now_unix_s;
  tm local{};
  localtime_r(&now, &local);
  char buffer[4096];
  return text_value({std::string_view(buffer, strftime(buffer, sizeof buffer, format.c_str(), &local))});
}

Value is_equal(E&, V v, A a) { return equal(v, a[0]); }

constexpr Builtin kBuiltins[] = {
    {"filter", "count", "", length},
    {"filter", "d", "default_value boolean", default_},
    {"filter", "default", "default_value boolean", default_},
    {"filter", "dictsort", "", [](E& e, V v, A a) { return sort(e, view<2>(e, v, a).list()->items, int64_t{0}); }},
    {"filter", "first", "", end_of<false>},
    {"filter", "int", "", int_},
    {"filter", "items", "", view<2, List::Form::lazy>},
    {"filter", "join", "d", [](E& e, V v, A a) { return text_value(joined(e, e.iterate(v), e.shown(a[0]))); }},
    {"filter", "last", "", end_of<true>},
    {"filter", "length", "", length},
    {"filter", "list", "", [](E& e, V v, A) { return list_value(e.iterate(v)); }},
    {"filter", "map", "*", map},
    {"filter", "min", "", min},
    {"filter", "reject", "*", choose<false, false>},
    {"filter", "rejectattr", "*", choose<false, true>},
    {"filter", "safe", "", safe},
    {"filter", "select", "*", choose<true, false>},
    {"filter", "selectattr", "*", choose<true, true>},
    {"filter", "sort", "attribute", [](E& e, V v, A a) { return sort(e, e.iterate(v), a[0]); }},
    {"filter", "string", "", [](E& e, V v, A) { return text_value(e.shown(v)); }},
    {"filter", "tojson", "ensure_ascii indent separators", tojson},
    {"filter", "unique", "", unique},

    {"test", "boolean", "", [](E&, V v, A) { return Value(v.is_bool()); }},
    {"test", "defined", "", [](E&, V v, A) { return Value(!v.is_undefined()); }},
    {"test", "eq", "other", is_equal},
    {"test", "equalto", "other", is_equal},
    {"test", "false", "", [](E&, V v, A) { return Value(v.is_bool() && !v.truth()); }},
    {"test", "float", "", [](E&, V v, A) { return Value(v.real() != nullptr); }},
    {"test", "in", "seq", [](E& e, V v, A a) { return Value(e.contains(a[0], v)); }},
    {"test", "integer", "", [](E&, V v, A) { return Value(v.is_integer()); }},
    {"test", "iterable", "",
     [](E&, V v, A) { return Value(v.is_undefined() || v.text() || v.list() || v.dict() || v.get<Loop>()); }},
    {"test", "mapping", "", [](E&, V v, A) { return Value(v.dict() != nullptr); }},
    {"test", "ne", "other", [](E&, V v, A a) { return Value(!equal(v, a[0])); }},
    {"test", "none", "", [](E&, V v, A) { return Value(v.is_none()); }},
    {"test", "number", "", [](E&, V v, A) { return Value(v.is_number()); }},
    {"test", "sequence", "",
     [](E&, V v, A) {
       if (v.list() && v.list()->form == List::Form::view)
         throw Fault{"whether a view is a sequence is not supported"};  // a range is, others not
       return Value(v.is_undefined() || v.text() || v.dict() || (v.list() && v.list()->is_sequence()));
     }},
    {"test", "string", "", [](E&, V v, A) { return Value(v.text() != nullptr); }},
    {"test", "true", "", [](E&, V v, A) { return Value(v.is_bool() && v.truth()); }},
    {"test", "undefined", "", [](E&, V v, A) { return Value(v.is_undefined()); }},

    {"function", "namespace", "*", make_namespace},
    {"function", "raise_exception", "message", [](E& e, V, A a) -> Value { throw Fault{e.shown(a[0]).bytes}; }},
    {"function", "range", "*", range},
    {"function", "strftime_now", "format", strftime_now},

    {"a dict", "get", "key default", get},
    {"a dict", "items", "", view<2>},
    {"a dict", "keys", "", view<0>},
    {"a dict", "values", "", view<1>},
    {"a dict", "pop", "*", forbidden},
    {"a dict", "update", "*", forbidden},
    {"a list", "append", "*", forbidden},
    {"a list", "extend", "*", forbidden},
    {"a list", "insert", "*", forbidden},
    {"a list", "pop", "*", forbidden},
};

// Python's methods that are not here: an attribute with such a name is not what a dict holds.
constexpr std::pair<std::string_view, std::string_view> kOthers[] = {
    {"a string",
     " capitalize casefold center count encode expandtabs find format_map index isalnum isalpha "
     "isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper "
     "join ljust maketrans partition removeprefix removesuffix rfind rindex rjust rpartition "
     "rsplit splitlines swapcase title translate zfill "},
    {"a dict", " clear copy fromkeys popitem setdefault "},
    {"a list", " clear copy count index remove reverse sort "},
};

}  // namespace

const Builtin* find_builtin(std::string_view of, std::string_view name) {
  for (std::span<const Builtin> rows : {std::span<const Builtin>(kBuiltins), text_builtins()})
    for (const Builtin& row : rows)
      if (name == row.name && std::string_view(row.of).ends_with(of)) return &row;
  return nullptr;
}

bool is_method(std::string_view name) {
  return find_builtin("a string", name) || find_builtin("a dict", name) || find_builtin("a list", name);
}

const Builtin* find_method(const Value& object, std::string_view name) {
  if (const Builtin* found = find_builtin(object.type_name(), name)) return found;
  const std::string_view type = object.list() ? "a list" : object.type_name();
  for (const auto& [of, others] : kOthers)
    if (of == type && among(others, name))
      throw Fault{"the method ." + std::string(name) + "() of " + object.type_name() + " is not supported"};
  return nullptr;
}

}  // namespace xpyd::jinja
