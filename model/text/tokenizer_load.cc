// tokenizer.json -> Tokenizer::Impl. The file is untrusted input: anything missing, of the wrong type, contradictory or
// not supported is an error that names the file and the field. Nothing is guessed.
//
// "truncation" and "padding" are ignored: Hugging Face's transformers also overrides them in every call.
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/json/json.h"
#include "base/numbers.h"
#include "base/utf8.h"
#include "model/text/tokenizer_impl.h"

namespace xpyd::model {
namespace {

using nlohmann::json;

// GPT-2's regex, which ByteLevel contains.
constexpr const char* kByteLevelRegex = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// Punctuation: ASCII's, part of which Unicode calls symbols, and Unicode's \p{P}. Characters newer than the table of
// the crate that tokenizers uses (unicode_categories 0.1) are left out, and two that have left \p{P} are added.
constexpr const char* kPunctuation =
    R"((?![)"
    R"(\x{61d}\x{9fd}\x{a76}\x{c77}\x{c84}\x{1b4e}-\x{1b4f}\x{1b7d}-\x{1b7f}\x{2e43}-\x{2e4f})"
    R"(\x{2e52}-\x{2e5d}\x{10d6e}\x{10ead}\x{10f55}-\x{10f59}\x{10f86}-\x{10f89}\x{113d4}-\x{113d5})"
    R"(\x{113d7}-\x{113d8}\x{1144b}-\x{1144f}\x{1145a}-\x{1145b}\x{1145d}\x{11660}-\x{1166c}\x{116b9})"
    R"(\x{1183b}\x{11944}-\x{11946}\x{119e2}\x{11a3f}-\x{11a46}\x{11a9a}-\x{11a9c}\x{11a9e}-\x{11aa2})"
    R"(\x{11b00}-\x{11b09}\x{11be1}\x{11c41}-\x{11c45}\x{11c70}-\x{11c71}\x{11ef7}-\x{11ef8})"
    R"(\x{11f43}-\x{11f4f}\x{11fff}\x{12ff1}-\x{12ff2}\x{16d6d}-\x{16d6f}\x{16e97}-\x{16e9a}\x{16fe2})"
    R"(\x{1e5ff}\x{1e95e}-\x{1e95f})"
    R"(])[!-/:-@\[-`{-~\p{P}]|[\x{166d}\x{111c9}])";

// Quotes a text for messages: JSON's escapes, shortened.
std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 40;
  std::string cut = replace_invalid_utf8(text.substr(0, kLongest));
  std::string out = json_text(cut);
  return text.size() > kLongest ? out + "..." : out;
}

// GPT-2's bytes_to_unicode: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up.
struct ByteCharacters {
  uint32_t of_byte[256];
  int byte_of[0x144];  // by code point; -1: no byte
  ByteCharacters() {
    std::fill(std::begin(byte_of), std::end(byte_of), -1);
    uint32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      bool self = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
      of_byte[b] = self ? static_cast<uint32_t>(b) : next++;
      byte_of[of_byte[b]] = b;
    }
  }
};

// "Ġa" -> " a"; nothing if a character stands for no byte.
std::optional<std::string> raw_bytes(std::string_view text) {
  static const ByteCharacters bytes;
  std::string raw;
  while (!text.empty()) {
    CodePoint c = next_code_point(text);
    int byte = c.value < std::size(bytes.byte_of) ? bytes.byte_of[c.value] : -1;
    if (byte < 0) return std::nullopt;
    raw.push_back(static_cast<char>(byte));
    text.remove_prefix(c.bytes);
  }
  return raw;
}

// "<0x41>" -> 0x41, else -1. It reads two characters as Rust's from_str_radix does: "+A" is 10.
int byte_token(std::string_view content) {
  if (content.size() != 6 || !content.starts_with("<0x") || content[5] != '>') return -1;
  std::string_view digits = content.substr(3, 2);
  if (digits[0] == '+') digits.remove_prefix(1);
  unsigned value = 0;
  return read_number(digits, value, 16) ? static_cast<int>(value) : -1;
}

// Every reader throws an Error for input that it does not take.
class TokenizerLoader {
 public:
  TokenizerLoader(const std::string& file, Tokenizer::Impl& out) : file_(file), out_(out) {}

