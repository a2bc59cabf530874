#include "model/unicode.h"

#include "base/utf8.h"
#include "tests/catch.h"

namespace xpyd::testing::unicode_test {

TEST_CASE("unicode: classes at their edges", "[model][unicode]") {
  struct Row {
    uint32_t c;
    bool letter, number, space, word;
  };
  const Row rows[] = {
      {'a', 1, 0, 0, 1},     {'Z', 1, 0, 0, 1},     {'@', 0, 0, 0, 0},     {'[', 0, 0, 0, 0},
      {'`', 0, 0, 0, 0},     {'{', 0, 0, 0, 0},     {'0', 0, 1, 0, 1},     {'9', 0, 1, 0, 1},
      {'/', 0, 0, 0, 0},     {':', 0, 0, 0, 0},     {'_', 0, 0, 0, 1},     {8, 0, 0, 0, 0},
      {9, 0, 0, 1, 0},       {13, 0, 0, 1, 0},      {14, 0, 0, 0, 0},      {0x1c, 0, 0, 0, 0},
      {' ', 0, 0, 1, 0},     {0x85, 0, 0, 1, 0},    {0xa0, 0, 0, 1, 0},    {0xaa, 1, 0, 0, 1},
      {0xb2, 0, 1, 0, 0},    {0x301, 0, 0, 0, 1},   {0x200b, 0, 0, 0, 0},  {0x200c, 0, 0, 0, 1},
      {0x2028, 0, 0, 1, 0},  {0x2160, 0, 1, 0, 1},  {0x24b6, 0, 0, 0, 1},  {0x24ea, 0, 1, 0, 0},
      {0x3000, 0, 0, 1, 0},  {0x3007, 0, 1, 0, 1},  {0x4e00, 1, 0, 0, 1},  {0x9fff, 1, 0, 0, 1},
      {0xd7a3, 1, 0, 0, 1},  {0xfeff, 0, 0, 0, 0},  {0x105c0, 1, 0, 0, 1}, {0x1d7ff, 0, 1, 0, 1},
      {0x1f600, 0, 0, 0, 0}, {0x323af, 1, 0, 0, 1}, {0x323b0, 0, 0, 0, 0}, {0x10ffff, 0, 0, 0, 0},
  };
  for (const Row& row : rows) {
    INFO(row.c);
    CHECK(unicode::is_letter(row.c) == row.letter);
    CHECK(unicode::is_number(row.c) == row.number);
    CHECK(unicode::is_space(row.c) == row.space);
    CHECK(unicode::is_word(row.c) == row.word);
  }
  // Unicode 16.0's sizes.
  size_t letters = 0, numbers = 0, spaces = 0;
  for (uint32_t c = 0; c < 0x110000; ++c) {
    letters += unicode::is_letter(c);
    numbers += unicode::is_number(c);
    spaces += unicode::is_space(c);
  }
  CHECK(letters == 141028);
  CHECK(numbers == 1911);
  CHECK(spaces == 25);
}

TEST_CASE("unicode: normalization form C", "[model][unicode]") {
  const struct {
    std::u32string from, to;
  } cases[] = {
      {U"", U""},
      {U"plain \u00e9", U"plain \u00e9"},
      {U"e\u0301", U"\u00e9"},
      {U"\u212b\u2126", U"\u00c5\u03a9"},
      {U"s\u0323\u0307", U"\u1e69"},
      {U"s\u0307\u0323", U"\u1e69"},         // reordered by class first
      {U"q\u0307\u0323", U"q\u0323\u0307"},  // reordered, nothing to compose
      {U"a\u0345\u0301", U"\u00e1\u0345"},   // class 240 does not block class 230
      {U"a\u0305\u0301", U"a\u0305\u0301"},  // an equal class blocks
      {U"\u0301e", U"\u0301e"},              // no starter before it
      {U"\u0344", U"\u0308\u0301"},          // decomposes, excluded from composing
      {U"\u0958", U"\u0915\u093c"},          // a composition exclusion
      {U"\u1100\u1161", U"\uac00"},          // Hangul
      {U"\u1100\u1161\u11a8", U"\uac01"},
      {U"\uac00\u11a8", U"\uac01"},
      {U"\uac01\u11a8", U"\uac01\u11a8"},
      {U"\u1100\u1161\u11a7", U"\uac00\u11a7"},  // U+11A7 is no trailing consonant
      {U"\uf900", U"\u8c48"},
      {U"\u0cc6\u0cc2\u0cd5", U"\u0ccb"},  // twice
      {U"\U0001d15e", U"\U0001d157\U0001d165"},
      {U"\U00011935\U00011930", U"\U00011935\U00011930"},  // composes since Unicode 13 only
  };
  auto utf8 = [](const std::u32string& text) {
    std::string out;
    for (char32_t c : text) append_utf8(out, c);
    return out;
  };
  for (auto& [from, to] : cases) {
    INFO(utf8(from));
    CHECK(unicode::nfc(utf8(from)) == utf8(to));
    CHECK(unicode::nfc(utf8(to)) == utf8(to));
  }
  // One run of many marks is sorted, not bubbled.
  std::string marks = "a";
  for (int i = 0; i < 100000; ++i) marks += i % 2 ? "\u0323" : "\u0301";
  std::string sorted = unicode::nfc(marks);  // U+1EA1 is as long as a and U+0323
  CHECK(sorted.size() == marks.size());
  CHECK(sorted.starts_with("\u1ea1\u0323\u0323"));
  CHECK(sorted.ends_with("\u0301\u0301"));
}

}  // namespace xpyd::testing::unicode_test
