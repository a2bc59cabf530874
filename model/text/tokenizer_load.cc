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

// "<0x41>" -> 0x41, else -1.
int byte_token(std::string_view content) {
  if (content.size() != 6 || !content.starts_with("<0x") || content[5] != '>') return -1;
  unsigned value = 0;
  return read_number(content.substr(3, 2), value, 16) ? static_cast<int>(value) : -1;
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

  PreTokenizerStep split_by(const Step& step, std::string_view regex) const {
    return {.kind = PreTokenizerStep::Kind::split,
            .regex = std::make_shared<const Regex>(regex, file_ + ": field \"" + step.name + "\"")};
  }

  PreTokenizerStep split(const Step& step) const {
    const json& pattern = *need(get_object(step.value, "pattern", at(step.name)));
    const std::string regex = need(get_string(pattern, "Regex", at(step.name + ".pattern")));
    JsonFields fields(step.value, at(step.name));
    const std::string behavior = fields.string("behavior");
    if (behavior != "Isolated")
      fail(step.name + ".behavior", in_quotes(behavior) + " is not supported, only \"Isolated\"");
    if (fields.boolean_or("invert", false)) fail(step.name + ".invert", "expected false");
    return split_by(step, regex);
  }

  PreTokenizerStep metaspace(const Step& step) const {
    JsonFields fields(step.value, at(step.name));
    PreTokenizerStep out{.kind = PreTokenizerStep::Kind::metaspace};
    out.replacement = fields.string("replacement");
    const bool add_space = fields.boolean_or("add_prefix_space", true);
    const std::string scheme = fields.string_or("prepend_scheme", add_space ? "always" : "never");
    if (fields.boolean_or("split", true)) fail(step.name + ".split", "expected false");
    using Prepend = PreTokenizerStep::Prepend;
    if (scheme != "always" && scheme != "first" && scheme != "never")
      fail(step.name + ".prepend_scheme", "expected \"always\", \"first\" or \"never\", got " + in_quotes(scheme));
    out.prepend = scheme == "always" ? Prepend::always : scheme == "first" ? Prepend::first : Prepend::never;
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
      if (growth > 16) fail(step.name, "makes text more than 16 times longer");
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
        if (use_regex) out.push_back(split_by(step, kByteLevelRegex));
      } else if (step.type == "Split") {
        out.push_back(split(step));
      } else if (step.type == "Digits") {
        if (!fields.boolean_or("individual_digits", false)) fail(step.name + ".individual_digits", "expected true");
        out.push_back(split_by(step, R"(\p{N})"));
      } else if (step.type == "Metaspace") {
        out.push_back(metaspace(step));
      } else {
        unsupported(step, "ByteLevel, Digits, Metaspace, Sequence, Split");
      }
    }
  }

  void read_decoder(const json* root) {
    Tokenizer::Impl::Decoder& out = out_.decoder;
    if (root == nullptr) fail("decoder", "is missing");
    for (const Step& step : steps_of(root, "decoder", "decoders")) {
      if (step.type == "ByteLevel") {
        out.byte_level = true;
      } else if (step.type == "Replace") {
        replaces_.push_back(replacement(step));
      } else if (step.type == "ByteFallback") {
        out.byte_fallback = true;
      } else if (step.type == "Strip") {
        JsonFields fields(step.value, at(step.name));
        const std::string content = fields.string("content");
        out.strip_space = fields.integer("start", 0, 1) == 1;
        fields.integer("stop", 0, 0);
        if (content != " ") fail(step.name + ".content", "expected \" \"");
      } else if (step.type != "Fuse") {
        unsupported(step, "ByteFallback, ByteLevel, Fuse, Replace, Sequence, Strip");
      }
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
    const auto nfc = [](const NormalizerStep& step) { return step.kind == NormalizerStep::Kind::nfc; };
    const bool only_nfc = std::all_of(out_.normalizer.begin(), out_.normalizer.end(), nfc);
    for (size_t i = 0; i < list->size(); ++i) {
      std::string field = "added_tokens[" + std::to_string(i) + "]";
      JsonFields fields((*list)[i], at(field));
      AddedToken added;
      added.id = static_cast<int32_t>(fields.integer("id", 0, kMaxTokenId));
      added.content = fields.string("content");
      added.special = fields.boolean_or("special", false);
      for (const char* name : {"single_word", "lstrip", "rstrip"})
        if (fields.boolean_or(name, false)) fail(field + "." + name, "expected false");
      if (fields.boolean_or("normalized", !added.special) && !only_nfc)
        fail(field + ".normalized", "expected false beside a normalizer that does more than NFC");
      if (added.content.empty()) fail(field + ".content", "is empty");
      if (added.special && count_code_points(added.content) == 1)
        fail(field + ".content", "a special token of one character is not supported");
      auto in_vocab = vocab_ids_.find(added.content);
      if (in_vocab == vocab_ids_.end()) {
        token(added.id, added.content, field);
      } else if (in_vocab->second != added.id) {
        fail(field + ".id", in_quotes(added.content) + " is " + std::to_string(added.id) + " here and " +
                                std::to_string(in_vocab->second) + " in model.vocab");
      }
      out_.tokens[added.id].special = added.special;
      out_.added.add(added);
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
      const bool in_vocab = vocab_ids_.count(token.content) != 0;
      if (byte_level_) {
        // A token with other than byte characters decodes to itself, and no word matches it.
        const auto raw = raw_bytes(token.content);
        token.piece = raw.value_or(token.content);
        if (in_vocab && raw) bpe.ids.emplace(token.piece, static_cast<int32_t>(id));
      } else {
        token.piece = token.content;
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
    const bool byte_fallback = fields.boolean_or("byte_fallback", false);
    bpe.ignore_merges = fields.boolean_or("ignore_merges", false);
    if (dropout != 0) fail("model.dropout", "is not supported: encoding must not be random");
    if (!prefix.empty()) fail("model.continuing_subword_prefix", "is not supported");
    if (!suffix.empty()) fail("model.end_of_word_suffix", "is not supported");
    if (!byte_level_ && !byte_fallback) fail("model.byte_fallback", "expected true without ByteLevel");
    for (int b = 0; b < 256; ++b) {
      const char byte = static_cast<char>(b);
      char name[16];
      std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(b));
      const auto id = bpe.ids.find(byte_level_ ? std::string_view(&byte, 1) : std::string_view(name));
      if (id == bpe.ids.end())
        fail("model.vocab", "the token of byte " + std::to_string(b) + " is missing, so some text has no tokens");
      bpe.byte_ids[size_t(b)] = id->second;
    }
  }

  void merges(const json& model) {
    const json& list = *need(get_array(model, "merges", at("model")));
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
};

}  // namespace

Status load_tokenizer(std::string_view json_text, const std::string& file, Tokenizer::Impl& out) try {
  TokenizerLoader(file, out).load(need(parse_json(json_text, file, {.max_bytes = kMaxTokenizerBytes})));
  return ok();
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::model