  void load(const json& root) {
    if (!root.is_object()) fail("", "expected an object");
    const json& model = *need(get_object(root, "model", file_));
    read_pre_tokenizer(find_field(root, "pre_tokenizer"));
    vocabulary(model);
    read_normalizer(find_field(root, "normalizer"));
    added_tokens(root);
    read_decoder(find_field(root, "decoder"));
    index_tokens();
    bpe_options(model);
    merges(model);
    read_post_processor(find_field(root, "post_processor"));
  }

 private:
  std::string at(const std::string& field) const { return file_ + ": " + field; }
  [[noreturn]] void fail(const std::string& field, const std::string& why) const {
    throw invalid(file_ + ": " + (field.empty() ? "" : "field \"" + field + "\": ") + why);
  }

  // ---- The steps around the model: normalizer, pre-tokenizer, decoder, post-processor
  //
  // Each is one object with a "type", or a "Sequence" of them. A null `root` means that the field is missing or null.

  struct Step {
    const json& value;
    std::string type, name;  // `name` is the field's
  };
  // Appends the steps of a "Sequence" under `list_name`, or the one object itself.
  void flatten(const json& step, const std::string& field, const std::string& list_name,
               std::vector<Step>& steps) const {
    const std::string type = need(get_string(step, "type", at(field)));
    if (type != "Sequence") {
      steps.push_back({step, type, field});
      if (steps.size() > kMaxSteps) fail(field, "more than " + std::to_string(kMaxSteps) + " steps");
      return;
    }
    const json& list = *need(get_array(step, list_name, at(field)));
    for (size_t i = 0; i < list.size(); ++i)
      flatten(list[i], field + "." + list_name + "[" + std::to_string(i) + "]", list_name, steps);
  }
  std::vector<Step> steps_of(const json* root, const std::string& field, const std::string& list_name) const {
    std::vector<Step> steps;
    if (root) flatten(*root, field, list_name, steps);
    return steps;
  }
  [[noreturn]] void unsupported(const Step& step, const char* known) const {
    fail(step.name + ".type", in_quotes(step.type) + " is not supported, only " + known);
  }

  // Reads a Replace: a literal, {"String": "x"}, not a regex, and its replacement.
  std::pair<std::string, std::string> replacement(const Step& step) const {
    const json& pattern = *need(get_object(step.value, "pattern", at(step.name)));
    std::string from = need(get_string(pattern, "String", at(step.name + ".pattern")));
    std::string to = need(get_string(step.value, "content", at(step.name)));
    if (from.empty()) fail(step.name + ".pattern", "is empty");
    return {std::move(from), std::move(to)};
  }

  PreTokenizerStep split_by(const Step& step, std::string_view regex, SplitBehavior behavior) const {
    return {.kind = PreTokenizerStep::Kind::split,
            .regex = std::make_shared<const Regex>(regex, file_ + ": field \"" + step.name + "\""),
            .behavior = behavior};
  }
  SplitBehavior behavior(const Step& step, const std::string& name) const {
    const auto found = find_split_behavior(name);
    if (!found)
      fail(step.name + ".behavior",
           "expected Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous, got " + in_quotes(name));
    return *found;
  }

  PreTokenizerStep split(const Step& step) const {
    const json& pattern = *need(get_object(step.value, "pattern", at(step.name)));
    const bool literal = find_field(pattern, "String") != nullptr;
    const std::string text = need(get_string(pattern, literal ? "String" : "Regex", at(step.name + ".pattern")));
    if (text.empty()) fail(step.name + ".pattern", "is empty");
    JsonFields fields(step.value, at(step.name));
    PreTokenizerStep out = split_by(step, literal ? escaped_regex(text) : text,
                                    behavior(step, fields.string("behavior")));
    out.invert = fields.boolean_or("invert", false);
    return out;
  }

  // Reads a Metaspace, as pre-tokenizers and decoders write it.
  PreTokenizerStep metaspace(const Step& step) const {
    JsonFields fields(step.value, at(step.name));
    PreTokenizerStep out{.kind = PreTokenizerStep::Kind::metaspace};
    out.replacement = fields.string("replacement");
    const bool add_space = fields.boolean_or("add_prefix_space", true);
    const std::string scheme = fields.string_or("prepend_scheme", add_space ? "always" : "never");
    out.split_words = fields.boolean_or("split", true);
    if (out.replacement.empty() || size_t(next_code_point(out.replacement).bytes) != out.replacement.size())
      fail(step.name + ".replacement", "expected one character");
    using Prepend = PreTokenizerStep::Prepend;
    if (scheme != "always" && scheme != "first" && scheme != "never")
      fail(step.name + ".prepend_scheme", "expected \"always\", \"first\" or \"never\", got " + in_quotes(scheme));
    out.prepend = scheme == "always" ? Prepend::always : scheme == "first" ? Prepend::first : Prepend::never;
    if (!add_space && out.prepend != Prepend::never)
      fail(step.name, "add_prefix_space and prepend_scheme contradict each other");
    return out;
  }

