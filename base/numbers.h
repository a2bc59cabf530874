// Numbers to text and back.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace xpyd {

// Returns true, and sets `value`, if the whole text is one number.
template <class T, class... Base>
bool read_number(std::string_view text, T& value, Base... base) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base...);
  return error == std::errc() && end == text.data() + text.size();
}

// Hexadecimal, padded with zeros to `digits` digits.
inline std::string hex(uint64_t value, int digits = 16) {
  char text[20];
  std::snprintf(text, sizeof text, "%0*llx", digits, static_cast<unsigned long long>(value));
  return text;
}

}  // namespace xpyd
