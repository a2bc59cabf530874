// What a template may do with a string: Python's methods, and the filters that do the same.

#include <wctype.h>

#include <algorithm>

#include "base/utf8.h"
#include "model/jinja_eval.h"

namespace xpyd::jinja {

const Text& text_of(const Value& value) {
  if (value.text()) return *value.text();
  throw Fault{std::string("expected a string, got ") + value.type_name()};
}

Text joined(Evaluator& e, const std::vector<Value>& items, const Text& between) {
  Text out;
  for (size_t i = 0; i < items.size(); ++i) {
    const Text part = e.shown(items[i]);
    e.charge(2 + (part.bytes.size() + between.bytes.size()) / 16);
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

// Python's mapping of one character to one. What maps to several, or by its place in the word, or
// has no capital though it is a small letter, is refused. The C library knows Unicode's table.
uint32_t other_case(uint32_t c, bool upper) {
  if (c < 0x80) return uint32_t(upper ? toupper(int(c)) : tolower(int(c)));
  static const locale_t unicode = newlocale(LC_CTYPE_MASK, "C.UTF-8", locale_t());
  const bool special = upper ? c >= 0x1f80 && c <= 0x1ffc : c == 0x130 || c == 0x3a3;
  const wint_t out = !unicode ? c : upper ? towupper_l(c, unicode) : towlower_l(c, unicode);
  if (!unicode || special || (upper && out == c && iswlower_l(c, unicode)))
    throw Fault{std::string(upper ? "the upper" : "the lower") + " case of a character beyond ASCII"};
  return out;
}

// `is_upper` of the character before it, 0 at the begin, says what a character becomes.
Value change_case(Evaluator& e, const Value& self, bool (*is_upper)(uint32_t before)) {
  const Text& text = text_of(self);
  e.charge(text.bytes.size() / 4);
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
Value upper(Evaluator& e, const Value& self, const Arguments&) {
  return change_case(e, self, [](uint32_t) { return true; });
}
Value lower(Evaluator& e, const Value& self, const Arguments&) {
  return change_case(e, self, [](uint32_t) { return false; });
}
Value capitalize(Evaluator& e, const Value& self, const Arguments&) {
  return change_case(e, self, [](uint32_t before) { return before == 0; });
}
Value title(Evaluator& e, const Value& self, const Arguments&) {
  return change_case(e, self, [](uint32_t before) {
    std::string c;
    append_utf8(c, before);
    return before == 0 || skip_space(c, 0) > 0 || std::string_view("-({[<").find(c) != std::string_view::npos;
  });
}

template <bool left, bool right>
Value strip(Evaluator&, const Value& self, const Arguments& a) {
  const std::string_view text = text_of(self).bytes;
  size_t begin = 0, end = text.size();
  if (!a[0].given()) {
    if (left) begin = skip_space(text, 0);
    if (right) end = std::max(begin, trailing_space(text));
  } else {
    const std::string& set = text_of(a[0]).bytes;
    if (count_code_points(set) != set.size()) throw Fault{"strip of characters beyond ASCII"};
    if (left) begin = std::min(text.find_first_not_of(set), end);
    if (right) end = std::max(begin, text.find_last_not_of(set) + 1);
  }
  return text_value(text_of(self).substr(begin, end));
}

// Calls found(begin, end) for up to `most` places where `part` stands.
template <class Found>
void search(Evaluator& e, const std::string& text, const std::string& part, int64_t most, Found found) {
  e.charge(1 + text.size() / 16 * (1 + part.size() / 64));
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
    e.charge((at - begin + fresh.bytes.size()) / 16);
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

// Values in the place of every `hole`, as format("{}") and "%s"|format have them.
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
    e.charge(part.bytes.size() / 16);
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
    {"a string", "upper", "", upper},
    {"a string", "lower", "", lower},
    {"a string", "capitalize", "", capitalize},
    {"a string", "format", "*", [](Evaluator& e, const Value& v, const Arguments& a) { return fill(e, v, a, "{}"); }},
    {"text filter", "format", "*",
     [](Evaluator& e, const Value& v, const Arguments& a) { return fill(e, v, a, "%s"); }},
    {"text filter", "trim", "chars", strip<true, true>},
    {"text filter", "replace", "old new", replace},
    {"text filter", "upper", "", upper},
    {"text filter", "lower", "", lower},
    {"text filter", "capitalize", "", capitalize},
    {"text filter", "title", "", title},
    {"text filter", "indent", "width first", indent},
};

}  // namespace

std::span<const Builtin> text_builtins() { return kText; }

Value lower_case(Evaluator& e, const Value& value) { return value.text() ? lower(e, value, {}) : value; }

}  // namespace xpyd::jinja
