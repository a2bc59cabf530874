// UTF-8, strict: no overlong forms, no surrogates, nothing above U+10FFFF.
//
// Thread safety: plain functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace xpyd {

inline constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";  // U+FFFD

struct CodePoint {
  uint32_t value;  // U+FFFD if the bytes are not UTF-8
  int bytes;       // >= 1; for a bad sequence its longest part that begins a good one, or 1
  bool valid;
  bool unfinished;  // not valid, but only because the text ends here
};
CodePoint next_code_point(std::string_view text);  // requires a text that is not empty

void append_utf8(std::string& out, uint32_t code_point);
bool is_utf8(std::string_view text);
size_t count_code_points(std::string_view text);  // requires UTF-8

// Replaces each bad sequence, as next_code_point() delimits it, by one U+FFFD, as Python's errors='replace', Rust's
// from_utf8_lossy and browsers do.
std::string replace_invalid_utf8(std::string_view text);

// Makes a text from outside safe for a terminal: valid UTF-8, with a '?' for each control character.
std::string printable(std::string_view text);

// The number of bytes at the end (0 to 3) that begin a sequence which more bytes could finish.
size_t unfinished_utf8_suffix(std::string_view text);

}  // namespace xpyd
