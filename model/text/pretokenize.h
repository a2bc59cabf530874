// Text before BPE: the normalizer, then the pre-tokenizer, in the order of tokenizer.json.
//
// Thread safety: const objects and plain functions.
#pragma once

#include <deque>
#include <memory>
#include <optional>
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
// Applies the steps to valid UTF-8. `begins`: the text starts a document, so a step may prepend to it.
std::string normalize(const std::vector<NormalizerStep>& steps, std::string_view text, bool begins = true);

// What a split does with a match, by Hugging Face's SplitDelimiterBehavior: makes it a word, drops it, joins it to the
// word before, joins it to the word after, or joins adjacent matches to one word.
enum class SplitBehavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };
std::optional<SplitBehavior> find_split_behavior(std::string_view name);  // "MergedWithNext"

struct PreTokenizerStep {
  enum class Kind { split, add_space, metaspace } kind;
  // For split:
  std::shared_ptr<const Regex> regex = nullptr;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;  // the text between matches counts as the match
  // For metaspace: the replacement of spaces, and whether a text that does not begin with it gets it prepended.
  std::string replacement = {};
  enum class Prepend { always, first, never } prepend = Prepend::always;
  bool split_words = true;  // cut before each replacement
};

// Words, as views of the text or of strings made on the way.
struct Words {
  std::vector<std::string_view> views;
  std::deque<std::string> owned;
};
// Cuts a text into words. at_start: no text or token precedes this text. Throws an Error if a regex takes more time or
// memory than `matching` has.
void pre_tokenize(const std::vector<PreTokenizerStep>& steps, std::string_view text, bool at_start, Matching& matching,
                  Words& out);

void replace_all(std::string& text, std::string_view pattern, std::string_view content);

}  // namespace xpyd::model
