// What happens to text before BPE: normalizer, then pre-tokenizer, as tokenizer.json lists them.
//
// Thread safety: const objects and plain functions.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace xpyd::model {

struct NormalizerStep {
  enum class Kind { prepend, replace, nfc } kind;
  std::string pattern;  // replace: never empty
  std::string content;  // prepend, replace
};
// Valid UTF-8 in and out. `begins`: the text is not the rest of a longer one, so it may be prepended to.
std::string normalize(const std::vector<NormalizerStep>& steps, std::string_view text, bool begins = true);

// The regexes that real models split by, recognised by their exact text. A hand-written scanner
// stands in for each: it is linear, and std::regex knows neither \p nor bounded recursion.
enum class SplitPattern { gpt2, llama3, qwen2 };
std::optional<SplitPattern> find_split_pattern(std::string_view regex);
extern const char* const kKnownSplitPatterns;  // their names, for messages

// Cuts all of `text` (valid UTF-8) into the regex's matches; appends to `out`.
void split_text(SplitPattern pattern, std::string_view text, std::vector<std::string_view>& out);

struct PreTokenizerStep {
  enum class Kind { split, add_space, metaspace } kind;
  SplitPattern pattern = SplitPattern::gpt2;  // split
  // metaspace: what spaces become, and whether it is put before a text that does not begin with it.
  std::string replacement;
  enum class Prepend { always, first, never } prepend = Prepend::always;
  bool split_words = true;  // cut before each replacement
};

// Words, as views of the text or of strings made on the way.
struct Words {
  std::vector<std::string_view> views;
  std::deque<std::string> owned;
};
// at_start: no text and no token comes before this one.
void pre_tokenize(const std::vector<PreTokenizerStep>& steps, std::string_view text, bool at_start, Words& out);

void replace_all(std::string& text, std::string_view pattern, std::string_view content);

}  // namespace xpyd::model
