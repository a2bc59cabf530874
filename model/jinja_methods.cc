// The methods of Python's strings, lists and dicts that templates may call, and the global
// functions.

#include <wctype.h>

#include <algorithm>
#include <ctime>

#include "base/utf8.h"
#include "model/jinja_eval.h"

namespace xpyd::jinja {
namespace {

const Text& text_of(const Value& value, const char* what) {
  if (!value.text())
    throw Fault{std::string(what) + ": expected a string, got " + value.type_name()};
  return *value.text();
}
bool given(const Value& value) { return !value.is_undefined() && !value.is_none(); }

// [begin, end) of what remains when characters of `set` (white space if it is not given) go.
std::pair<size_t, size_t> stripped(std::string_view text, const Value& set, bool left, bool right) {
  const std::string_view characters = given(set) ? text_of(set, "strip").bytes : std::string_view();
  auto goes = [&](const CodePoint& c, std::string_view bytes) {
    if (!given(set)) return is_python_space(c.value);
    return characters.find(bytes) != characters.npos;
  };
  size_t begin = 0, end = 0;
  bool leading = left;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = next_code_point(text.substr(at));
    const bool out = goes(c, text.substr(at, size_t(c.bytes)));
    at += size_t(c.bytes);
    if (out && leading)
      begin = end = at;
    else
      leading = false;
    if (!out || (!right && !leading)) end = at;
  }
  return {begin, std::max(begin, end)};
}

template <bool left, bool right>
Value strip(Evaluator&, const Value& self, Arguments& a) {
  const Text& text = text_of(self, "strip");
  auto [begin, end] = stripped(text.bytes, a.positional[0], left, right);
  Text part = text.substr(begin, end);
  part.safe = text.safe;
  return text_value(std::move(part));
}

Value split(Evaluator& e, const Value& self, Arguments& a, bool from_right) {
  const Text& text = text_of(self, "split");
  int64_t most = given(a.positional[1]) ? a.positional[1].integer() : -1;
  std::vector<Value> parts;
  const std::string_view bytes = text.bytes;
  auto keep = [&](size_t begin, size_t end) {
    e.charge(2);
    parts.push_back(text_value(text.substr(begin, end)));
  };
  if (given(a.positional[0])) {
    const std::string& at = text_of(a.positional[0], "split").bytes;
    e.charge_search(bytes, at);
    if (at.empty()) throw Fault{"split: an empty separator"};
    if (!from_right) {
      size_t begin = 0;
      for (size_t end; most != 0 && (end = bytes.find(at, begin)) != bytes.npos; --most) {
        keep(begin, end);
        begin = end + at.size();
      }
      keep(begin, bytes.size());
      return list_value(std::move(parts));
    }
    size_t end = bytes.size();
    for (size_t begin;
         most != 0 && end >= at.size() && (begin = bytes.rfind(at, end - at.size())) != bytes.npos;
         --most) {
      keep(begin + at.size(), end);
      end = begin;
    }
    keep(0, end);
    std::reverse(parts.begin(), parts.end());
    return list_value(std::move(parts));
  }
  if (from_right && most >= 0) throw Fault{"rsplit: a count without a separator is not supported"};
  auto run_of = [&](size_t at, bool space) {  // where it ends
    while (at < bytes.size()) {
      const CodePoint c = next_code_point(bytes.substr(at));
      if (is_python_space(c.value) != space) break;
      at += size_t(c.bytes);
    }
    return at;
  };
  for (size_t at = run_of(0, true); at < bytes.size();) {
    if (most-- == 0) {
      keep(at, bytes.size());
      break;
    }
    const size_t end = run_of(at, false);
    keep(at, end);
    at = run_of(end, true);
  }
  return list_value(std::move(parts));
}

Value splitlines(Evaluator& e, const Value& self, Arguments& a) {
  const Text& text = text_of(self, "splitlines");
  std::vector<Value> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.bytes.size();) {
    const CodePoint c = next_code_point(std::string_view(text.bytes).substr(at));
    size_t end = at + size_t(c.bytes);
    const bool breaks = (c.value >= 0x0a && c.value <= 0x0d) ||
                        (c.value >= 0x1c && c.value <= 0x1e) || c.value == 0x85 ||
                        c.value == 0x2028 || c.value == 0x2029;
    if (breaks) {
      if (c.value == '\r' && end < text.bytes.size() && text.bytes[end] == '\n') ++end;
      e.charge(2);
      lines.push_back(text_value(text.substr(begin, a.positional[0].truth() ? end : at)));
      begin = end;
    }
    at = end;
  }
  if (begin < text.bytes.size()) lines.push_back(text_value(text.substr(begin, text.bytes.size())));
  return list_value(std::move(lines));
}

