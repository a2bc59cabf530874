#include "server/json_text.h"

#include <charconv>
#include <cmath>

namespace xpyd {
namespace {

// Bytes of the well-formed sequence at the front of `text`; 0 where there is none (Unicode, table
// 3-7).
size_t sequence_bytes(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(i < text.size() ? text[i] : 0); };
  auto follows = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  unsigned char c = byte(0);
  if (c < 0x80) return 1;
  if (c >= 0xc2 && c <= 0xdf) return follows(1) ? 2 : 0;
  if (c >= 0xe0 && c <= 0xef) {
    bool first = byte(1) >= (c == 0xe0 ? 0xa0 : 0x80) && byte(1) <= (c == 0xed ? 0x9f : 0xbf);
    return first && follows(2) ? 3 : 0;
  }
  if (c >= 0xf0 && c <= 0xf4) {
    bool first = byte(1) >= (c == 0xf0 ? 0x90 : 0x80) && byte(1) <= (c == 0xf4 ? 0x8f : 0xbf);
    return first && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

void append_quoted(std::string& out, std::string_view text) {
  out += '"';
  while (!text.empty()) {
    size_t n = sequence_bytes(text);
    unsigned char c = static_cast<unsigned char>(text[0]);
    if (n == 0) {
      out += "\xef\xbf\xbd";
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
    text.remove_prefix(n == 0 ? 1 : n);
  }
  out += '"';
}

}  // namespace

std::string json_quote(std::string_view text) {
  std::string out;
  append_quoted(out, text);
  return out;
}

bool is_valid_utf8(std::string_view text) {
  while (!text.empty()) {
    size_t n = sequence_bytes(text);
    if (n == 0) return false;
    text.remove_prefix(n);
  }
  return true;
}

int utf8_length(std::string_view text) {
  int n = 0;
  for (char c : text) n += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return n;
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