  void read_normalizer(const json* root) {
    size_t growth = 1;
    for (const Step& step : steps_of(root, "normalizer", "normalizers")) {
      NormalizerStep next;
      if (step.type == "NFC") {
        next.kind = NormalizerStep::Kind::nfc;
      } else if (step.type == "Prepend") {
        next.kind = NormalizerStep::Kind::prepend;
        next.content = need(get_string(step.value, "prepend", at(step.name)));
      } else if (step.type == "Replace") {
        next.kind = NormalizerStep::Kind::replace;
        std::tie(next.pattern, next.content) = replacement(step);
        growth *= std::max<size_t>(1, (next.content.size() + next.pattern.size() - 1) / next.pattern.size());
      } else {
        unsupported(step, "NFC, Prepend, Replace, Sequence");
      }
      if (next.content.size() > kMaxAddedTokenBytes || growth > 16)
        fail(step.name, "makes text more than 16 times longer");
      out_.normalizer.push_back(std::move(next));
    }
  }

  void read_pre_tokenizer(const json* root) {
    std::vector<PreTokenizerStep>& out = out_.pre_tokenizer;
    for (const Step& step : steps_of(root, "pre_tokenizer", "pretokenizers")) {
      if (byte_level_) fail(step.name, "a step after ByteLevel is not supported");
      JsonFields fields(step.value, at(step.name));
      if (step.type == "ByteLevel") {
        byte_level_ = true;
        const bool add_space = fields.boolean_or("add_prefix_space", true);
        const bool use_regex = fields.boolean_or("use_regex", true);
        if (add_space) out.push_back({.kind = PreTokenizerStep::Kind::add_space});
        if (use_regex) out.push_back(split_by(step, kByteLevelRegex, SplitBehavior::isolated));
      } else if (step.type == "Split") {
        out.push_back(split(step));
      } else if (step.type == "Digits") {
        const bool each = fields.boolean_or("individual_digits", false);
        out.push_back(split_by(step, R"(\p{N})", each ? SplitBehavior::isolated : SplitBehavior::contiguous));
      } else if (step.type == "Punctuation") {
        out.push_back(split_by(step, kPunctuation, behavior(step, fields.string_or("behavior", "Isolated"))));
      } else if (step.type == "Metaspace") {
        out.push_back(metaspace(step));
      } else {
        unsupported(step, "ByteLevel, Digits, Metaspace, Punctuation, Sequence, Split");
      }
    }
  }

  void read_decoder(const json* root) {
    Tokenizer::Impl::Decoder& out = out_.decoder;
    if (root == nullptr) fail("decoder", "is missing");
    const std::vector<Step> steps = steps_of(root, "decoder", "decoders");
    enum { replace, byte_fallback, fuse, strip, only } last = replace;  // allowed in this order, each once
    for (const Step& step : steps) {
      auto next = last;
      if (step.type == "ByteLevel" || step.type == "Metaspace") {
        if (steps.size() != 1) fail(step.name, step.type + " beside other steps is not supported");
        next = only;
        out.byte_level = step.type == "ByteLevel";
        if (step.type == "Metaspace") {
          const PreTokenizerStep spaces = metaspace(step);
          out.strip_first_token = spaces.prepend != PreTokenizerStep::Prepend::never;
          out.replacement = spaces.replacement;
          replaces_.emplace_back(out.replacement, " ");
        }
      } else if (step.type == "Replace") {
        const auto [pattern, content] = replacement(step);
        if (content.size() > 4 * pattern.size() || replaces_.size() == 2) fail(step.name, "makes text too long");
        replaces_.emplace_back(pattern, content);
        next = replace;
      } else if (step.type == "ByteFallback") {
        out.byte_fallback = true;
        next = byte_fallback;
      } else if (step.type == "Fuse") {
        next = fuse;
      } else if (step.type == "Strip") {
        JsonFields fields(step.value, at(step.name));
        const std::string content = fields.string("content");
        out.strip_space = fields.integer("start", 0, 1) == 1;
        fields.integer("stop", 0, 0);
        if (content != " ") fail(step.name + ".content", "expected \" \"");
        if (last != fuse) fail(step.name, "Strip is supported only after Fuse");
        next = strip;
      } else {
        unsupported(step, "ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Sequence, Strip");
      }
      if (next < last || (next == last && next != replace))
        fail(step.name, "the steps' order is not supported, only Replace, ByteFallback, Fuse, Strip");
      last = next;
    }
    if (out.byte_level != byte_level_)
      fail("decoder", "ByteLevel must be both a pre-tokenizer and the decoder, or neither");
  }

