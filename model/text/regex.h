// The regexes of a tokenizer.json, run by libpcre2 with the meaning that Hugging Face's tokenizers gives them. That
// library uses Oniguruma, with Ruby's syntax and Unicode 16's classes. Constructs that PCRE2 reads differently are
// rewritten (\s, \w, \v, \p{...} with newer characters, {n,m}+) or refused by name (\h, \b, [a&&b], ...).
//
// tokenizer.json and text are untrusted. All searches of one text have bounded memory, and processor time of 0.25 s
// plus 1 us a byte (Matching).
//
// Thread safety: a Regex is const; each thread has its own Matching.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace xpyd::model {

// Translates Oniguruma's syntax to PCRE2's. Throws an Error that names the first unsupported construct.
std::string pcre2_of(std::string_view oniguruma);
// Returns a regex that matches this text only.
std::string escaped_regex(std::string_view text);

// Memory and time that the searches of one text share.
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
  // `where` is the regex's file and field; messages begin with it. Throws an Error for a wrong or unsupported regex.
  Regex(std::string_view oniguruma, std::string where);
  ~Regex();

  struct Piece {
    size_t begin, end;
    bool match;  // false: text between two matches
  };
  // Cuts all of `text` (valid UTF-8) into its matches, which may be empty, and the text between them, which is never
  // empty. Throws an Error if that takes more time or memory than `matching` has.
  void cut(std::string_view text, Matching& matching, std::vector<Piece>& out) const;

 private:
  // Returns the end of the match that begins at `at`, or npos.
  size_t match_at(std::string_view text, size_t at, Matching& matching) const;

  struct Code;
  std::unique_ptr<Code> code_;
  const std::string where_;
};

}  // namespace xpyd::model
