// Text <-> token ids, from a Hugging Face tokenizer.json: byte-level BPE (Llama 3, Qwen 2/2.5/3)
// and SentencePiece-style BPE with byte fallback (Llama 2, Mistral).
//
// Thread safety: all const; share one among threads.
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
  static Result<std::unique_ptr<const Tokenizer>> load(const std::string& dir);  // DIR/tokenizer.json
  static Result<std::unique_ptr<const Tokenizer>> parse(std::string_view json_text, const std::string& file_name);
  ~Tokenizer();

  struct EncodeOptions {
    bool add_special_tokens = true;    // what the post-processor adds: BOS
    bool parse_special_tokens = true;  // false: added special tokens in the text are plain text
  };
  // Invalid UTF-8 is read as U+FFFD, as Python's bytes.decode(errors='replace') would
  // have it before Hugging Face's tokenizers sees it. Takes O(n log n) time. Throws an Error, which names the file and
  // the field, where a regex of tokenizer.json takes more than a quarter of a second and 1 us a byte on this text.
  std::vector<int32_t> encode(std::string_view text, EncodeOptions options) const;
  std::vector<int32_t> encode(std::string_view text) const { return encode(text, EncodeOptions()); }

  // The parts as one text, so that words and merges reach across their borders; but no added token
  // does, and special ones are parsed only where a part says so.
  struct Part {
    std::string_view text;
    bool parse_special_tokens;
  };
  std::vector<int32_t> encode(std::span<const Part> parts, bool add_special_tokens) const;

  // The whole text, as Hugging Face's tokenizers decodes it: ids that are no token are left out, invalid UTF-8 becomes
  // U+FFFD; with byte fallback, a run of byte tokens that is not valid as a whole becomes one U+FFFD per token.
  std::string decode(const std::vector<int32_t>& ids, bool skip_special_tokens = true) const;

  // Bytes of one token as it stands inside a text (no strip of a leading space; "<0x41>" is "A").
  // Bytes may be part of a UTF-8 sequence. Empty for an id that is no token.
  const std::string& piece(int32_t id) const;
  bool is_special(int32_t id) const;
  // Decoding removes one leading space from the first token of a text (SentencePiece style).
  bool strips_leading_space() const;

  int vocab_size() const;                            // highest id + 1
  int32_t token_id(std::string_view content) const;  // -1: no such token

  struct Impl;

 private:
  Tokenizer();
  friend class Detokenizer;
  std::unique_ptr<Impl> impl_;
};

// Turns a stream of ids into text that is valid UTF-8 at every moment. Text of feed()s and the final flush() together
// equal decode(). So bytes that begin a UTF-8 sequence wait for its rest; and with byte fallback a run of byte tokens
// waits for its end, because one bad byte spoils the run.
class Detokenizer {
 public:
  Detokenizer() = default;
  // The tokenizer must outlive this.
  Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens)
      : tokenizer_(&tokenizer), skip_special_(skip_special_tokens) {}
  // A prompt precedes the stream: then nothing is stripped from the first token.
  void continues_text() { first_ = false; }
  std::string feed(int32_t id);
  std::string flush();  // what still waits

 private:
  std::string end_run();
  std::string stripped(std::string text);

  const Tokenizer* tokenizer_ = nullptr;
  bool skip_special_ = true;
  bool first_ = true;
  std::string pending_;  // byte level: at most 3 bytes; byte fallback: the run of byte tokens
};

// Meta's folders name no tokens that end a text; its code takes those that its tokenizers have for that.
std::vector<int> meta_eos_tokens(const Tokenizer& tokenizer);

}  // namespace xpyd::model