  // Fills out_.prefix and out_.suffix. Requires: out_.tokens is complete.
  void read_post_processor(const json* root) {
    bool seen = false;
    for (const Step& step : steps_of(root, "post_processor", "processors")) {
      if (step.type == "ByteLevel") continue;  // changes offsets only, which are not kept
      if (step.type != "TemplateProcessing") unsupported(step, "ByteLevel, Sequence, TemplateProcessing");
      if (std::exchange(seen, true)) fail(step.name, "a second TemplateProcessing is not supported");
      template_processing(step);
    }
  }

  void template_processing(const Step& step) {
    const json& single = *need(get_array(step.value, "single", at(step.name)));
    bool text_seen = false;
    for (size_t i = 0; i < single.size(); ++i) {
      const std::string name = step.name + ".single[" + std::to_string(i) + "]";
      if (i >= kMaxSteps) fail(name, "too many items");
      if (find_field(single[i], "Sequence") != nullptr) {
        if (std::exchange(text_seen, true)) fail(name, "a second Sequence is not supported");
        continue;
      }
      const json& special = *need(get_object(single[i], "SpecialToken", at(name)));
      const std::string id = need(get_string(special, "id", at(name)));
      const json& table = *need(get_object(step.value, "special_tokens", at(step.name)));
      const json& entry = *need(get_object(table, id, at(step.name + ".special_tokens")));
      const std::string entry_name = step.name + ".special_tokens." + id;
      const json& ids = *need(get_array(entry, "ids", at(entry_name)));
      if (ids.size() > kMaxSteps) fail(entry_name + ".ids", "too many");
      for (const json& value : ids) {
        const int64_t n_ids = int64_t(out_.tokens.size());
        if (!value.is_number_integer() || value < 0 || value >= n_ids || !out_.tokens[value.get<size_t>()].known)
          fail(entry_name + ".ids", "expected ids of tokens");
        (text_seen ? out_.suffix : out_.prefix).push_back(value.get<int32_t>());
      }
    }
    if (!text_seen) fail(step.name + ".single", "there is no Sequence");
  }

  // ---- The model and its tokens

  void token(int64_t id, const std::string& content, const std::string& field) {
    if (id < 0 || id > kMaxTokenId)
      fail(field, "id of " + in_quotes(content) + ": expected an integer from 0 to " + std::to_string(kMaxTokenId) +
                      ", got " + std::to_string(id));
    if (static_cast<size_t>(id) >= out_.tokens.size()) out_.tokens.resize(id + 1);
    Tokenizer::Impl::Token& slot = out_.tokens[id];
    if (slot.known)
      fail(field, "id " + std::to_string(id) + " is both " + in_quotes(slot.content) + " and " + in_quotes(content));
    slot.known = true;
    slot.content = content;
  }

  void vocabulary(const json& model) {
    JsonFields fields(model, at("model"));
    std::string type = fields.string_or("type", "BPE");
    if (type != "BPE") fail("model.type", in_quotes(type) + " is not supported, only \"BPE\"");
    const json& vocab = *need(get_object(model, "vocab", at("model")));
    if (vocab.empty()) fail("model.vocab", "is empty");
    vocab_ids_.reserve(vocab.size());
    for (auto& [content, id] : vocab.items()) {
      if (!id.is_number_integer() || (id.is_number_unsigned() && id.get<uint64_t>() > uint64_t{INT64_MAX}))
        fail("model.vocab", "id of " + in_quotes(content) + ": expected an integer from 0 to " +
                                std::to_string(kMaxTokenId) + ", got " + id.dump(-1, ' ', true).substr(0, 40));
      token(id.get<int64_t>(), content, "model.vocab");
      vocab_ids_.emplace(content, id.get<int32_t>());
    }
  }