template <bool from_right>
Value partition(Evaluator& e, const Value& self, Arguments& a) {
  const Text& text = text_of(self, "partition");
  const Text& at = text_of(a.positional[0], "partition");
  e.charge_search(text.bytes, at.bytes);
  const size_t found = from_right ? text.bytes.rfind(at.bytes) : text.bytes.find(at.bytes);
  if (at.bytes.empty()) throw Fault{"partition: an empty separator"};
  std::vector<Value> parts = {self, text_value({}), text_value({})};
  if (found == std::string::npos) {
    if (from_right) std::swap(parts[0], parts[2]);
  } else {
    parts = {text_value(text.substr(0, found)), a.positional[0],
             text_value(text.substr(found + at.bytes.size(), text.bytes.size()))};
  }
  return list_value(std::move(parts), List::Form::tuple);
}

template <bool at_end>
Value has_affix(Evaluator& e, const Value& self, Arguments& a) {
  const std::string& text = text_of(self, "startswith").bytes;
  if (given(a.positional[1]) || given(a.positional[2]))
    throw Fault{"startswith and endswith: only of the whole string"};
  std::vector<Value> affixes = {a.positional[0]};
  if (a.positional[0].list()) affixes = e.iterate(a.positional[0]);
  for (const Value& affix : affixes) {
    const std::string& part = text_of(affix, "startswith").bytes;
    if (at_end ? text.ends_with(part) : text.starts_with(part)) return true;
  }
  return false;
}

template <bool at_end>
Value without_affix(Evaluator&, const Value& self, Arguments& a) {
  const Text& text = text_of(self, "removeprefix");
  const std::string& part = text_of(a.positional[0], "removeprefix").bytes;
  if (at_end ? !text.bytes.ends_with(part) : !text.bytes.starts_with(part)) return self;
  return text_value(at_end ? text.substr(0, text.bytes.size() - part.size())
                           : text.substr(part.size(), text.bytes.size()));
}

// The index of the first or last occurrence, in code points; -1: none.
template <bool from_right, bool must>
Value find(Evaluator& e, const Value& self, Arguments& a) {
  if (given(a.positional[1]) || given(a.positional[2]))
    throw Fault{"find and index: only in the whole string"};
  const std::string& text = text_of(self, "find").bytes;
  const std::string& part = text_of(a.positional[0], "find").bytes;
  e.charge_search(text, part);
  const size_t at = from_right ? text.rfind(part) : text.find(part);
  if (at != std::string::npos)
    return int64_t(count_code_points(std::string_view(text).substr(0, at)));
  if (must) throw Fault{"index: not found"};
  return int64_t{-1};
}

