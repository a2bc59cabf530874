// Uses libutf8proc, with Unicode 15.0 or later. This file adds newer characters to the classes and removes characters
// newer than 9.0 from normalization. Unicode's stability policy allows both: assigned characters do not change.
#include "model/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "base/utf8.h"

namespace xpyd::model::unicode {
namespace {

struct Range {
  uint32_t first, last;  // inclusive
};
template <size_t n>
bool among(const Range (&sorted)[n], uint32_t c) {
  const Range* at = std::lower_bound(sorted, sorted + n, c,
                                     [](const Range& r, uint32_t value) { return r.last < value; });
  return at != sorted + n && at->first <= c;
}

// Characters of Unicode 15.1 and 16.0; the numbers are decimal digits.
constexpr Range kNewLetters[] = {
    {0x1c89, 0x1c8a},   {0xa7cb, 0xa7cd},   {0xa7da, 0xa7dc},   {0x105c0, 0x105f3}, {0x10d4a, 0x10d65},
    {0x10d6f, 0x10d85}, {0x10ec2, 0x10ec4}, {0x11380, 0x11389}, {0x1138b, 0x1138b}, {0x1138e, 0x1138e},
    {0x11390, 0x113b5}, {0x113b7, 0x113b7}, {0x113d1, 0x113d1}, {0x113d3, 0x113d3}, {0x11bc0, 0x11be0},
    {0x13460, 0x143fa}, {0x16100, 0x1611d}, {0x16d40, 0x16d6c}, {0x18cff, 0x18cff}, {0x1e5d0, 0x1e5ed},
    {0x1e5f0, 0x1e5f0}, {0x2ebf0, 0x2ee5d},
};
constexpr Range kNewNumbers[] = {
    {0x10d40, 0x10d49}, {0x116d0, 0x116e3}, {0x11bf0, 0x11bf9}, {0x16130, 0x16139},
    {0x16d70, 0x16d79}, {0x1ccf0, 0x1ccf9}, {0x1e5f1, 0x1e5fa},
};
constexpr Range kNewMarks[] = {
    {0x0897, 0x0897},   {0x10d69, 0x10d6d}, {0x10efc, 0x10efc}, {0x113b8, 0x113c0}, {0x113c2, 0x113c2},
    {0x113c5, 0x113c5}, {0x113c7, 0x113ca}, {0x113cc, 0x113d0}, {0x113d2, 0x113d2}, {0x113e1, 0x113e2},
    {0x11f5a, 0x11f5a}, {0x1611e, 0x1612f}, {0x1e5ee, 0x1e5ef},
};
// Characters added between 9.0 and 15.0 that have a combining class or take part in a decomposition. U+11A7 is here
// because utf8proc mistakes it for a trailing consonant.
constexpr Range kNotNormalized[] = {
    {0x07fd, 0x07fd},   {0x0898, 0x089f},   {0x08ca, 0x08d3},   {0x09fe, 0x09fe},   {0x0c3c, 0x0c3c},
    {0x0d3b, 0x0d3c},   {0x0eba, 0x0eba},   {0x11a7, 0x11a7},   {0x1715, 0x1715},   {0x1abf, 0x1ace},
    {0x1df6, 0x1dfa},   {0xa82c, 0xa82c},   {0x10d24, 0x10d27}, {0x10eab, 0x10eac}, {0x10efd, 0x10eff},
    {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b}, {0x1145e, 0x1145e},
    {0x11839, 0x1183a}, {0x11930, 0x11930}, {0x11938, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943},
    {0x119e0, 0x119e0}, {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42},
    {0x11d44, 0x11d45}, {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x16ff0, 0x16ff1}, {0x1e08f, 0x1e08f},
    {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef},
};

bool between(uint32_t c, utf8proc_category_t first, utf8proc_category_t last) {
  const utf8proc_category_t category = utf8proc_category(utf8proc_int32_t(c));
  return first <= category && category <= last;
}

int combining_class(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

// Canonical order: sorts each run of marks stably by combining class. (utf8proc takes quadratic time.)
void order_marks(std::vector<utf8proc_int32_t>& text) {
  auto starter = [](utf8proc_int32_t c) { return combining_class(c) == 0; };
  for (auto at = text.begin(); at != text.end();) {
    auto first = std::find_if_not(at, text.end(), starter);
    at = std::find_if(first, text.end(), starter);
    std::stable_sort(first, at, [](auto a, auto b) { return combining_class(a) < combining_class(b); });
  }
}

}  // namespace

bool is_letter(uint32_t c) {
  if (c < 0x80) return (c | 0x20) - 'a' < 26;
  return between(c, UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LO) || among(kNewLetters, c);
}
bool is_number(uint32_t c) {
  if (c < 0x80) return c - '0' < 10;
  return between(c, UTF8PROC_CATEGORY_ND, UTF8PROC_CATEGORY_NO) || among(kNewNumbers, c);
}
bool is_space(uint32_t c) {
  if (c < 0x80) return c == ' ' || c - '\t' < 5;
  return c == 0x85 || between(c, UTF8PROC_CATEGORY_ZS, UTF8PROC_CATEGORY_ZP);
}
// A regex's \w: Alphabetic, marks, decimal digits, connectors and joiners. The circled and squared Latin letters are
// the part of Other_Alphabetic that is not marks.
bool is_word(uint32_t c) {
  static constexpr Range kOthers[] = {
      {0x200c, 0x200d}, {0x24b6, 0x24e9}, {0x1f130, 0x1f149}, {0x1f150, 0x1f169}, {0x1f170, 0x1f189}};
  return between(c, UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_NL) ||
         between(c, UTF8PROC_CATEGORY_PC, UTF8PROC_CATEGORY_PC) || among(kOthers, c) || among(kNewLetters, c) ||
         among(kNewNumbers, c) || among(kNewMarks, c);
}

size_t end_of_run(std::string_view text, size_t at, bool (*is)(uint32_t), size_t most) {
  for (; most > 0 && at < text.size(); --most) {
    const CodePoint c = next_code_point(text.substr(at));
    if (!is(c.value)) break;
    at += size_t(c.bytes);
  }
  return at;
}

size_t begin_of_run(std::string_view text, size_t at, bool (*is)(uint32_t), size_t most) {
  for (; most > 0 && at > 0; --most) {
    size_t begin = at - 1;
    while (begin > 0 && (uint8_t(text[begin]) & 0xc0) == 0x80) --begin;
    if (!is(next_code_point(text.substr(begin)).value)) break;
    at = begin;
  }
  return at;
}

std::string nfc(std::string_view text) {
  // Form C neither composes nor decomposes characters below U+0300.
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 0xcc; }))
    return std::string(text);
  std::string result;
  result.reserve(text.size());
  std::vector<utf8proc_int32_t> run;  // decomposed
  auto end_run = [&] {
    order_marks(run);
    run.resize(size_t(utf8proc_normalize_utf32(run.data(), utf8proc_ssize_t(run.size()),
                                               utf8proc_option_t(UTF8PROC_COMPOSE | UTF8PROC_STABLE))));
    for (utf8proc_int32_t c : run) append_utf8(result, uint32_t(c));
    run.clear();
  };
  for (std::string_view rest = text; !rest.empty();) {
    const CodePoint c = next_code_point(rest);
    rest.remove_prefix(size_t(c.bytes));
    if (c.value < 0xc0) {
      run.push_back(utf8proc_int32_t(c.value));
      continue;
    }
    // A starter that composes with nothing separates the characters before and after it.
    if (among(kNotNormalized, c.value) || among(kNewLetters, c.value) || among(kNewMarks, c.value)) {
      end_run();
      append_utf8(result, c.value);
      continue;
    }
    utf8proc_int32_t parts[8];
    const auto n = utf8proc_decompose_char(utf8proc_int32_t(c.value), parts, 8, UTF8PROC_DECOMPOSE, nullptr);
    run.insert(run.end(), parts, parts + n);
  }
  end_run();
  return result;
}

}  // namespace xpyd::model::unicode
