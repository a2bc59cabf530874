// The steps around the model in a tokenizer.json: normalizer, pre-tokenizer, decoder,
// post-processor. Each is one object with a "type", or a "Sequence" of them. What is not supported
// is an error.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "model/tokenizer_impl.h"

namespace xpyd {

// The file that messages begin with.
struct TokenizerFile {
  std::string name;
  std::string at(const std::string& field) const { return name + ": " + field; }
  Error bad(const std::string& field, const std::string& why) const {
    return invalid(name + ": " + (field.empty() ? "" : "field \"" + field + "\": ") + why);
  }
};

// For messages: JSON's quotes and escapes, shortened.
std::string in_quotes(std::string_view text);

#define RETURN_IF_ERROR(status_expression) \
  do {                                     \
    Status status_ = (status_expression);  \
    if (!status_.ok()) return status_;     \
  } while (0)

// `root` may be nullptr: the field is missing or null.
Status read_normalizer(const TokenizerFile& file, const nlohmann::json* root, std::vector<NormalizerStep>& out);

// byte_level: words are bytes (ByteLevel's characters are not made, see Bpe::byte_level).
Status read_pre_tokenizer(const TokenizerFile& file, const nlohmann::json* root, std::vector<PreTokenizerStep>& out,
                          bool& byte_level);

// What the decoder replaces in every token.
using Replaces = std::vector<std::pair<std::string, std::string>>;
Status read_decoder(const TokenizerFile& file, const nlohmann::json* root, bool byte_level,
                    Tokenizer::Impl::Decoder& out, Replaces& replaces);

// Fills in out.prefix and out.suffix; out.tokens is complete.
Status read_post_processor(const TokenizerFile& file, const nlohmann::json* root, Tokenizer::Impl& out);

}  // namespace xpyd
