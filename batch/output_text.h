// OutputText turns one choice's tokens into text that is final: valid UTF-8, without a part of a stop string that may
// still complete. It decides whether a token ends the choice. It is a plain value and moves from the prefill to the
// decode instance with its sequence.
#pragma once

#include <string>
#include <vector>

#include "batch/request.h"
#include "model/text/tokenizer.h"

namespace xpyd::batch {

class OutputText {
 public:
  OutputText() = default;
  // `tokenizer` may be null (a run without text). Then all text is empty and stop strings never match.
  OutputText(const Tokenizer* tokenizer, const Request& request);

  struct Piece {
    std::string text;
    const std::string* stop = nullptr;  // the request's stop string that ended the text; null: none did
  };
  // Returns the text that `token` makes final.
  Piece feed(int32_t token, const Request& request);
  // Fills the text that event.token makes final. If the token ends the choice, fills the reason: EOS, a stop token, a
  // stop string or max_tokens. `n_output`: output tokens, this one included.
  void set_text_and_end(TokenEvent& event, const Request& request, const std::vector<int>& eos_tokens, int n_output);
  std::string flush();  // text held back so far; call it once at the end, unless a stop string ended the text

 private:
  const Tokenizer* tokenizer_ = nullptr;
  Detokenizer detokenizer_;
  std::string held_;  // text that may be the start of a stop string
};

}  // namespace xpyd::batch
