// Jinja's built-in filters, by its documentation; `tojson` is transformers'.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>

#include "model/jinja_eval.h"

namespace xpyd::jinja {

Text joined(Evaluator& e, const std::vector<Value>& items, const Text& between) {
  Text out;
  for (size_t i = 0; i < items.size(); ++i) {
    const Text part = str(items[i]);
    e.charge(2 + (part.bytes.size() + between.bytes.size()) / 16);
    if (i > 0) out.append(between);
    out.append(part);
  }
  return out;
}

Text escaped(const Text& text) {
  Text out;
  size_t begin = 0;
  for (size_t at = 0; at <= text.bytes.size(); ++at) {
    static constexpr std::string_view kPlain = "&<>'\"";
    static constexpr const char* kEscapes[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    const size_t which = at < text.bytes.size() ? kPlain.find(text.bytes[at]) : kPlain.npos;
    if (which == kPlain.npos && at < text.bytes.size()) continue;
    out.append(text, begin, at);
    begin = at + 1;
    if (which != kPlain.npos) out.append(kEscapes[which]);
  }
  out.safe = true;
  return out;
}

Text printf_text(Evaluator& e, const Text& format, const Value& values) {
  std::vector<Value> all = {values};
  if (values.list() && values.list()->form == List::Form::tuple) all = values.list()->items;
  if (format.safe) throw Fault{"% of a |safe string is not supported"};
  Text out;
  size_t next = 0;
  for (size_t at = 0; at < format.bytes.size();) {
    const size_t sign = std::min(format.bytes.find('%', at), format.bytes.size());
    out.append(format, at, sign);
    if (sign == format.bytes.size()) break;
    const char what = sign + 1 < format.bytes.size() ? format.bytes[sign + 1] : 0;
    at = sign + 2;
    if (what == '%') {
      out.append("%");
      continue;
    }
    if (what != 's' && what != 'd' && what != 'r')
      throw Fault{"a format that is not %s, %d, %r or %%"};
    if (next >= all.size()) throw Fault{"not enough values for the format"};
    const Value& value = all[next++];
    if (what == 'd' && !value.is_number()) throw Fault{std::string("%d of ") + value.type_name()};
    const Text part = what == 's'   ? str(value)
                      : what == 'r' ? Text(repr(value), value.any_from_client())
                                    : Text(std::to_string(int64_t(value.number())));
    e.charge(2 + part.bytes.size() / 16);
    out.append(part);
  }
  if (next < all.size() && !values.dict()) throw Fault{"more values than the format takes"};
  return out;
}

namespace {

bool given(const Value& v) { return !v.is_undefined() && !v.is_none(); }
Value method(Evaluator& e, const char* name, const Value& self, std::vector<Value> positional) {
  Text text = str(self);
  text.safe = false;
  const Value as_text = text_value(std::move(text));
  return e.call(*find_method(as_text, name), as_text, {std::move(positional), {}});
}

// What sorting and comparing by an attribute goes by: "a.b.0", lower case unless told otherwise.
Value key_of(Evaluator& e, const Value& item, const Value& path, bool any_case) {
  Value at = item;
  if (path.is_integer()) at = e.item(at, path);
  if (const Text* text = path.text()) {
    for (size_t begin = 0; begin <= text->bytes.size();) {
      const size_t end = std::min(text->bytes.find('.', begin), text->bytes.size());
      const std::string part = text->bytes.substr(begin, end - begin);
      const bool number =
          !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == part.npos;
      at = e.item(at, number ? Value(int64_t(std::stoll(part))) : text_value({part}));
      begin = end + 1;
    }
  }
  return any_case || !at.text() ? at : method(e, "lower", at, {});
}

Value sorted(Evaluator& e, std::vector<Value> items, const std::function<Value(const Value&)>& key,
             bool reverse) {
  std::vector<std::pair<Value, Value>> keyed;
  for (Value& item : items) keyed.emplace_back(key(item), std::move(item));
  // A merge that counts: an order that throws or costs much is cut off.
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    e.charge(1 + std::min(weight_of(a.first), weight_of(b.first)));
    return reverse ? less(b.first, a.first) : less(a.first, b.first);
  });
  items.clear();
  for (auto& [unused, item] : keyed) items.push_back(std::move(item));
  return list_value(std::move(items));
}

using A = Arguments;

Value abs_(Evaluator&, const Value& v, A&) {
  if (v.real()) return std::abs(*v.real());
  if (v.integer() == INT64_MIN) throw Fault{"an integer beyond 64 bits"};
  return std::abs(v.integer());
}
Value default_(Evaluator&, const Value& v, A& a) {
  if (!v.is_undefined() && (!a.positional[1].truth() || v.truth())) return v;
  return a.positional[0].is_undefined() ? text_value({}) : a.positional[0];
}
Value dictsort(Evaluator& e, const Value& v, A& a) {
  if (!v.dict()) throw Fault{std::string("dictsort of ") + v.type_name()};
  std::vector<Value> items = e.iterate(e.call(e.attribute(v, "items"), {}));
  const std::string by = given(a.positional[1]) ? str(a.positional[1]).bytes : "key";
  if (by != "key" && by != "value") throw Fault{"dictsort: by is key or value"};
  const bool any_case = a.positional[0].truth();
  return sorted(
      e, std::move(items),
      [&](const Value& pair) { return key_of(e, pair, int64_t{by == "value"}, any_case); },
      a.positional[2].truth());
}
Value escape(Evaluator&, const Value& v, A&) {
  return v.text() && v.text()->safe ? v : text_value(escaped(str(v)));
}
Value safe(Evaluator&, const Value& v, A&) {
  Text text = str(v);
  text.safe = true;
  return text_value(std::move(text));
}
Value first(Evaluator& e, const Value& v, A&) {
  std::vector<Value> items = e.iterate(v);
  return items.empty() ? Value(Undefined{"the first item of nothing"}) : items.front();
}
Value last(Evaluator& e, const Value& v, A&) {
  if (v.list() && v.list()->form == List::Form::lazy) throw Fault{"last of a generator"};
  std::vector<Value> items = e.iterate(v);
  return items.empty() ? Value(Undefined{"the last item of nothing"}) : items.back();
}
Value format(Evaluator& e, const Value& v, A& a) {
  if (!a.named.empty()) throw Fault{"format with named values is not supported"};
  return text_value(printf_text(e, str(v), list_value(a.positional, List::Form::tuple)));
}
Value indent(Evaluator& e, const Value& v, A& a) {
  const Value& width = a.positional[0];
  const Text pad =
      width.text()
          ? *width.text()
          : Text(std::string(
                size_t(std::clamp<int64_t>(given(width) ? width.integer() : 4, 0, 1000)), ' '));
  const bool first_too = a.positional[1].truth(), blank_too = a.positional[2].truth();
  if (v.text() && v.text()->safe) throw Fault{"indent of a |safe string is not supported"};
  // Lines as splitlines() has them; what was there beyond "\n" becomes it.
  Text with_end = str(v);
  with_end.append("\n");
  std::vector<Value> lines = e.iterate(method(e, "splitlines", text_value(with_end), {}));
  Text out;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out.append("\n");
    const Text& line = *lines[i].text();
    e.charge(2 + (line.bytes.size() + pad.bytes.size()) / 16);
    if (i == 0 ? first_too : blank_too || !line.bytes.empty()) out.append(pad);
    out.append(line);
  }
  return text_value(std::move(out));
}
// Python's int() and float() of a string: the number, if there is nothing else.
template <class T>
bool parse(const Text& text, T& out) {
  std::string word = text.bytes;
  const bool grouped = std::erase(word, '_') > 0;
  const size_t begin = word.find_first_not_of(" \t\n\r\f\v"),
               end = word.find_last_not_of(" \t\n\r\f\v");
  if (begin == word.npos) return false;
  word = word.substr(begin, end - begin + 1);
  if (word[0] == '+' && word.size() > 1 && word[1] != '-') word.erase(0, 1);
  auto [at, error] = std::from_chars(word.data(), word.data() + word.size(), out);
  const bool good = error == std::errc() && at == word.data() + word.size();
  if (good && grouped) throw Fault{"a number with _ in a string is not supported"};
  return good;
}
Value int_(Evaluator&, const Value& v, A& a) {
  const Value fallback = a.positional[0].is_undefined() ? Value(int64_t{0}) : a.positional[0];
  if (given(a.positional[1])) throw Fault{"int with a base is not supported"};
  int64_t i = 0;
  double d = 0;
  if (v.text() && parse(*v.text(), i)) return i;
  if (v.text() ? !parse(*v.text(), d) : !v.is_number()) return fallback;
  if (!v.text()) d = v.number();
  if (v.is_integer() || v.is_bool()) return v.integer();
  if (!std::isfinite(d)) return fallback;
  if (std::abs(d) > 9e18) throw Fault{"an integer beyond 64 bits"};
  return int64_t(d);
}
Value float_(Evaluator&, const Value& v, A& a) {
  double d = 0;
  if (v.is_number()) return v.number();
  if (v.text() && parse(*v.text(), d)) return d;
  return a.positional[0].is_undefined() ? Value(0.0) : a.positional[0];
}
Value items(Evaluator& e, const Value& v, A&) {
  if (v.is_undefined()) return list_value({}, List::Form::lazy);
  if (!v.dict()) throw Fault{std::string("items of ") + v.type_name()};
  return list_value(e.iterate(e.call(e.attribute(v, "items"), {})), List::Form::lazy);
}
Value join(Evaluator& e, const Value& v, A& a) {
  std::vector<Value> items = e.iterate(v);
  if (given(a.positional[1]))
    for (Value& item : items) item = key_of(e, item, a.positional[1], true);
  return text_value(joined(e, items, str(a.positional[0])));
}
Value length(Evaluator&, const Value& v, A&) {
  if (v.is_undefined()) return int64_t{0};
  if (v.text()) return int64_t(count_code_points(v.text()->bytes));
  if (v.list() && v.list()->form != List::Form::lazy) return int64_t(v.list()->items.size());
  if (v.dict()) return int64_t(v.dict()->items.size());
  throw Fault{std::string("length of ") + v.type_name()};
}
Value list(Evaluator& e, const Value& v, A&) { return list_value(e.iterate(v)); }

