// Text <-> token ids, from a Hugging Face tokenizer.json: byte-level BPE (Llama 3, Qwen 2/2.5/3) and
// SentencePiece-style BPE with byte fallback (Llama 2, Mistral).
//
// Thread safety: all const; share one among threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace xpyd {

class Tokenizer {
 public:
  static Result<std::unique_ptr<const Tokenizer>> load(const std::string& dir);  // DIR/tokenizer.json
  static Result<std::unique_ptr<const Tokenizer>> parse(std::string_view json_text,
                                                        const std::string& file_name);
  ~Tokenizer();

  struct EncodeOptions {
    bool add_special_tokens = true;   // what the post-processor adds: BOS
    bool parse_special_tokens = true; // false: added special tokens in the text are plain text
  };
  // Never fails: invalid UTF-8 is read as U+FFFD, as Hugging Face's Python binding would have it.
  std::vector<int32_t> encode(std::string_view text, EncodeOptions options) const;
  std::vector<int32_t> encode(std::string_view text) const { return encode(text, EncodeOptions()); }

  // The whole text; ends that are half a UTF-8 sequence become U+FFFD.
  std::string decode(const std::vector<int32_t>& ids, bool skip_special_tokens = true) const;

  // Bytes of one token as it stands inside a text (no strip of a leading space; "<0x41>" is "A"). Bytes may
  // be part of a UTF-8 sequence. A special token gives its own content.
  const std::string& piece(int32_t id) const;
  bool is_special(int32_t id) const;
  // Decoding removes one leading space from the first token of a text (SentencePiece style).
  bool strips_leading_space() const;

  int vocab_size() const;              // highest id + 1
  int32_t token_id(std::string_view content) const;  // -1: no such token

 private:
  Tokenizer();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Turns a stream of ids into text that is valid UTF-8 at every moment: bytes that begin a sequence wait for
// its rest. Text of feed()s and the final flush() together equal decode().
class Detokenizer {
 public:
  Detokenizer() = default;
  Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens)
      : tokenizer_(&tokenizer), skip_special_(skip_special_tokens) {}
  // A prompt precedes the stream: then nothing is stripped from the first token.
  void continues_text() { first_ = false; }
  std::string feed(int32_t id);
  std::string flush();  // U+FFFD for an unfinished sequence

 private:
  const Tokenizer* tokenizer_ = nullptr;
  bool skip_special_ = true;
  bool first_ = true;
  std::string pending_;  // at most 3 bytes: the beginning of a UTF-8 sequence
};

}  // namespace xpyd
