// Character classes and canonical composition that agree with Hugging Face's tokenizers, so that token ids agree.
// Classes are Unicode 16.0 (its regex engine); normalization is Unicode 9.0 (its NFC crate).
//
// Thread safety: plain functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace xpyd::model::unicode {

bool is_letter(uint32_t code_point);  // \p{L}
bool is_number(uint32_t code_point);  // \p{N}
bool is_space(uint32_t code_point);   // \s, White_Space
bool is_word(uint32_t code_point);    // \w

// A run is at most `most` consecutive characters for which `is` holds. end_of_run() returns the end of the run that
// begins at `at`; begin_of_run() returns the start of the run that ends there.
size_t end_of_run(std::string_view text, size_t at, bool (*is)(uint32_t), size_t most = SIZE_MAX);
size_t begin_of_run(std::string_view text, size_t at, bool (*is)(uint32_t), size_t most = SIZE_MAX);

// Normalization form C of valid UTF-8. Takes O(n log n) in the longest run of combining marks, else O(n).
std::string nfc(std::string_view text);

}  // namespace xpyd::model::unicode
