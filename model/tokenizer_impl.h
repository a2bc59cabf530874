// What a Tokenizer holds: filled by tokenizer_load.cc, read by tokenizer.cc.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/pretokenize.h"
#include "model/tokenizer.h"
#include "model/tokenizer_added.h"
#include "model/tokenizer_bpe.h"

namespace xpyd {

// Bounds on what a tokenizer.json may ask for; the largest published ones stay below a third of
// each. With these, loading takes at most about 120 bytes for each JSON value plus 200 MB.
inline constexpr size_t kMaxTokenizerBytes = size_t{128} << 20;
inline constexpr size_t kMaxTokenizerValues = size_t{4} << 20;
inline constexpr int64_t kMaxTokenId = (int64_t{1} << 20) - 1;
inline constexpr size_t kMaxAddedTokens = size_t{1} << 17;
inline constexpr size_t kMaxAddedTokenBytes = 1024;
inline constexpr size_t kMaxSteps = 16;  // of a normalizer, pre-tokenizer, decoder, post-processor

struct Tokenizer::Impl {
  struct Token {
    std::string content;      // as in tokenizer.json
    std::string piece;        // its bytes in decoded text
    std::string first_piece;  // the same at the text's beginning, where Decoder::strip_first_token
    bool known = false;       // false: a hole among the ids
    bool special = false;
    bool is_byte = false;  // "<0x41>", and the decoder has byte fallback
  };
  std::vector<Token> tokens;  // by id; does not grow once by_content and bpe.ids look into it
  std::unordered_map<std::string_view, int32_t> by_content;
  std::deque<std::string> keys;  // of bpe.ids, where it is no token's piece or content

  AddedTokens added;             // looked for in the text as it is
  AddedTokens added_normalized;  // and between those in normalized text
  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer;
  Bpe bpe;
  std::vector<int32_t> prefix, suffix;  // what the post-processor adds

  struct Decoder {
    bool byte_level = false;  // pieces are bytes of one stream; else each is text of its own
    bool byte_fallback = false;
    bool strip_space = false;  // one space from the beginning of the text
    // The first token loses every replacement character: Metaspace's decoder.
    bool strip_first_token = false;
    std::string replacement;
  } decoder;

  std::vector<int32_t> encode(std::string_view text, const std::vector<AddedTokens::Part>& parts,
                              bool add_special_tokens) const;
  // Text between added tokens. `parts` covers it.
  void encode_segment(std::string_view text, const std::vector<AddedTokens::Part>& parts, bool at_start,
                      Bpe::Workspace& space, std::vector<int32_t>& out) const;
};

// Fills `out` from a tokenizer.json; messages begin with `file`.
Status load_tokenizer(std::string_view json_text, const std::string& file, Tokenizer::Impl& out);

}  // namespace xpyd