Value count(Evaluator& e, const Value& self, Arguments& a) {
  int64_t n = 0;
  if (self.list()) {
    for (const Value& each : e.iterate(self)) n += equal(each, a.positional[0]);
    return n;
  }
  const std::string& text = text_of(self, "count").bytes;
  const std::string& part = text_of(a.positional[0], "count").bytes;
  e.charge_search(text, part);
  if (part.empty()) return int64_t(count_code_points(text)) + 1;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

Value replace(Evaluator& e, const Value& self, Arguments& a) {
  const Text& text = text_of(self, "replace");
  const Text &old = text_of(a.positional[0], "replace"),
             &fresh = text_of(a.positional[1], "replace");
  int64_t most = given(a.positional[2]) ? a.positional[2].integer() : -1;
  e.charge_search(text.bytes, old.bytes);
  Text out;
  size_t begin = 0;
  auto put = [&](size_t end) {
    e.charge(2 + (end - begin + fresh.bytes.size()) / 16);
    out.append(text, begin, end);
    out.append(fresh);
  };
  if (old.bytes.empty()) {  // before each character and at the end
    for (size_t at = 0; most != 0 && at <= text.bytes.size(); --most) {
      put(at);
      begin = at;
      at +=
          at < text.bytes.size() ? code_point_at(std::string_view(text.bytes).substr(at, 4), 1) : 1;
    }
  } else {
    for (size_t end; most != 0 && (end = text.bytes.find(old.bytes, begin)) != std::string::npos;
         --most) {
      put(end);
      begin = end + old.bytes.size();
    }
  }
  out.append(text, begin, text.bytes.size());
  out.safe = text.safe;
  return text_value(std::move(out));
}

// Bytes of the same length in the same places, so runs stay.
Value cased(const Value& self, void (*change)(std::string&)) {
  Text text = text_of(self, "upper");
  for (char c : text.bytes)
    if (uint8_t(c) >= 0x80)
      throw Fault{"capitals of text beyond ASCII are not supported"};
  change(text.bytes);
  return text_value(std::move(text));
}
bool is_lower(char c) { return c >= 'a' && c <= 'z'; }
bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
char to_upper(char c) { return is_lower(c) ? char(c - 32) : c; }
char to_lower(char c) { return is_upper(c) ? char(c + 32) : c; }

// Python's mapping of one character to one; what maps to several, or by its place in the word, or
// has no capital though it is a small letter, is refused. The C library knows Unicode's table.
uint32_t other_case(uint32_t c, bool upper) {
  static const locale_t unicode = newlocale(LC_CTYPE_MASK, "C.UTF-8", locale_t());
  const bool special = upper ? c >= 0x1f80 && c <= 0x1ffc : c == 0x130 || c == 0x3a3;
  const wint_t out = unicode ? upper ? towupper_l(c, unicode) : towlower_l(c, unicode) : c;
  if (!unicode || special || (upper && out == c && iswlower_l(c, unicode)))
    throw Fault{std::string(upper ? "the upper" : "the lower") + " case of a character beyond ASCII"};
  return out;
}

template <bool to_upper_case>
Value change_case(Evaluator& e, const Value& self, Arguments&) {
  const Text& text = text_of(self, "upper");
  e.charge(text.bytes.size() / 4);
  Text out;
  auto run = text.runs.begin();
  for (size_t at = 0; at < text.bytes.size();) {
    const CodePoint c = next_code_point(std::string_view(text.bytes).substr(at));
    while (run->end <= at) ++run;
    std::string changed;
    if (c.value < 0x80) changed += to_upper_case ? to_upper(char(c.value)) : to_lower(char(c.value));
    else append_utf8(changed, other_case(c.value, to_upper_case));
    out.append(changed, run->from_client);
    at += size_t(c.bytes);
  }
  return text_value(std::move(out));
}
Value swapcase(Evaluator&, const Value& self, Arguments&) {
  return cased(self, [](std::string& s) {
    for (char& c : s) c = is_lower(c) ? to_upper(c) : to_lower(c);
  });
}
Value capitalize(Evaluator&, const Value& self, Arguments&) {
  return cased(self, [](std::string& s) {
    for (size_t i = 0; i < s.size(); ++i) s[i] = i == 0 ? to_upper(s[i]) : to_lower(s[i]);
  });
}
Value title(Evaluator&, const Value& self, Arguments&) {
  return cased(self, [](std::string& s) {
    bool inside = false;
    for (char& c : s) {
      c = inside ? to_lower(c) : to_upper(c);
      inside = is_lower(c) || is_upper(c);
    }
  });
}

// All characters are of the class and there is one; beyond ASCII it is not known.
template <int which>  // 0 digits, 1 letters, 2 either, 3 space, 4 upper, 5 lower
Value is_all(Evaluator&, const Value& self, Arguments&) {
  bool seen = false;
  for (char c : text_of(self, "isdigit").bytes) {
    const bool digit = c >= '0' && c <= '9', letter = is_lower(c) || is_upper(c);
    if (uint8_t(c) >= 0x80) throw Fault{"classes of characters beyond ASCII are not supported"};
    if (which >= 4) {  // what has no case does not count
      if (which == 4 ? is_lower(c) : is_upper(c)) return false;
      seen |= letter;
      continue;
    }
    const bool in = which == 0   ? digit
                    : which == 1 ? letter
                    : which == 2 ? digit || letter
                                 : is_python_space(uint8_t(c));
    if (!in) return false;
    seen = true;
  }
  return seen;
}

Value join_method(Evaluator& e, const Value& self, Arguments& a) {
  std::vector<Value> items = e.iterate(a.positional[0]);
  for (const Value& item : items) text_of(item, "join");
  return text_value(joined(e, items, text_of(self, "join")));
}

template <int side>  // -1 ljust, 1 rjust, 0 center
Value justify(Evaluator& e, const Value& self, Arguments& a) {
  const Text& text = text_of(self, "center");
  const int64_t width = a.positional[0].integer(), n = int64_t(count_code_points(text.bytes));
  const std::string fill = given(a.positional[1]) ? text_of(a.positional[1], "center").bytes : " ";
  if (count_code_points(fill) != 1) throw Fault{"center: expected one character to fill with"};
  if (width <= n) return self;
  const int64_t pad = width - n;
  e.charge(size_t(pad));
  const int64_t left = side < 0 ? 0 : side > 0 ? pad : pad / 2 + (pad & width & 1);
  Text out;
  for (int64_t i = 0; i < left; ++i) out.append(fill);
  out.append(text);
  for (int64_t i = left; i < pad; ++i) out.append(fill);
  return text_value(std::move(out));
}

// "{}", "{0}" and "{name}", each with .attributes and [items] left out.
Value format(Evaluator& e, const Value& self, Arguments& a) {
  const Text& text = text_of(self, "format");
  const std::string_view s = text.bytes;
  Text out;
  size_t next = 0;
  for (size_t at = 0; at < s.size();) {
    const size_t brace = std::min(s.find_first_of("{}", at), s.size());
    out.append(text, at, brace);
    if (brace == s.size()) break;
    if (brace + 1 < s.size() && s[brace + 1] == s[brace]) {
      out.append(text, brace, brace + 1);
      at = brace + 2;
      continue;
    }
    const size_t close = s.find('}', brace);
    if (s[brace] == '}' || close == s.npos) throw Fault{"format: a single brace"};
    const std::string name(s.substr(brace + 1, close - brace - 1));
    if (name.find_first_of(".[:!{") != name.npos)
      throw Fault{"format: \"{" + name + "}\" is not supported"};
    const Value* value = nullptr;
    if (name.empty() || name.find_first_not_of("0123456789") == name.npos) {
      const size_t index = name.empty() ? next++ : std::strtoul(name.c_str(), nullptr, 10);
      if (index < a.positional.size()) value = &a.positional[index];
    } else {
      for (const auto& [known, each] : a.named)
        if (known == name) value = &each;
    }
    if (!value) throw Fault{"format: nothing for \"{" + name + "}\""};
    const Text part = str(*value);
    e.charge(2 + part.bytes.size() / 16);
    out.append(part);
    at = close + 1;
  }
  return text_value(std::move(out));
}

// ---- dicts and lists

template <int which>  // 0 keys, 1 values, 2 items
Value view(Evaluator& e, const Value& self, Arguments&) {
  std::vector<Value> out;
  e.charge(2 * self.dict()->items.size());
  for (const auto& [key, value] : self.dict()->items)
    out.push_back(which == 0   ? key
                  : which == 1 ? value
                               : list_value({key, value}, List::Form::tuple));
  return list_value(std::move(out), List::Form::view);
}

Value get(Evaluator& e, const Value& self, Arguments& a) {
  e.charge(self.dict()->items.size() / 8);
  if (a.positional.empty() || a.positional.size() > 2 || !a.named.empty())
    throw Fault{"get: expected a key and perhaps a default"};
  for (const auto& [key, value] : self.dict()->items)
    if (equal(key, a.positional[0])) return value;
  return a.positional.size() > 1 ? a.positional[1] : Value(None());
}

Value copy(Evaluator&, const Value& self, Arguments&) { return self; }

Value index(Evaluator& e, const Value& self, Arguments& a) {
  std::vector<Value> items = e.iterate(self);
  for (size_t i = 0; i < items.size(); ++i)
    if (equal(items[i], a.positional[0])) return int64_t(i);
  throw Fault{"index: not found"};
}

Value forbidden(Evaluator&, const Value&, Arguments&) {
  throw Fault{"a method that changes a list or dict is not allowed"};
}

Value cycle(Evaluator&, const Value& self, Arguments& a) {
  if (a.positional.empty()) throw Fault{"loop.cycle: nothing to choose from"};
  return a.positional[self.get<Loop>()->index % a.positional.size()];
}

Value changed(Evaluator&, const Value& self, Arguments& a) {
  Loop& loop = *std::get<std::shared_ptr<Loop>>(self.as);
  Value now = list_value(a.positional, List::Form::tuple);
  const bool same = equal(now, loop.last_changed);
  loop.last_changed = std::move(now);
  return !same;
}

// ---- global functions

Value range(Evaluator& e, const Value&, Arguments& a) {
  if (a.positional.empty() || a.positional.size() > 3)
    throw Fault{"range: expected one to three integers"};
  const int64_t first = a.positional.size() > 1 ? a.positional[0].integer() : 0;
  const int64_t end = a.positional[a.positional.size() > 1].integer();
  const int64_t step = a.positional.size() > 2 ? a.positional[2].integer() : 1;
  if (step == 0) throw Fault{"range: a step of 0"};
  std::vector<Value> items;
  for (int64_t i = first; step > 0 ? i < end : i > end;) {
    e.charge(2);
    if (items.size() >= 100000) throw Fault{"range: more than 100000 numbers"};  // Jinja's sandbox
    items.push_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return list_value(std::move(items), List::Form::range);
}

std::vector<std::pair<Value, Value>> pairs(Evaluator& e, Arguments& a) {
  std::vector<std::pair<Value, Value>> items;
  auto put = [&](const Value& key, const Value& value) {
    e.charge(2 + items.size() / 8);
    for (auto& [known, old] : items)
      if (equal(known, key)) return void(old = value);
    items.emplace_back(key, value);
  };
  if (a.positional.size() > 1) throw Fault{"dict: expected at most one positional argument"};
  for (const Value& from : a.positional) {
    if (from.dict())
      for (const auto& [key, value] : from.dict()->items) put(key, value);
    else
      for (const Value& pair : e.iterate(from)) {
        std::vector<Value> two = e.iterate(pair);
        if (two.size() != 2) throw Fault{"dict: expected pairs"};
        put(two[0], two[1]);
      }
  }
  for (const auto& [name, value] : a.named) put(text_value({name}), value);
  return items;
}

Value dict(Evaluator& e, const Value&, Arguments& a) { return dict_value(pairs(e, a)); }

Value make_namespace(Evaluator& e, const Value&, Arguments& a) {
  std::vector<std::pair<std::string, Value>> attributes;
  for (auto& [name, value] : pairs(e, a)) {
    attributes.emplace_back(text_of(name, "namespace").bytes, value);
    if (attributes.back().first.starts_with("_"))
      throw Fault{"an attribute of a namespace may not begin with _"};
  }
  return e.make_namespace(std::move(attributes));
}

Value raise_exception(Evaluator&, const Value&, Arguments& a) {
  throw Fault{str(a.positional[0]).bytes};
}

// datetime.now().strftime(), local time.
Value strftime_now(Evaluator& e, const Value&, Arguments& a) {
  const std::string& format = text_of(a.positional[0], "strftime_now").bytes;
  if (format.size() > 256) throw Fault{"strftime_now: a format of more than 256 bytes"};
  const time_t now = e.now_unix_s();
  tm local{};
  localtime_r(&now, &local);
  char buffer[4096];
  return text_value(
      {std::string_view(buffer, strftime(buffer, sizeof buffer, format.c_str(), &local))});
}

constexpr Builtin kMethods[] = {
    {"a string", "strip", "chars", strip<true, true>, true},
    {"a string", "lstrip", "chars", strip<true, false>, true},
    {"a string", "rstrip", "chars", strip<false, true>, true},
    {"a string", "split", "sep maxsplit",
     [](Evaluator& e, const Value& s, Arguments& a) { return split(e, s, a, false); }},
    {"a string", "rsplit", "sep maxsplit",
     [](Evaluator& e, const Value& s, Arguments& a) { return split(e, s, a, true); }},
    {"a string", "splitlines", "keepends", splitlines},
    {"a string", "partition", "sep", partition<false>},
    {"a string", "rpartition", "sep", partition<true>},
    {"a string", "startswith", "prefix start end", has_affix<false>, true},
    {"a string", "endswith", "suffix start end", has_affix<true>, true},
    {"a string", "removeprefix", "prefix", without_affix<false>},
    {"a string", "removesuffix", "suffix", without_affix<true>},
    {"a string", "find", "sub start end", find<false, false>},
    {"a string", "rfind", "sub start end", find<true, false>},
    {"a string", "index", "sub start end", find<false, true>},
    {"a string", "rindex", "sub start end", find<true, true>},
    {"a string", "count", "sub", count},
    {"a string", "replace", "old new count", replace},
    {"a string", "upper", "", change_case<true>},
    {"a string", "lower", "", change_case<false>},
    {"a string", "swapcase", "", swapcase},
    {"a string", "capitalize", "", capitalize},
    {"a string", "title", "", title},
    {"a string", "isdigit", "", is_all<0>},
    {"a string", "isdecimal", "", is_all<0>},
    {"a string", "isnumeric", "", is_all<0>},
    {"a string", "isalpha", "", is_all<1>},
    {"a string", "isalnum", "", is_all<2>},
    {"a string", "isspace", "", is_all<3>},
    {"a string", "isupper", "", is_all<4>},
    {"a string", "islower", "", is_all<5>},
    {"a string", "join", "iterable", join_method},
    {"a string", "ljust", "width fillchar", justify<-1>},
    {"a string", "rjust", "width fillchar", justify<1>},
    {"a string", "center", "width fillchar", justify<0>},
    {"a string", "format", "*", format},
    {"a dict", "keys", "", view<0>},
    {"a dict", "values", "", view<1>},
    {"a dict", "items", "", view<2>},
    {"a dict", "get", "*", get},
    {"a dict", "copy", "", copy},
    {"a list", "copy", "", copy},
    {"a list", "index", "value", index},
    {"a list", "count", "value", count},
    {"a tuple", "index", "value", index},
    {"a tuple", "count", "value", count},
    {"the loop", "cycle", "*", cycle},
    {"the loop", "changed", "*", changed},
    {"a dict", "clear", "*", forbidden},
    {"a dict", "pop", "*", forbidden},
    {"a dict", "popitem", "*", forbidden},
    {"a dict", "setdefault", "*", forbidden},
    {"a dict", "update", "*", forbidden},
    {"a list", "append", "*", forbidden},
    {"a list", "clear", "*", forbidden},
    {"a list", "extend", "*", forbidden},
    {"a list", "insert", "*", forbidden},
    {"a list", "pop", "*", forbidden},
    {"a list", "remove", "*", forbidden},
    {"a list", "reverse", "*", forbidden},
    {"a list", "sort", "*", forbidden},
};

constexpr Builtin kFunctions[] = {
    {"", "range", "*", range},
    {"", "dict", "*", dict},
    {"", "namespace", "*", make_namespace},
    {"", "raise_exception", "message", raise_exception},
    {"", "strftime_now", "format", strftime_now},
};

}  // namespace

const Builtin* find_method(const Value& object, std::string_view name) {
  for (const Builtin& row : kMethods)
    if (name == row.name && object.type_name() == std::string_view(row.on)) return &row;
  return nullptr;
}

bool is_method(std::string_view name) {
  return std::any_of(std::begin(kMethods), std::end(kMethods),
                     [&](auto& row) { return name == row.name; });
}

const Builtin* find_function(std::string_view name) {
  for (const Builtin& row : kFunctions)
    if (name == row.name) return &row;
  return nullptr;
}

}  // namespace xpyd::jinja
