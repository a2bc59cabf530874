// Unicode data for the tokenizer, sorted for binary search. Written by tools/make-unicode-tables,
// which also says which versions of Unicode these are and why.
#pragma once

#include <cstdint>
#include <span>

namespace xpyd::unicode {

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