template <int sign>
Value extreme(Evaluator& e, const Value& v, A& a) {
  std::vector<Value> items = e.iterate(v);
  if (items.empty()) return Undefined{"the extreme of nothing"};
  size_t best = 0;
  auto key = [&](size_t i) {
    return key_of(e, items[i], a.positional[1], a.positional[0].truth());
  };
  Value best_key = key(0);
  for (size_t i = 1; i < items.size(); ++i) {
    Value k = key(i);
    if (sign < 0 ? less(k, best_key) : less(best_key, k)) best = i, best_key = std::move(k);
  }
  return items[best];
}

// map('filter', ...) or map(attribute='a', default=x).
Value map(Evaluator& e, const Value& v, A& a) {
  std::vector<Value> out;
  const Builtin* filter = nullptr;
  A rest;
  Value path, fallback;
  if (!a.positional.empty()) {
    const std::string name = str(a.positional[0]).bytes;
    filter = find_filter(name);
    if (!filter) throw Fault{"the filter '" + name + "' is not supported"};
    rest.positional.assign(a.positional.begin() + 1, a.positional.end());
    rest.named = a.named;
  } else {
    for (auto& [name, value] : a.named)
      if (name == "attribute")
        path = value;
      else if (name == "default")
        fallback = value;
      else
        throw Fault{"map takes no argument '" + name + "'"};
    if (path.is_undefined()) throw Fault{"map: expected a filter or attribute="};
  }
  for (const Value& item : v.truth() ? e.iterate(v) : std::vector<Value>()) {
    e.charge(2);
    Value mapped = filter ? e.call(*filter, item, rest) : key_of(e, item, path, true);
    out.push_back(!filter && mapped.is_undefined() && !fallback.is_undefined() ? fallback
                                                                               : std::move(mapped));
  }
  return list_value(std::move(out), List::Form::lazy);
}