  void added_tokens(const json& root) {
    const json* list = find_field(root, "added_tokens");
    if (list == nullptr) return;
    if (!list->is_array()) fail("added_tokens", "expected an array");
    if (list->size() > kMaxAddedTokens)
      fail("added_tokens",
           std::to_string(list->size()) + " tokens, at most " + std::to_string(kMaxAddedTokens) + " are supported");
    std::unordered_map<std::string, int32_t> seen;
    for (size_t i = 0; i < list->size(); ++i) {
      std::string field = "added_tokens[" + std::to_string(i) + "]";
      JsonFields fields((*list)[i], at(field));
      AddedToken added;
      added.id = static_cast<int32_t>(fields.integer("id", 0, kMaxTokenId));
      added.content = fields.string("content");
      added.special = fields.boolean_or("special", false);
      added.single_word = fields.boolean_or("single_word", false);
      added.lstrip = fields.boolean_or("lstrip", false);
      added.rstrip = fields.boolean_or("rstrip", false);
      added.normalized = fields.boolean_or("normalized", !added.special);
      if (added.content.empty()) fail(field + ".content", "is empty");
      if (added.content.size() > kMaxAddedTokenBytes)
        fail(field + ".content", "longer than " + std::to_string(kMaxAddedTokenBytes) + " bytes");
      if (!seen.emplace(added.content, added.id).second)
        fail(field + ".content", in_quotes(added.content) + " was added before");
      auto in_vocab = vocab_ids_.find(added.content);
      if (in_vocab == vocab_ids_.end()) {
        token(added.id, added.content, field);
      } else if (in_vocab->second != added.id) {
        fail(field + ".id", in_quotes(added.content) + " is " + std::to_string(added.id) + " here and " +
                                std::to_string(in_vocab->second) + " in model.vocab");
      }
      out_.tokens[added.id].special = added.special;
      std::string pattern = added.normalized ? normalize(out_.normalizer, added.content) : added.content;
      if (pattern.empty()) fail(field + ".content", "normalizes to nothing");
      // From version 0.23 on, Hugging Face's tokenizers decodes the token to the pattern. (With skip_special_tokens it
      // then does not recognise it as special; this one does.)
      if (pattern != added.content) decoded_as_[added.id] = pattern;
      (added.normalized ? out_.added_normalized : out_.added).add(added, pattern);
    }
  }

  // Fills each token's piece and the look-up tables. From here on out_.tokens keeps its size.
  void index_tokens() {
    Bpe& bpe = out_.bpe;
    bpe.byte_level = byte_level_;
    bpe.ids.reserve(vocab_ids_.size());
    bpe.special.assign(out_.tokens.size(), false);
    out_.by_content.reserve(out_.tokens.size());
    for (size_t id = 0; id < out_.tokens.size(); ++id) {
      Tokenizer::Impl::Token& token = out_.tokens[id];
      if (!token.known) continue;
      bpe.special[id] = token.special;
      out_.by_content.emplace(token.content, static_cast<int32_t>(id));
      bool in_vocab = vocab_ids_.count(token.content) != 0;
      auto other = decoded_as_.find(static_cast<int32_t>(id));
      const std::string& text = other == decoded_as_.end() ? token.content : other->second;
      if (byte_level_) {
        // A token with other than byte characters decodes to itself, and no word matches it.
        token.piece = raw_bytes(text).value_or(text);
        auto raw = raw_bytes(token.content);
        if (!in_vocab || !raw) continue;
        const std::string& key = *raw == token.piece ? token.piece : out_.keys.emplace_back(*raw);
        bpe.ids.emplace(key, static_cast<int32_t>(id));
      } else {
        token.piece = text;
        if (out_.decoder.strip_first_token) {
          token.first_piece = text;
          replace_all(token.first_piece, out_.decoder.replacement, "");
        }
        for (auto& [pattern, content] : replaces_) replace_all(token.piece, pattern, content);
        int byte = out_.decoder.byte_fallback ? byte_token(token.piece) : -1;
        if (byte >= 0) {
          token.is_byte = true;
          token.piece.assign(1, static_cast<char>(byte));
        }
        if (in_vocab) bpe.ids.emplace(token.content, static_cast<int32_t>(id));
      }
    }
  }

