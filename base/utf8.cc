#include "base/utf8.h"

#include <algorithm>

namespace xpyd {

CodePoint next_code_point(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1, true, false};
  int length = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (length == 0) return {0xfffd, 1, false, false};
  // The second byte's range keeps out overlong forms, surrogates and what is above U+10FFFF.
  uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  uint32_t value = lead & (0x7f >> length);
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) == text.size()) return {0xfffd, i, false, true};
    if (byte(i) < low || byte(i) > high) return {0xfffd, i, false, false};
    value = value << 6 | (byte(i) & 0x3f);
    low = 0x80, high = 0xbf;
  }
  return {value, length, true, false};
}

void append_utf8(std::string& out, uint32_t c) {
  auto push = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    push(c);
  } else if (c < 0x800) {
    push(0xc0 | c >> 6), push(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    push(0xe0 | c >> 12), push(0x80 | (c >> 6 & 0x3f)), push(0x80 | (c & 0x3f));
  } else {
    push(0xf0 | c >> 18), push(0x80 | (c >> 12 & 0x3f)), push(0x80 | (c >> 6 & 0x3f));
    push(0x80 | (c & 0x3f));
  }
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    CodePoint c = next_code_point(text);
    if (!c.valid) return false;
    text.remove_prefix(c.bytes);
  }
  return true;
}

size_t count_code_points(std::string_view text) {
  return size_t(std::count_if(text.begin(), text.end(), [](char c) { return (uint8_t(c) & 0xc0) != 0x80; }));
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    CodePoint c = next_code_point(text);
    out.append(c.valid ? text.substr(0, c.bytes) : kReplacementCharacter);
    text.remove_prefix(c.bytes);
  }
  return out;
}

std::string printable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const CodePoint c = next_code_point(text);
    const bool control = c.value < 0x20 || (c.value >= 0x7f && c.value < 0xa0);
    append_utf8(out, control ? '?' : c.value);
    text.remove_prefix(size_t(c.bytes));
  }
  return out;
}

size_t unfinished_utf8_suffix(std::string_view text) {
  for (size_t n = 1; n <= std::min<size_t>(3, text.size()); ++n) {
    CodePoint c = next_code_point(text.substr(text.size() - n));
    if (c.unfinished && static_cast<size_t>(c.bytes) == n) return n;
  }
  return 0;
}

}  // namespace xpyd