template <bool keep, bool by_attribute>
Value choose(Evaluator& e, const Value& v, A& a) {
  const size_t skip = by_attribute;
  if (a.positional.size() < skip) throw Fault{"selectattr: expected an attribute"};
  const Builtin* test = nullptr;
  A rest;
  if (a.positional.size() > skip) {
    const std::string name = str(a.positional[skip]).bytes;
    test = find_test(name);
    if (!test) throw Fault{"the test '" + name + "' is not supported"};
    rest.positional.assign(a.positional.begin() + long(skip) + 1, a.positional.end());
    rest.named = a.named;
  }
  std::vector<Value> out;
  for (const Value& item : v.truth() ? e.iterate(v) : std::vector<Value>()) {
    e.charge(2);
    const Value of = by_attribute ? key_of(e, item, a.positional[0], true) : item;
    if ((test ? e.call(*test, of, rest) : of).truth() == keep) out.push_back(item);
  }
  return list_value(std::move(out), List::Form::lazy);
}

Value replace(Evaluator& e, const Value& v, A& a) {
  return method(
      e, "replace", v,
      {text_value(str(a.positional[0])), text_value(str(a.positional[1])), a.positional[2]});
}
Value reverse(Evaluator& e, const Value& v, A&) {
  std::vector<Value> items = e.iterate(v);
  std::reverse(items.begin(), items.end());
  if (v.text()) return text_value(joined(e, items, {}));
  return list_value(std::move(items), List::Form::lazy);
}
Value round_(Evaluator&, const Value& v, A& a) {
  const std::string how = given(a.positional[1]) ? str(a.positional[1]).bytes : "common";
  const int64_t places = given(a.positional[0]) ? a.positional[0].integer() : 0;
  if (places < 0 || places > 15) throw Fault{"round: expected a precision of 0 to 15"};
  if (how != "common") {
    const double scale = std::pow(10.0, double(places));
    return (how == "ceil" ? std::ceil(v.number() * scale) : std::floor(v.number() * scale)) / scale;
  }
  char buffer[512];  // Python rounds the decimal digits of the exact value, half to even
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, v.number(),
                                 std::chars_format::fixed, int(places))
                       .ptr;
  if (v.is_integer()) return v;
  double rounded = 0;
  std::from_chars(buffer, end, rounded);
  return rounded;
}
Value sort(Evaluator& e, const Value& v, A& a) {
  return sorted(
      e, e.iterate(v),
      [&](const Value& item) { return key_of(e, item, a.positional[2], a.positional[1].truth()); },
      a.positional[0].truth());
}
Value string(Evaluator&, const Value& v, A&) { return v.text() ? v : text_value(str(v)); }
Value sum(Evaluator& e, const Value& v, A& a) {
  Value total = a.positional[1].is_undefined() ? Value(int64_t{0}) : a.positional[1];
  for (const Value& item : e.iterate(v)) {
    const Value add = key_of(e, item, a.positional[0], true);
    if (total.real() || add.real())
      total = total.number() + add.number();
    else if (int64_t s; !__builtin_add_overflow(total.integer(), add.integer(), &s))
      total = s;
    else
      throw Fault{"an integer beyond 64 bits"};
  }
  return total;
}
// Words begin after white space and -({[<.
Value title(Evaluator& e, const Value& v, A&) {
  Text text = *method(e, "lower", v, {}).text();
  bool begins = true;
  for (char& c : text.bytes) {
    if (begins && c >= 'a' && c <= 'z') c = char(c - 32);
    begins =
        is_python_space(uint8_t(c)) || std::string_view("-({[<").find(c) != std::string_view::npos;
  }
  return text_value(std::move(text));
}
Value tojson(Evaluator&, const Value& v, A& a) {
  JsonStyle style{.ensure_ascii = a.positional[0].truth(), .sort_keys = a.positional[3].truth()};
  const Value &indent = a.positional[1], &separators = a.positional[2];
  if (given(indent)) {
    style.pretty = true;
    style.item_separator = std::string(",");
    style.indent = indent.text()
                       ? indent.text()->bytes
                       : std::string(size_t(std::clamp<int64_t>(indent.integer(), 0, 100)), ' ');
  }
  if (given(separators)) {
    if (!separators.list() || separators.list()->items.size() != 2)
      throw Fault{"tojson: expected two separators"};
    style.item_separator = str(separators.list()->items[0]).bytes;
    style.key_separator = str(separators.list()->items[1]).bytes;
  }
  if (style.indent.size() + style.item_separator.size() + style.key_separator.size() > 100)
    throw Fault{"tojson: expected less than 100 bytes of indent and separators"};
  return text_value(to_json(v, style));
}
Value trim(Evaluator& e, const Value& v, A& a) { return method(e, "strip", v, {a.positional[0]}); }
Value unique(Evaluator& e, const Value& v, A& a) {
  std::vector<Value> out, keys;
  for (Value& item : e.iterate(v)) {
    Value key = key_of(e, item, a.positional[1], a.positional[0].truth());
    e.charge(keys.size() + 1);
    if (std::any_of(keys.begin(), keys.end(), [&](const Value& k) { return equal(k, key); }))
      continue;
    keys.push_back(std::move(key));
    out.push_back(item);
  }
  return list_value(std::move(out), List::Form::lazy);
}
Value wordcount(Evaluator& e, const Value& v, A&) {
  return int64_t(e.iterate(method(e, "split", v, {Value(), Value()})).size());
}
template <const char* name>
Value by_method(Evaluator& e, const Value& v, A&) {
  return method(e, name, v, {});
}
constexpr char kUpper[] = "upper", kLower[] = "lower", kCapitalize[] = "capitalize";

