// Text before BPE: the normalizer, then the pre-tokenizer, in the order of tokenizer.json.
//
// Thread safety: const objects and plain functions.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/text/regex.h"

namespace xpyd::model {

struct NormalizerStep {
  enum class Kind { prepend, replace, nfc } kind;
  std::string pattern;  // replace: never empty
  std::string content;  // prepend, replace
};
// Applies the steps to valid UTF-8.
std::string normalize(const std::vector<NormalizerStep>& steps, std::string_view text);

struct PreTokenizerStep {
  enum class Kind { split, add_space, metaspace } kind;
  std::shared_ptr<const Regex> regex = nullptr;  // for split: matches and the text between them are words
  // For metaspace: the replacement of spaces, and whether a text that does not begin with it gets it prepended.
  std::string replacement = {};
  enum class Prepend { always, first, never } prepend = Prepend::always;
};

// Words, as views of the text or of strings made on the way.
struct Words {
  std::vector<std::string_view> views;
  std::deque<std::string> owned;
};
// Cuts a text into words. at_start: no text or token precedes this text. Throws an Error if a regex takes too long.
void pre_tokenize(const std::vector<PreTokenizerStep>& steps, std::string_view text, bool at_start, Words& out);

void replace_all(std::string& text, std::string_view pattern, std::string_view content);

}  // namespace xpyd::model