  void bpe_options(const json& model) {
    Bpe& bpe = out_.bpe;
    JsonFields fields(model, at("model"));
    double dropout = fields.number_or("dropout", 0, 1, 0);
    std::string prefix = fields.string_or("continuing_subword_prefix", "");
    std::string suffix = fields.string_or("end_of_word_suffix", "");
    std::string unk = fields.string_or("unk_token", "");
    bool has_unk = find_field(model, "unk_token") != nullptr;
    bpe.fuse_unk = fields.boolean_or("fuse_unk", false);
    bpe.byte_fallback = fields.boolean_or("byte_fallback", false);
    bpe.ignore_merges = fields.boolean_or("ignore_merges", false);
    if (dropout != 0) fail("model.dropout", "is not supported: encoding must not be random");
    if (!prefix.empty()) fail("model.continuing_subword_prefix", "is not supported");
    if (!suffix.empty()) fail("model.end_of_word_suffix", "is not supported");
    if (has_unk) {
      auto id = vocab_ids_.find(unk);
      if (id == vocab_ids_.end()) fail("model.unk_token", in_quotes(unk) + " is not in model.vocab");
      bpe.unk = id->second;
    }
    bpe.byte_ids.fill(-1);
    if (byte_level_) {
      for (int b = 0; b < 256; ++b) {
        char byte = static_cast<char>(b);
        auto id = bpe.ids.find(std::string_view(&byte, 1));
        if (id == bpe.ids.end()) fail("model.vocab", missing_byte(b));
        bpe.byte_ids[b] = id->second;
      }
      bpe.byte_fallback = false;  // never needed: every byte is known
    } else if (bpe.byte_fallback) {
      for (int b = 0; b < 256; ++b) {
        char name[16];
        std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(b));
        auto id = vocab_ids_.find(name);
        if (id == vocab_ids_.end()) fail("model.vocab", missing_byte(b) + " (\"" + name + "\")");
        bpe.byte_ids[b] = id->second;
      }
    } else if (bpe.unk < 0) {
      fail("model", "without byte_fallback, unk_token or ByteLevel some text has no tokens");
    }
  }

  static std::string missing_byte(int byte) {
    return "the token of byte " + std::to_string(byte) + " is missing, so some text has no tokens";
  }

  void merges(const json& model) {
    const json& list = *need(get_array(model, "merges", at("model")));
    out_.bpe.reserve_merges(list.size());
    uint32_t rank = 0;
    for (const json& merge : list) {
      std::string_view parts[2];
      bool good = false;
      if (merge.is_string()) {
        std::string_view text = merge.get_ref<const std::string&>();
        size_t space = text.find(' ');
        good = space != text.npos && text.find(' ', space + 1) == text.npos;
        if (good) parts[0] = text.substr(0, space), parts[1] = text.substr(space + 1);
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        good = true;
        for (int i = 0; i < 2; ++i) parts[i] = merge[i].get_ref<const std::string&>();
      }
      auto field = [&] { return "model.merges[" + std::to_string(rank) + "]"; };
      if (!good) fail(field(), "expected \"left right\" or [\"left\", \"right\"]");
      int32_t ids[3];
      std::string merged = std::string(parts[0]) + std::string(parts[1]);
      std::string_view contents[] = {parts[0], parts[1], merged};
      for (int i = 0; i < 3; ++i) {
        auto id = vocab_ids_.find(std::string(contents[i]));
        if (id == vocab_ids_.end()) fail(field(), in_quotes(contents[i]) + " is not in model.vocab");
        ids[i] = id->second;
      }
      out_.bpe.add_merge(ids[0], ids[1], rank++, ids[2]);
    }
  }

  const std::string file_;
  Tokenizer::Impl& out_;
  bool byte_level_ = false;  // words are bytes; ByteLevel's characters are not made (see Bpe::byte_level)
  std::unordered_map<std::string, int32_t> vocab_ids_;         // of model.vocab only
  std::vector<std::pair<std::string, std::string>> replaces_;  // the decoder's replacements in every token
  std::unordered_map<int32_t, std::string> decoded_as_;        // tokens that do not decode to their content
};

}  // namespace

Status load_tokenizer(std::string_view json_text, const std::string& file, Tokenizer::Impl& out) try {
  TokenizerLoader(file, out).load(need(parse_json(json_text, file, {.max_bytes = kMaxTokenizerBytes})));
  return ok();
} catch (const Error& error) {
  return error;
}

std::vector<int> meta_eos_tokens(const Tokenizer& tokenizer) {
  std::vector<int> tokens;
  for (const char* name : {"</s>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"})
    if (const int32_t token = tokenizer.token_id(name); token >= 0) tokens.push_back(token);
  return tokens;
}

}  // namespace xpyd::model
