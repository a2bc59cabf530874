// The regexes of a tokenizer.json, run by libpcre2 with the meaning that Hugging Face's tokenizers gives them. That
// library runs them on Oniguruma, with Ruby's syntax and Unicode 16's classes. What Oniguruma and PCRE2 read
// differently is rewritten (\s, \w, \v, \p{...} with newer characters, {n,m}+) or refused by name (\h, \b, [a&&b],
// ...).
//
// A tokenizer.json is a stranger's, and so is a text: a search has bounded memory, and processor time that is
// proportional to the text beside a constant (Matching).
//
// Thread safety: a Regex is const; each thread its own Matching.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace xpyd::model {

// Oniguruma's regex in PCRE2's syntax. Throws the Error of what is not supported.
std::string pcre2_of(std::string_view oniguruma);
// A regex that matches this text alone.
std::string escaped_regex(std::string_view text);

// What the searches of one text share: memory to match in, and the time that they may take together.
class Matching {
 public:
  explicit Matching(size_t text_bytes);
  ~Matching();

 private:
  friend class Regex;
  struct State;
  std::unique_ptr<State> state_;
};

class Regex {
 public:
  // `where` is its file and field: messages begin with it. Throws the Error of a regex that is wrong or not supported.
  Regex(std::string_view oniguruma, std::string where);
  ~Regex();

  struct Piece {
    size_t begin, end;
    bool match;  // false: what stands between two matches
  };
  // All of `text` (valid UTF-8) as its matches, some of which may be empty, and what is between them, never empty.
  // Throws an Error where they take more time or memory than `matching` has.
  void cut(std::string_view text, Matching& matching, std::vector<Piece>& out) const;

 private:
  // The end of the match that begins at `at`, or npos.
  size_t match_at(std::string_view text, size_t at, Matching& matching) const;

  struct Code;
  std::unique_ptr<Code> code_;
  const std::string where_;
};

}  // namespace xpyd::model
