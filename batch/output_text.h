// One choice's tokens -> text that is certain: valid UTF-8, and no part of a stop string that may
// be forming. A plain value: it moves from the prefill to the decode instance with its sequence.
#pragma once

#include <string>

#include "batch/request.h"
#include "model/text/tokenizer.h"

namespace xpyd::batch {

class OutputText {
 public:
  OutputText() = default;
  // `tokenizer` may be null (a run without text): then all text is empty and stop strings never match.
  OutputText(const Tokenizer* tokenizer, const Request& request);

  struct Piece {
    std::string text;
    const std::string* stop = nullptr;  // the stop string (of the request) that ended the text
  };
  // `may_stop` false: stop strings pass as text (min_tokens not reached).
  Piece feed(int32_t token, const Request& request, bool may_stop);
  std::string flush();  // what was held back; call once, at the end, unless a stop string ended the text

 private:
  const Tokenizer* tokenizer_ = nullptr;
  Detokenizer detokenizer_;
  std::string held_;  // text that may be the beginning of a stop string
};

}  // namespace xpyd::batch
