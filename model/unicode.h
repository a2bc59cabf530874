// Canonical composition that agrees with Hugging Face's tokenizers, so that token ids agree: Unicode 9.0, as in its NFC
// crate.
//
// Thread safety: plain functions.
#pragma once

#include <string>
#include <string_view>

namespace xpyd::model::unicode {

// Normalization form C of valid UTF-8. Takes O(n log n) in the longest run of combining marks, else O(n).
std::string nfc(std::string_view text);

}  // namespace xpyd::model::unicode
