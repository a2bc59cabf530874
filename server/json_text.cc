#include "server/json_text.h"

#include <charconv>
#include <cmath>

#include "base/utf8.h"

namespace xpyd {
namespace {

void append_quoted(std::string& out, std::string_view text) {
  out += '"';
  while (!text.empty()) {
    const CodePoint point = next_code_point(text);
    const size_t n = point.valid ? size_t(point.bytes) : 1;  // one U+FFFD for each bad byte
    const unsigned char c = static_cast<unsigned char>(text[0]);
    if (!point.valid) {
      out += kReplacementCharacter;
    } else if (n > 1) {
      out += text.substr(0, n);
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += text[0];
    } else if (c == '\n') {
      out += "\\n";
    } else if (c < 0x20 || c == 0x7f) {
      constexpr char kHex[] = "0123456789abcdef";
      out += "\\u00";
      out += kHex[c >> 4];
      out += kHex[c & 15];
    } else {
      out += text[0];
    }
    text.remove_prefix(n);
  }
  out += '"';
}

}  // namespace

std::string json_quote(std::string_view text) {
  std::string out;
  append_quoted(out, text);
  return out;
}

JsonText& JsonText::key(std::string_view name) {
  comma();
  append_quoted(out_, name);
  out_ += ':';
  first_ = true;
  return *this;
}

JsonText& JsonText::text(std::string_view value) {
  comma();
  append_quoted(out_, value);
  return *this;
}

JsonText& JsonText::integer(int64_t value) {
  char digits[24];
  auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  return raw({digits, static_cast<size_t>(end - digits)});
}

JsonText& JsonText::number(double value) { return append_number(value); }
JsonText& JsonText::number(float value) { return append_number(value); }

template <class T>
JsonText& JsonText::append_number(T value) {
  if (!std::isfinite(value)) return null();
  char digits[40];
  auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  return raw({digits, static_cast<size_t>(end - digits)});
}

JsonText& JsonText::raw(std::string_view json) {
  comma();
  out_ += json;
  return *this;
}

}  // namespace xpyd
