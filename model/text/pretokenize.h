// What happens to text before BPE: normalizer, then pre-tokenizer, as tokenizer.json lists them.
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
// Valid UTF-8 in and out. `begins`: the text is not the rest of a longer one, so it may be prepended to.
std::string normalize(const std::vector<NormalizerStep>& steps, std::string_view text, bool begins = true);

// What becomes of a split's matches, by Hugging Face's names (SplitDelimiterBehavior): each a word of its own; left
// out; an end of the word before it; a begin of the one after it; with matches beside it one word.
enum class SplitBehavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };
std::optional<SplitBehavior> find_split_behavior(std::string_view name);  // "MergedWithNext"

struct PreTokenizerStep {
  enum class Kind { split, add_space, metaspace } kind;
  // split
  std::shared_ptr<const Regex> regex = nullptr;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;  // what stands between matches is the match
  // metaspace: what spaces become, and whether it is put before a text that does not begin with it.
  std::string replacement = {};
  enum class Prepend { always, first, never } prepend = Prepend::always;
  bool split_words = true;  // cut before each replacement
};

// Words, as views of the text or of strings made on the way.
struct Words {
  std::vector<std::string_view> views;
  std::deque<std::string> owned;
};
// at_start: no text and no token comes before this one. Throws an Error where a regex takes more than `matching` has.
void pre_tokenize(const std::vector<PreTokenizerStep>& steps, std::string_view text, bool at_start, Matching& matching,
                  Words& out);

void replace_all(std::string& text, std::string_view pattern, std::string_view content);

}  // namespace xpyd::model