constexpr Builtin kFilters[] = {
    {"", "abs", "", abs_},
    {"", "capitalize", "", by_method<kCapitalize>},
    {"", "count", "", length},
    {"", "d", "default_value boolean", default_},
    {"", "default", "default_value boolean", default_},
    {"", "dictsort", "case_sensitive by reverse", dictsort},
    {"", "e", "", escape},
    {"", "escape", "", escape},
    {"", "first", "", first},
    {"", "float", "default", float_},
    {"", "format", "*", format},
    {"", "indent", "width first blank", indent},
    {"", "int", "default base", int_},
    {"", "items", "", items},
    {"", "join", "d attribute", join},
    {"", "last", "", last},
    {"", "length", "", length},
    {"", "list", "", list},
    {"", "lower", "", by_method<kLower>},
    {"", "map", "*", map},
    {"", "max", "case_sensitive attribute", extreme<1>},
    {"", "min", "case_sensitive attribute", extreme<-1>},
    {"", "reject", "*", choose<false, false>},
    {"", "rejectattr", "*", choose<false, true>},
    {"", "replace", "old new count", replace},
    {"", "reverse", "", reverse},
    {"", "round", "precision method", round_},
    {"", "safe", "", safe},
    {"", "select", "*", choose<true, false>},
    {"", "selectattr", "*", choose<true, true>},
    {"", "sort", "reverse case_sensitive attribute", sort},
    {"", "string", "", string},
    {"", "sum", "attribute start", sum},
    {"", "title", "", title},
    {"", "tojson", "ensure_ascii indent separators sort_keys", tojson},
    {"", "trim", "chars", trim},
    {"", "unique", "case_sensitive attribute", unique},
    {"", "upper", "", by_method<kUpper>},
    {"", "wordcount", "", wordcount},
};

}  // namespace

const Builtin* find_filter(std::string_view name) {
  for (const Builtin& row : kFilters)
    if (name == row.name) return &row;
  return nullptr;
}

}  // namespace xpyd::jinja
