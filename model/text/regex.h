// The regexes of a tokenizer.json, run by libpcre2. Hugging Face's tokenizers runs them by Oniguruma; the two agree on
// the regexes of the served models, except for U+180E and for characters newer than PCRE2's table of Unicode.
//
// Thread safety: const.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace xpyd::model {

class Regex {
 public:
  // `where` is the regex's file and field; messages begin with it. Throws an Error for a wrong regex.
  Regex(std::string_view pattern, std::string where);
  ~Regex();

  struct Piece {
    size_t begin, end;
    bool match;  // false: text between two matches
  };
  // Cuts all of `text` (valid UTF-8) into its matches, which may be empty, and the text between them, which is never
  // empty. Throws an Error if a match takes more steps than the limit, which grows with the text.
  void cut(std::string_view text, std::vector<Piece>& out) const;

 private:
  // Returns the end of the match that begins at `at`, or npos.
  size_t match_at(std::string_view text, size_t at) const;

  struct Code;
  std::unique_ptr<Code> code_;
  const std::string where_;
};

}  // namespace xpyd::model
