// Values as text: Python's str() and json.dumps().

#include <charconv>
#include <cmath>

#include "base/utf8.h"
#include "model/jinja_eval.h"
#include "model/unicode.h"

namespace xpyd::jinja {
namespace {

struct Style {
  bool json = false, ensure_ascii = false;
  int64_t indent = -1;  // spaces of a level; negative: all in one line
  std::string item_separator = ", ", key_separator = ": ";
};

// Python's repr of a float: the shortest digits that read back, in its choice of notation.
std::string float_repr(double value) {
  if (!std::isfinite(value)) throw Fault{"a float that is no number"};
  char buffer[64];
  const double size = std::abs(value);
  const bool scientific = value != 0 && (size < 1e-4 || size >= 1e16);
  const auto format = scientific ? std::chars_format::scientific : std::chars_format::fixed;
  std::string digits(buffer, std::to_chars(buffer, buffer + sizeof buffer, value, format).ptr);
  return scientific || digits.find('.') != digits.npos ? digits : digits + ".0";
}

void append_hex(std::string& out, const char* prefix, uint32_t value, int digits) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, "%s%0*x", prefix, digits, value);
  out += buffer;
}

// A quoted string. `keeps` says what stands as it is, `escape` writes a character that does not.
template <class Keeps, class Escape>
void quote(std::string_view text, char mark, std::string_view plain, std::string_view escapes, Keeps keeps,
           Escape escape, std::string& out) {
  out += mark;
  while (!text.empty()) {
    const CodePoint c = next_code_point(text);
    const size_t at = c.value < 0x80 ? plain.find(char(c.value)) : plain.npos;
    if (at != plain.npos || c.value == uint32_t(mark))
      (out += '\\') += at == plain.npos ? mark : escapes[at];
    else if (keeps(c.value))
      out += text.substr(0, size_t(c.bytes));
    else
      escape(c.value);
    text.remove_prefix(size_t(c.bytes));
  }
  out += mark;
}

void append_repr(std::string_view text, std::string& out) {
  auto keeps = [](uint32_t c) {
    if (c < 0xa1 || c == 0xad) return c >= 0x20 && c < 0x7f;
    if (unicode::is_letter(c) || unicode::is_number(c)) return true;
    throw Fault{"repr() of a character beyond ASCII that is no letter or digit"};
  };
  const char mark = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  quote(
      text, mark, "\\\n\r\t", "\\nrt", keeps, [&](uint32_t c) { append_hex(out, "\\x", c, 2); }, out);
}

void append_json(std::string_view text, bool ensure_ascii, std::string& out) {
  auto keeps = [&](uint32_t c) { return c >= 0x20 && (c < 0x7f || !ensure_ascii); };
  auto escape = [&](uint32_t c) {
    if (c >= 0x10000) append_hex(out, "\\u", 0xd800 + ((c - 0x10000) >> 10), 4);
    append_hex(out, "\\u", c >= 0x10000 ? 0xdc00 + (c & 0x3ff) : c, 4);
  };
  quote(text, '"', "\\\n\r\t\b\f", "\\nrtbf", keeps, escape, out);
}

struct Brackets {
  std::string open, close;
};

// The items of a list or dict, which `each` writes, one per line where there is an indent.
template <class Each>
void enclose(const Brackets& brackets, size_t n, const Style& style, int64_t level, Each each, std::string& out) {
  auto line = [&](int64_t at) {
    if (style.indent >= 0) (out += '\n').append(size_t(at * style.indent), ' ');
  };
  out += brackets.open;
  for (size_t i = 0; i < n; ++i) {
    if (i > 0) out += style.item_separator;
    line(level + 1);
    each(i);
  }
  if (n > 0) line(level);
  out += brackets.close;
}

// As JSON, or as Python's repr().
void append(const Value& value, const Style& style, int64_t level, std::string& out) {
  const List* list = value.list();
  const bool json = style.json;
  auto write = [&](const Value& v) { append(v, style, level + 1, out); };
  if (const Text* text = value.text(); text && (json || !text->safe)) {
    json ? append_json(text->bytes, style.ensure_ascii, out) : append_repr(text->bytes, out);
  } else if (list && list->is_sequence()) {
    const bool tuple = !json && list->form == List::Form::tuple;
    const Brackets round = {"(", list->items.size() == 1 ? ",)" : ")"}, square = {"[", "]"};
    enclose(
        tuple ? round : square, list->items.size(), style, level, [&](size_t i) { write(list->items[i]); }, out);
  } else if (const Dict* dict = value.dict()) {
    auto item = [&](size_t i) {
      if (json && !dict->items[i].first.text()) throw Fault{"tojson of a dict with integer keys"};
      write(dict->items[i].first);
      out += style.key_separator;
      write(dict->items[i].second);
    };
    enclose({"{", "}"}, dict->items.size(), style, level, item, out);
  } else if (value.is_none()) {
    out += json ? "null" : "None";
  } else if (value.is_bool()) {
    out += value.truth() ? json ? "true" : "True" : json ? "false" : "False";
  } else if (value.is_integer()) {
    out += std::to_string(value.integer());
  } else if (value.real()) {
    out += float_repr(*value.real());
  } else if (value.is_undefined() && !json) {
    out += "Undefined";
  } else {
    throw Fault{std::string(json ? "tojson of " : "text of ") + value.type_name()};
  }
}

}  // namespace

Text str(const Value& value) {
  if (value.text()) return *value.text();
  if (value.is_undefined()) return {};
  std::string out;
  append(value, {}, 0, out);
  return {out, value.any_from_client()};
}

// Python's json.dumps().
Value tojson(Evaluator& e, const Value& v, const Arguments& a) {
  Style style{.json = true, .ensure_ascii = a[0].truth()};
  if (a[1].given()) {
    style.indent = a[1].integer();
    style.item_separator = ',';
    if (style.indent < 0 || style.indent > 16) throw Fault{"tojson: expected an indent of 0 to 16"};
    e.charge(weight_of(v) * size_t(1 + 4 * style.indent));
  }
  if (a[2].given()) {
    if (!a[2].list() || a[2].list()->items.size() != 2) throw Fault{"tojson: expected two separators"};
    style.item_separator = text_of(a[2].list()->items[0]).bytes;
    style.key_separator = text_of(a[2].list()->items[1]).bytes;
    if (style.item_separator.size() + style.key_separator.size() > 16)
      throw Fault{"tojson: expected separators of at most 16 bytes"};
  }
  std::string out;
  append(v, style, 0, out);
  return text_value({out, v.any_from_client()});
}

}  // namespace xpyd::jinja
