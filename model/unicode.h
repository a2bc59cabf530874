// Character classes and canonical composition, as Hugging Face's tokenizers has them
// (tools/make-unicode-tables).
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace xpyd::unicode {

bool is_letter(uint32_t code_point);  // \p{L}
bool is_number(uint32_t code_point);  // \p{N}
bool is_space(uint32_t code_point);   // \s, White_Space
bool is_word(uint32_t code_point);    // \w

// Normalization form C of valid UTF-8. O(n log n) in the longest run of combining marks, else O(n).
std::string nfc(std::string_view text);

// The data behind them, sorted for binary search (unicode_tables.cc). Written by
// tools/make-unicode-tables, which also says which versions of Unicode these are and why.
struct Range {
  uint32_t first, last;  // inclusive
};
extern const std::span<const Range> letters;      // \p{L}
extern const std::span<const Range> numbers;      // \p{N}
extern const std::span<const Range> white_space;  // \s
extern const std::span<const Range> word;         // \w

struct ClassRange {
  uint32_t first, last;
  uint8_t combining_class;  // never 0
};
extern const std::span<const ClassRange> combining_classes;

// One step of canonical decomposition, without Hangul, by `composed`.
struct Decomposition {
  uint32_t composed, first, second;  // second = 0: none
  bool composes;                     // again
};
extern const std::span<const Decomposition> decompositions;
// Indices into `decompositions` of the pairs that compose, by (first, second).
extern const std::span<const uint16_t> compositions;

}  // namespace xpyd::unicode
