// Jinja's filters and tests, the methods of strings and dicts, and the global functions, by Jinja's documentation;
// `tojson`, `raise_exception` and `strftime_now` follow transformers. Operations on strings come first.
#include <wctype.h>

#include <algorithm>
#include <ctime>
#include <span>

#include "base/numbers.h"
#include "base/utf8.h"
#include "model/jinja/jinja_eval.h"

namespace xpyd::model::jinja {

const Text& text_of(const Value& value) {
  if (value.text()) return *value.text();
  throw Fault{std::string("expected a string, got ") + value.type_name()};
}

Text joined(Evaluator& e, const std::vector<Value>& items, const Text& between) {
  Text out;
  for (size_t i = 0; i < items.size(); ++i) {
    const Text part = e.shown(items[i]);
    e.charge(2 + weight_of(part) + weight_of(between));
    if (i > 0) out.append(between);
    out.append(part);
  }
  return out;
}

Text escaped(const Text& text) {
  static constexpr std::string_view kPlain = "&<>'\"";
  static constexpr const char* kEscapes[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
  Text out;
  size_t begin = 0;
  for (size_t at; (at = text.bytes.find_first_of(kPlain, begin)) != kPlain.npos; begin = at + 1) {
    out.append(text, begin, at);
    out.append(kEscapes[kPlain.find(text.bytes[at])]);
  }
  out.append(text, begin);
  return out;
}

namespace {

// Python's mapping of one character to one. Refused: characters that map to several, that map by their place in the
// word, or that are small letters without a capital. The C library has Unicode's table.
uint32_t other_case(uint32_t c, bool upper) {
  if (c < 0x80) return uint32_t(upper ? toupper(int(c)) : tolower(int(c)));
  static const locale_t unicode = newlocale(LC_CTYPE_MASK, "C.UTF-8", locale_t());
  const bool special = upper ? c >= 0x1f80 && c <= 0x1ffc : c == 0x130 || c == 0x3a3;
  const wint_t out = !unicode ? c : upper ? towupper_l(c, unicode) : towlower_l(c, unicode);
  if (!unicode || special || (upper && out == c && iswlower_l(c, unicode)))
    throw Fault{std::string(upper ? "the upper" : "the lower") + " case of a character beyond ASCII"};
  return out;
}

// Whether a character becomes a capital, given the character before it (0 at the begin).
bool always(uint32_t) { return true; }
bool never(uint32_t) { return false; }
bool at_begin(uint32_t before) { return before == 0; }
bool at_word(uint32_t before) {
  std::string c;
  append_utf8(c, before);
  return before == 0 || skip_space(c, 0) > 0 || std::string_view("-({[<").find(c) != std::string_view::npos;
}
template <bool (*is_upper)(uint32_t before)>
Value change_case(Evaluator& e, const Value& self, const Arguments&) {
  const Text& text = text_of(self);
  e.charge(text.bytes.size() / 2);
  Text out;
  auto run = text.runs.begin();
  uint32_t before = 0;
  for (size_t at = 0; at < text.bytes.size();) {
    const CodePoint c = next_code_point(std::string_view(text.bytes).substr(at));
    while (run->end <= at) ++run;
    std::string changed;
    append_utf8(changed, other_case(c.value, is_upper(before)));
    out.append(changed, run->from_client);
    at += size_t(c.bytes);
    before = c.value;
  }
  out.safe = text.safe;
  return text_value(std::move(out));
}

template <bool left, bool right>
Value strip(Evaluator& e, const Value& self, const Arguments& a) {
  const std::string_view text = text_of(self).bytes;
  size_t begin = 0, end = text.size();
  if (!a[0].given()) {
    if (left) begin = skip_space(text, 0);
    if (right) end = std::max(begin, trailing_space(text));
  } else {
    const std::string& set = text_of(a[0]).bytes;
    if (count_code_points(set) != set.size()) throw Fault{"strip of characters beyond ASCII"};
    e.charge(set.size() / 4);
    bool strips[256] = {};
    for (const char c : set) strips[uint8_t(c)] = true;
    while (left && begin < end && strips[uint8_t(text[begin])]) ++begin;
    while (right && begin < end && strips[uint8_t(text[end - 1])]) --end;
  }
  e.charge((text.size() - (end - begin)) / 4);
  return text_value(text_of(self).substr(begin, end));
}

// Calls found(begin, end) for up to `most` occurrences of `part`.
template <class Found>
void search(Evaluator& e, const std::string& text, const std::string& part, int64_t most, Found found) {
  e.charge(1 + text.size() / 8 * (1 + part.size() / 32));
  if (part.empty()) throw Fault{"an empty string to look for"};
  size_t begin = 0;
  for (; most != 0 && (begin = text.find(part, begin)) != text.npos; --most) {
    e.charge(4);
    found(begin, begin + part.size());
    begin += part.size();
  }
}

Value split(Evaluator& e, const Value& self, const Arguments& a) {
  if (a[0].is_undefined()) throw Fault{"split without a separator is not supported"};
  const Text& text = text_of(self);
  std::vector<Value> parts;
  size_t begin = 0;
  search(e, text.bytes, text_of(a[0]).bytes, a[1].is_undefined() ? -1 : a[1].integer(), [&](size_t at, size_t end) {
    parts.push_back(text_value(text.substr(begin, at)));
    begin = end;
  });
  parts.push_back(text_value(text.substr(begin, text.bytes.size())));
  return list_value(std::move(parts));
}

Value replace(Evaluator& e, const Value& self, const Arguments& a) {
  const Text &text = text_of(self), fresh = e.shown(a[1]);
  if (text.safe) throw Fault{"replace in a |safe string is not supported"};
  Text out;
  size_t begin = 0;
  search(e, text.bytes, e.shown(a[0]).bytes, -1, [&](size_t at, size_t end) {
    e.charge((at - begin) / 16 + weight_of(fresh));
    out.append(text, begin, at);
    out.append(fresh);
    begin = end;
  });
  out.append(text, begin);
  return text_value(std::move(out));
}

template <bool at_end>
Value has_affix(Evaluator&, const Value& self, const Arguments& a) {
  const std::string &text = text_of(self).bytes, &part = text_of(a[0]).bytes;
  return at_end ? text.ends_with(part) : text.starts_with(part);
}

// Replaces every `hole` by a value, for format("{}") and "%s"|format.
Value fill(Evaluator& e, const Value& self, const Arguments& a, const std::string& hole) {
  const Text& text = text_of(self);
  if (!a.named.empty() || text.safe) throw Fault{"format with names or of a |safe string"};
  Text out;
  size_t begin = 0, next = 0;
  auto keep = [&](size_t end) {
    if (text.bytes.substr(begin, end - begin).find_first_of(hole == "%s" ? "%" : "{}") != hole.npos)
      throw Fault{"a format that is not " + hole + " is not supported"};
    out.append(text, begin, end);
  };
  search(e, text.bytes, hole, -1, [&](size_t at, size_t end) {
    keep(at);
    if (next >= a.positional.size()) throw Fault{"not enough values for the format"};
    const Text part = e.shown(a[next++]);
    e.charge(weight_of(part));
    out.append(part);
    begin = end;
  });
  keep(text.bytes.size());
  if (hole == "%s" && next < a.positional.size()) throw Fault{"more values than the format takes"};
  return text_value(std::move(out));
}

Value indent(Evaluator& e, const Value& self, const Arguments& a) {
  const Text& text = text_of(self);
  const std::string pad(size_t(std::clamp<int64_t>(a[0].is_undefined() ? 4 : a[0].integer(), 0, 99)), ' ');
  if (text.safe) throw Fault{"indent of a |safe string is not supported"};
  for (const char* other : {"\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\u0085", "\u2028", "\u2029"})
    if (text.bytes.find(other) != std::string::npos)
      throw Fault{"indent of line breaks that are not \\n is not supported"};
  Text out(a[1].truth() ? pad : "");
  size_t begin = 0;
  search(e, text.bytes, "\n", -1, [&](size_t, size_t end) {
    out.append(text, begin, end);
    if (end < text.bytes.size() && text.bytes[end] != '\n') out.append(pad);
    e.charge(pad.size() / 16);
    begin = end;
  });
  out.append(text, begin);
  return text_value(std::move(out));
}

constexpr Builtin kText[] = {
    {"a string", "strip", "chars", strip<true, true>},
    {"a string", "lstrip", "chars", strip<true, false>},
    {"a string", "rstrip", "chars", strip<false, true>},
    {"a string", "split", "sep maxsplit", split},
    {"a string", "replace", "old new",
     [](Evaluator& e, const Value& v, const Arguments& a) {
       for (const Value& given : a.positional) text_of(given);
       return replace(e, v, a);
     }},
    {"a string", "startswith", "prefix", has_affix<false>},
    {"a string", "endswith", "suffix", has_affix<true>},
    {"a string", "upper", "", change_case<always>},
    {"a string", "lower", "", change_case<never>},
    {"a string", "capitalize", "", change_case<at_begin>},
    {"a string", "format", "*", [](Evaluator& e, const Value& v, const Arguments& a) { return fill(e, v, a, "{}"); }},
    {"text filter", "format", "*",
     [](Evaluator& e, const Value& v, const Arguments& a) { return fill(e, v, a, "%s"); }},
    {"text filter", "trim", "chars", strip<true, true>},
    {"text filter", "replace", "old new", replace},
    {"text filter", "upper", "", change_case<always>},
    {"text filter", "lower", "", change_case<never>},
    {"text filter", "capitalize", "", change_case<at_begin>},
    {"text filter", "title", "", change_case<at_word>},
    {"text filter", "indent", "width first", indent},
};

// Lowers a text; returns any other value unchanged.
Value lower_case(Evaluator& e, const Value& value) { return value.text() ? change_case<never>(e, value, {}) : value; }

using E = Evaluator;
using V = const Value&;
using A = const Arguments&;

// ---- Filters

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

Value int_(E& e, V v, A) {
  if (!v.text()) {
    if (v.real() && std::abs(*v.real()) > 9e18) throw Fault{"an integer beyond 64 bits"};
    if (v.real()) return int64_t(*v.real());
    return v.is_number() ? v.integer() : int64_t{0};
  }
  const std::string& text = v.text()->bytes;
  e.charge(text.size() / 4);
  int64_t out = 0;
  if (read_number(text, out)) return out;
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

// Sorts by the value at `path` (an attribute, an index, or none), ignoring case.
Value sort(E& e, const std::vector<Value>& items, V path) {
  std::vector<std::pair<Value, Value>> keyed;
  for (V item : items) keyed.emplace_back(lower_case(e, path.given() ? e.item(item, path) : item), item);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    e.charge_comparison(a.first, b.first);
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
    for (V known : keys) e.charge_comparison(known, key);
    if (std::any_of(keys.begin(), keys.end(), [&](V known) { return equal(known, key); })) continue;
    keys.push_back(std::move(key));
    out.push_back(item);
  }
  return list_value(std::move(out), List::Form::lazy);
}

// Returns the filter or test that argument `index` names, and its arguments.
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

// ---- Methods and functions

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
    if (items.size() >= 100000) throw Fault{"range: more than 100000 numbers"};  // as Jinja's sandbox
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

template <bool wanted>
Value is_equal(E& e, V v, A a) {
  e.charge_comparison(v, a[0]);
  return equal(v, a[0]) == wanted;
}

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
    {"test", "eq", "other", is_equal<true>},
    {"test", "equalto", "other", is_equal<true>},
    {"test", "false", "", [](E&, V v, A) { return Value(v.is_bool() && !v.truth()); }},
    {"test", "float", "", [](E&, V v, A) { return Value(v.real() != nullptr); }},
    {"test", "in", "seq", [](E& e, V v, A a) { return Value(e.contains(a[0], v)); }},
    {"test", "integer", "", [](E&, V v, A) { return Value(v.is_integer()); }},
    {"test", "iterable", "",
     [](E&, V v, A) { return Value(v.is_undefined() || v.text() || v.list() || v.dict() || v.get<Loop>()); }},
    {"test", "mapping", "", [](E&, V v, A) { return Value(v.dict() != nullptr); }},
    {"test", "ne", "other", is_equal<false>},
    {"test", "none", "", [](E&, V v, A) { return Value(v.is_none()); }},
    {"test", "number", "", [](E&, V v, A) { return Value(v.is_number()); }},
    {"test", "sequence", "",
     [](E&, V v, A) {
       if (v.list() && v.list()->form == List::Form::view)
         throw Fault{"whether a view is a sequence is not supported"};  // a range is one, others are not
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

// Python's methods that are not supported: an attribute with such a name is never a dict's entry.
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
  for (std::span<const Builtin> rows : {std::span<const Builtin>(kBuiltins), std::span<const Builtin>(kText)})
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

}  // namespace xpyd::model::jinja
