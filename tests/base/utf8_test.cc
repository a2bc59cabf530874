#include "base/utf8.h"

#include "tests/catch.h"

namespace xpyd::testing::utf8_test {

TEST_CASE("utf8: every code point comes back", "[base]") {
  int wrong = 0;
  for (uint32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xd800 && c < 0xe000) continue;
    std::string text;
    append_utf8(text, c);
    CodePoint got = next_code_point(text);
    wrong += !(got.valid && got.value == c && got.bytes == int(text.size()));
    for (size_t n = 1; n < text.size(); ++n) {  // and its beginnings are unfinished
      got = next_code_point(text.substr(0, n));
      wrong += !(got.unfinished && !got.valid && got.bytes == int(n));
      wrong += unfinished_utf8_suffix("x" + text.substr(0, n)) != n;
    }
    wrong += unfinished_utf8_suffix(text) != 0;
  }
  CHECK(wrong == 0);
}

TEST_CASE("utf8: bad sequences are replaced as Python replaces them", "[base]") {
  const std::string r(kReplacementCharacter);
  const struct {
    std::string bytes, replaced;
  } cases[] = {
      {"", ""},
      {"a\xffz", "a" + r + "z"},
      {"\xc0\x80", r + r},
      {"\xe2\x82", r},
      {"\xe2\x82x", r + "x"},
      {"\xed\xa0\x80", r + r + r},
      {"\xe0\x8f\x8f", r + r + r},
      {"\xf0\x80\x80\x80", r + r + r + r},
      {"\xf0\x9f\x98\xf0\x9f\x98\x80", r + "\U0001f600"},
      {"\xf4\x90\x80\x80", r + r + r + r},
      {"\xf8\x88\x80\x80", r + r + r + r},
      {"\xc3\xc3\xa9", r + "\u00e9"},
  };
  for (auto& [bytes, replaced] : cases) {
    INFO(replaced);
    CHECK(replace_invalid_utf8(bytes) == replaced);
    CHECK(is_utf8(replaced));
    CHECK(is_utf8(bytes) == (bytes == replaced));
  }
  CHECK(unfinished_utf8_suffix("\x80\x80") == 0);
  CHECK(unfinished_utf8_suffix("\xed\xa0") == 0);  // a surrogate: nothing finishes it
  CHECK(unfinished_utf8_suffix("\xf0\x9f\x98\xf0\x9f") == 2);
}

}  // namespace xpyd::testing::utf8_test
