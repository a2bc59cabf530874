// Text <-> token ids, from a Hugging Face tokenizer.json: byte-level BPE (Llama 3, Qwen 2/2.5/3) and
// SentencePiece-style BPE with byte fallback (Llama 2, Mistral).
//
// Thread safety: const; threads may share it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace xpyd::model {

class Tokenizer {
 public:
  // Loads a tokenizer. Errors name the file and the field.
  static Result<std::unique_ptr<const Tokenizer>> load(const std::string& dir);  // DIR/tokenizer.json
  static Result<std::unique_ptr<const Tokenizer>> parse(std::string_view json_text, const std::string& file_name);
  ~Tokenizer();

  // Encodes a text in O(n log n), with BOS and other tokens of the post-processor if `add_special_tokens`. Invalid
  // UTF-8 is read as U+FFFD, as Python's bytes.decode(errors='replace') does. Throws an Error, with file and field, if
  // a regex of tokenizer.json takes more than a quarter of a second plus 1 us a byte.
  std::vector<int32_t> encode(std::string_view text, bool add_special_tokens = true) const;

  // Encodes the parts as one text, so that words and merges reach across their borders. Added tokens do not, and
  // special tokens are parsed only in parts that allow it.
  struct Part {
    std::string_view text;
    bool parse_special_tokens;  // false: special tokens in the text are plain text
  };
  std::vector<int32_t> encode(std::span<const Part> parts, bool add_special_tokens) const;

  // Decodes as Hugging Face's tokenizers does. Unknown ids are left out, and invalid UTF-8 becomes U+FFFD. With byte
  // fallback, a run of byte tokens that is not valid as a whole becomes one U+FFFD per token.
  std::string decode(const std::vector<int32_t>& ids, bool skip_special_tokens = true) const;

  // Bytes of one token inside a text: leading spaces stay, and "<0x41>" is "A". They may be part of a UTF-8 sequence.
  // Empty for an unknown id.
  const std::string& piece(int32_t id) const;
  bool is_special(int32_t id) const;
  // True if decoding removes one leading space from the text's first token (SentencePiece style).
  bool strips_leading_space() const;

  int vocab_size() const;                            // highest id + 1
  int32_t token_id(std::string_view content) const;  // -1: no such token

  struct Impl;

 private:
  Tokenizer();
  friend class Detokenizer;
  std::unique_ptr<Impl> impl_;
};

// Turns a stream of ids into text that is valid UTF-8 at every moment. The results of all feed() calls and of flush()
// concatenate to decode(). Bytes that begin a UTF-8 sequence therefore wait for its rest. With byte fallback a run of
// byte tokens waits for its end, because one bad byte spoils the run.
class Detokenizer {
 public:
  Detokenizer() = default;
  // Requires: the tokenizer outlives this object.
  Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens)
      : tokenizer_(&tokenizer), skip_special_(skip_special_tokens) {}
  // Call before the first feed() if a prompt precedes the stream: nothing is then stripped from the first token.
  void continues_text() { first_ = false; }
  // Returns the text that this id completes; it may be empty. An unknown or skipped id adds nothing.
  std::string feed(int32_t id);
  std::string flush();  // returns the text that still waits

 private:
  std::string end_run();
  std::string stripped(std::string text);

  const Tokenizer* tokenizer_ = nullptr;
  bool skip_special_ = true;
  bool first_ = true;
  std::string pending_;  // byte level: at most 3 bytes; byte fallback: the run of byte tokens
};

// Tokens that end a text in Meta's folders, which name none: those that Meta's code uses and this tokenizer has.
std::vector<int> meta_eos_tokens(const Tokenizer& tokenizer);

}  // namespace xpyd::model
