// tokenizer.json -> Tokenizer::Impl. A tokenizer.json is input from outside: what is missing, of
// the wrong type, contradictory or not supported is an error that names the file and the field;
// nothing is guessed.
//
// "truncation" and "padding" are not read: Hugging Face's transformers overrides them in every
// call, too.
#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/utf8.h"
#include "model/tokenizer_impl.h"

namespace xpyd {
namespace {

using nlohmann::json;

// The file that messages begin with.
struct TokenizerFile {
  std::string name;
  std::string at(const std::string& field) const { return name + ": " + field; }
  Error bad(const std::string& field, const std::string& why) const {
    return invalid(name + ": " + (field.empty() ? "" : "field \"" + field + "\": ") + why);
  }
};

#define RETURN_IF_ERROR(status_expression) \
  do {                                     \
    Status status_ = (status_expression);  \
    if (!status_.ok()) return status_;     \
  } while (0)

// For messages: JSON's quotes and escapes, shortened.
std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 40;
  std::string cut = replace_invalid_utf8(text.substr(0, kLongest));
  std::string out = json_text(cut);
  return text.size() > kLongest ? out + "..." : out;
}

// ---- the steps around the model: normalizer, pre-tokenizer, decoder, post-processor
//
// Each is one object with a "type", or a "Sequence" of them; a `root` of nullptr: the field is
// missing or null.

// Steps of a "Sequence" under `list_name`, or the one object itself; each with its field name.
using Steps = std::vector<std::pair<const json*, std::string>>;
Status flatten(const TokenizerFile& file, const json& step, const std::string& field, const std::string& list_name,
               Steps& steps) {
  auto type = get_string(step, "type", file.at(field));
  if (!type.ok()) return type.error();
  if (type.value() != "Sequence") {
    steps.emplace_back(&step, field);
    if (steps.size() > kMaxSteps) return file.bad(field, "more than " + std::to_string(kMaxSteps) + " steps");
    return ok();
  }
  auto list = get_array(step, list_name, file.at(field));
  if (!list.ok()) return list.error();
  for (size_t i = 0; i < list.value()->size(); ++i)
    RETURN_IF_ERROR(
        flatten(file, (*list.value())[i], field + "." + list_name + "[" + std::to_string(i) + "]", list_name, steps));
  return ok();
}

Status unsupported(const TokenizerFile& file, const json& step, const std::string& field, const char* known) {
  return file.bad(field + ".type", in_quotes(step["type"].get<std::string>()) + " is not supported, only " + known);
}

// {"String": "x"}: a literal, not a regex.
Result<std::string> literal(const TokenizerFile& file, const json& step, const std::string& field) {
  auto pattern = get_object(step, "pattern", file.at(field));
  if (!pattern.ok()) return pattern.error();
  return get_string(*pattern.value(), "String", file.at(field + ".pattern"));
}

Status split(const TokenizerFile& file, const json& step, const std::string& name, PreTokenizerStep& out) {
  auto pattern = get_object(step, "pattern", file.at(name));
  if (!pattern.ok()) return pattern.error();
  auto regex = get_string(*pattern.value(), "Regex", file.at(name + ".pattern"));
  if (!regex.ok()) return regex.error();
  JsonFields fields(step, file.at(name));
  std::string behavior = fields.string("behavior");
  bool invert = fields.boolean_or("invert", false);
  RETURN_IF_ERROR(fields.status());
  if (behavior != "Isolated" || invert) return file.bad(name, "only behavior \"Isolated\" without invert is supported");
  auto known = find_split_pattern(regex.value());
  if (!known)
    return file.bad(name + ".pattern.Regex", "this regex is not one of those supported (" +
                                                 std::string(kKnownSplitPatterns) +
                                                 "): " + json_text(regex.value()).substr(0, 300));
  out.kind = PreTokenizerStep::Kind::split;
  out.pattern = *known;
  return ok();
}

// A Metaspace's replacement and whether to prepend it, as pre-tokenizer and decoder write them.
Status metaspace(const TokenizerFile& file, const json& step, const std::string& name, PreTokenizerStep& out) {
  JsonFields fields(step, file.at(name));
  out.kind = PreTokenizerStep::Kind::metaspace;
  out.replacement = fields.string("replacement");
  bool add_space = fields.boolean_or("add_prefix_space", true);
  std::string scheme = fields.string_or("prepend_scheme", add_space ? "always" : "never");
  out.split_words = fields.boolean_or("split", true);
  RETURN_IF_ERROR(fields.status());
  if (out.replacement.empty() || static_cast<size_t>(next_code_point(out.replacement).bytes) != out.replacement.size())
    return file.bad(name + ".replacement", "expected one character");
  using Prepend = PreTokenizerStep::Prepend;
  if (scheme == "always") {
    out.prepend = Prepend::always;
  } else if (scheme == "first") {
    out.prepend = Prepend::first;
  } else if (scheme == "never") {
    out.prepend = Prepend::never;
  } else {
    return file.bad(name + ".prepend_scheme", "expected \"always\", \"first\" or \"never\", got " + in_quotes(scheme));
  }
  if (!add_space && out.prepend != Prepend::never)
    return file.bad(name, "add_prefix_space and prepend_scheme contradict each other");
  return ok();
}

Status template_processing(const TokenizerFile& file, const json& step, const std::string& name, Tokenizer::Impl& out) {
  auto single = get_array(step, "single", file.at(name));
  if (!single.ok()) return single.error();
  bool text_seen = false;
  for (size_t i = 0; i < single.value()->size(); ++i) {
    const json& item = (*single.value())[i];
    std::string item_name = name + ".single[" + std::to_string(i) + "]";
    if (i >= kMaxSteps) return file.bad(item_name, "too many items");
    if (find_field(item, "Sequence") != nullptr) {
      if (text_seen) return file.bad(item_name, "a second Sequence is not supported");
      text_seen = true;
      continue;
    }
    auto special = get_object(item, "SpecialToken", file.at(item_name));
    if (!special.ok()) return special.error();
    auto id = get_string(*special.value(), "id", file.at(item_name));
    if (!id.ok()) return id.error();
    auto table = get_object(step, "special_tokens", file.at(name));
    if (!table.ok()) return table.error();
    auto entry = get_object(*table.value(), id.value(), file.at(name + ".special_tokens"));
    if (!entry.ok()) return entry.error();
    std::string entry_name = name + ".special_tokens." + id.value();
    auto ids = get_array(*entry.value(), "ids", file.at(entry_name));
    if (!ids.ok()) return ids.error();
    if (ids.value()->size() > kMaxSteps) return file.bad(entry_name + ".ids", "too many");
    for (const json& value : *ids.value()) {
      int64_t n_ids = static_cast<int64_t>(out.tokens.size());
      if (!value.is_number_integer() || value < 0 || value >= n_ids || !out.tokens[value.get<size_t>()].known)
        return file.bad(entry_name + ".ids", "expected ids of tokens");
      (text_seen ? out.suffix : out.prefix).push_back(value.get<int32_t>());
    }
  }
  if (!text_seen) return file.bad(name + ".single", "there is no Sequence");
  return ok();
}

Status read_normalizer(const TokenizerFile& file, const json* root, std::vector<NormalizerStep>& out) {
  if (root == nullptr) return ok();
  Steps steps;
  RETURN_IF_ERROR(flatten(file, *root, "normalizer", "normalizers", steps));
  size_t growth = 1;
  for (auto& [step, name] : steps) {
    std::string type = (*step)["type"];
    NormalizerStep next;
    if (type == "NFC") {
      next.kind = NormalizerStep::Kind::nfc;
    } else if (type == "Prepend") {
      next.kind = NormalizerStep::Kind::prepend;
      auto content = get_string(*step, "prepend", file.at(name));
      if (!content.ok()) return content.error();
      next.content = content.value();
    } else if (type == "Replace") {
      next.kind = NormalizerStep::Kind::replace;
      auto pattern = literal(file, *step, name);
      auto content = get_string(*step, "content", file.at(name));
      if (!pattern.ok()) return pattern.error();
      if (!content.ok()) return content.error();
      if (pattern.value().empty()) return file.bad(name + ".pattern", "is empty");
      next.pattern = pattern.value();
      next.content = content.value();
      growth *= std::max<size_t>(1, (next.content.size() + next.pattern.size() - 1) / next.pattern.size());
    } else {
      return unsupported(file, *step, name, "NFC, Prepend, Replace, Sequence");
    }
    if (next.content.size() > kMaxAddedTokenBytes || growth > 16)
      return file.bad(name, "makes text more than 16 times longer");
    out.push_back(std::move(next));
  }
  return ok();
}

// byte_level: words are bytes (ByteLevel's characters are not made, see Bpe::byte_level).
Status read_pre_tokenizer(const TokenizerFile& file, const json* root, std::vector<PreTokenizerStep>& out,
                          bool& byte_level) {
  if (root == nullptr) return ok();
  Steps steps;
  RETURN_IF_ERROR(flatten(file, *root, "pre_tokenizer", "pretokenizers", steps));
  for (auto& [step, name] : steps) {
    if (byte_level) return file.bad(name, "a step after ByteLevel is not supported");
    std::string type = (*step)["type"];
    JsonFields fields(*step, file.at(name));
    PreTokenizerStep next;
    if (type == "ByteLevel") {
      byte_level = true;
      bool add_space = fields.boolean_or("add_prefix_space", true);
      bool use_regex = fields.boolean_or("use_regex", true);
      RETURN_IF_ERROR(fields.status());
      next.kind = PreTokenizerStep::Kind::add_space;
      if (add_space) out.push_back(next);
      next.kind = PreTokenizerStep::Kind::split;
      next.pattern = SplitPattern::gpt2;
      if (use_regex) out.push_back(next);
      continue;
    }
    if (type == "Split") {
      RETURN_IF_ERROR(split(file, *step, name, next));
    } else if (type == "Metaspace") {
      RETURN_IF_ERROR(metaspace(file, *step, name, next));
    } else {
      return unsupported(file, *step, name, "ByteLevel, Metaspace, Sequence, Split");
    }
    out.push_back(std::move(next));
  }
  return ok();
}

// What the decoder replaces in every token.
using Replaces = std::vector<std::pair<std::string, std::string>>;
Status read_decoder(const TokenizerFile& file, const json* root, bool byte_level, Tokenizer::Impl::Decoder& out,
                    Replaces& replaces) {
  const std::string field = "decoder";
  if (root == nullptr) return file.bad(field, "is missing");
  Steps steps;
  RETURN_IF_ERROR(flatten(file, *root, field, "decoders", steps));
  enum { replace, byte_fallback, fuse, strip, only } last = replace;  // in this order, each once
  for (auto& [step, name] : steps) {
    std::string type = (*step)["type"];
    auto next = last;
    if (type == "ByteLevel" || type == "Metaspace") {
      if (steps.size() != 1) return file.bad(name, type + " beside other steps is not supported");
      next = only;
      out.byte_level = type == "ByteLevel";
      if (type == "Metaspace") {
        PreTokenizerStep metaspace_step;
        RETURN_IF_ERROR(metaspace(file, *step, name, metaspace_step));
        out.strip_first_token = metaspace_step.prepend != PreTokenizerStep::Prepend::never;
        out.replacement = metaspace_step.replacement;
        replaces.emplace_back(out.replacement, " ");
      }
    } else if (type == "Replace") {
      auto pattern = literal(file, *step, name);
      auto content = get_string(*step, "content", file.at(name));
      if (!pattern.ok()) return pattern.error();
      if (!content.ok()) return content.error();
      if (pattern.value().empty()) return file.bad(name + ".pattern", "is empty");
      if (content.value().size() > 4 * pattern.value().size() || replaces.size() == 2)
        return file.bad(name, "makes text too long");
      replaces.emplace_back(pattern.value(), content.value());
      next = replace;
    } else if (type == "ByteFallback") {
      out.byte_fallback = true;
      next = byte_fallback;
    } else if (type == "Fuse") {
      next = fuse;
    } else if (type == "Strip") {
      JsonFields fields(*step, file.at(name));
      std::string content = fields.string("content");
      out.strip_space = fields.integer("start", 0, 1) == 1;
      fields.integer("stop", 0, 0);
      RETURN_IF_ERROR(fields.status());
      if (content != " ") return file.bad(name + ".content", "expected \" \"");
      if (last != fuse) return file.bad(name, "Strip is supported only after Fuse");
      next = strip;
    } else {
      return unsupported(file, *step, name, "ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Sequence, Strip");
    }
    if (next < last || (next == last && next != replace))
      return file.bad(name, "the steps' order is not supported, only Replace, ByteFallback, Fuse, Strip");
    last = next;
  }
  if (out.byte_level != byte_level)
    return file.bad(field, "ByteLevel must be both a pre-tokenizer and the decoder, or neither");
  return ok();
}

// Fills in out.prefix and out.suffix; out.tokens is complete.
Status read_post_processor(const TokenizerFile& file, const json* root, Tokenizer::Impl& out) {
  if (root == nullptr) return ok();
  Steps steps;
  RETURN_IF_ERROR(flatten(file, *root, "post_processor", "processors", steps));
  bool seen = false;
  for (auto& [step, name] : steps) {
    std::string type = (*step)["type"];
    if (type == "ByteLevel") continue;  // changes offsets only, which are not kept
    if (type != "TemplateProcessing") return unsupported(file, *step, name, "ByteLevel, Sequence, TemplateProcessing");
    if (seen) return file.bad(name, "a second TemplateProcessing is not supported");
    seen = true;
    RETURN_IF_ERROR(template_processing(file, *step, name, out));
  }
  return ok();
}

// ---- the model and its tokens

// GPT-2's bytes_to_unicode: printable Latin-1 characters stand for themselves, the other bytes for
// U+0100 and up.
struct ByteCharacters {
  uint32_t of_byte[256];
  int byte_of[0x144];  // by code point; -1: no byte's
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

// "Ġa" -> " a"; nothing where a character stands for no byte.
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

// "<0x41>" -> 0x41, else -1. Two characters as Rust's from_str_radix takes them: "+A" is 10.
int byte_token(std::string_view content) {
  if (content.size() != 6 || !content.starts_with("<0x") || content[5] != '>') return -1;
  std::string_view digits = content.substr(3, 2);
  if (digits[0] == '+') digits.remove_prefix(1);
  unsigned value = 0;
  auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  return error == std::errc() && end == digits.data() + digits.size() ? static_cast<int>(value) : -1;
}

class TokenizerLoader {
 public:
  TokenizerLoader(const std::string& file, Tokenizer::Impl& out) : where_{file}, file_(file), out_(out) {}

  Status load(const json& root) {
    if (!root.is_object()) return bad("", "expected an object");
    auto model = get_object(root, "model", file_);
    if (!model.ok()) return model.error();
    RETURN_IF_ERROR(read_pre_tokenizer(where_, find_field(root, "pre_tokenizer"), out_.pre_tokenizer, byte_level_));
    RETURN_IF_ERROR(vocabulary(*model.value()));
    RETURN_IF_ERROR(read_normalizer(where_, find_field(root, "normalizer"), out_.normalizer));
    RETURN_IF_ERROR(added_tokens(root));
    RETURN_IF_ERROR(read_decoder(where_, find_field(root, "decoder"), byte_level_, out_.decoder, replaces_));
    RETURN_IF_ERROR(index_tokens());
    RETURN_IF_ERROR(bpe_options(*model.value()));
    RETURN_IF_ERROR(merges(*model.value()));
    return read_post_processor(where_, find_field(root, "post_processor"), out_);
  }

 private:
  Status bad(const std::string& field, const std::string& why) const { return where_.bad(field, why); }
  std::string at(const std::string& field) const { return where_.at(field); }

  Status token(int64_t id, const std::string& content, const std::string& field) {
    if (id < 0 || id > kMaxTokenId)
      return bad(field, "id of " + in_quotes(content) + ": expected an integer from 0 to " +
                            std::to_string(kMaxTokenId) + ", got " + std::to_string(id));
    if (static_cast<size_t>(id) >= out_.tokens.size()) out_.tokens.resize(id + 1);
    Tokenizer::Impl::Token& slot = out_.tokens[id];
    if (slot.known)
      return bad(field,
                 "id " + std::to_string(id) + " is both " + in_quotes(slot.content) + " and " + in_quotes(content));
    slot.known = true;
    slot.content = content;
    return ok();
  }

  Status vocabulary(const json& model) {
    JsonFields fields(model, at("model"));
    std::string type = fields.string_or("type", "BPE");
    RETURN_IF_ERROR(fields.status());
    if (type != "BPE") return bad("model.type", in_quotes(type) + " is not supported, only \"BPE\"");
    auto vocab = get_object(model, "vocab", at("model"));
    if (!vocab.ok()) return vocab.error();
    if (vocab.value()->empty()) return bad("model.vocab", "is empty");
    vocab_ids_.reserve(vocab.value()->size());
    for (auto& [content, id] : vocab.value()->items()) {
      if (!id.is_number_integer() || (id.is_number_unsigned() && id.get<uint64_t>() > uint64_t{INT64_MAX}))
        return bad("model.vocab", "id of " + in_quotes(content) + ": expected an integer from 0 to " +
                                      std::to_string(kMaxTokenId) + ", got " + id.dump(-1, ' ', true).substr(0, 40));
      RETURN_IF_ERROR(token(id.get<int64_t>(), content, "model.vocab"));
      vocab_ids_.emplace(content, id.get<int32_t>());
    }
    return ok();
  }

  Status added_tokens(const json& root) {
    const json* list = find_field(root, "added_tokens");
    if (list == nullptr) return ok();
    if (!list->is_array()) return bad("added_tokens", "expected an array");
    if (list->size() > kMaxAddedTokens)
      return bad("added_tokens", std::to_string(list->size()) + " tokens, at most " + std::to_string(kMaxAddedTokens) +
                                     " are supported");
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
      RETURN_IF_ERROR(fields.status());
      if (added.content.empty()) return bad(field + ".content", "is empty");
      if (added.content.size() > kMaxAddedTokenBytes)
        return bad(field + ".content", "longer than " + std::to_string(kMaxAddedTokenBytes) + " bytes");
      if (!seen.emplace(added.content, added.id).second)
        return bad(field + ".content", in_quotes(added.content) + " was added before");
      auto in_vocab = vocab_ids_.find(added.content);
      if (in_vocab == vocab_ids_.end()) {
        RETURN_IF_ERROR(token(added.id, added.content, field));
      } else if (in_vocab->second != added.id) {
        return bad(field + ".id", in_quotes(added.content) + " is " + std::to_string(added.id) + " here and " +
                                      std::to_string(in_vocab->second) + " in model.vocab");
      }
      out_.tokens[added.id].special = added.special;
      std::string pattern = added.normalized ? normalize(out_.normalizer, added.content) : added.content;
      if (pattern.empty()) return bad(field + ".content", "normalizes to nothing");
      // Hugging Face's tokenizers decodes the token to what was looked for, from version 0.23 on.
      // (With skip_special_tokens it then no longer knows it for a special one; we do.)
      if (pattern != added.content) decoded_as_[added.id] = pattern;
      (added.normalized ? out_.added_normalized : out_.added).add(added, pattern);
    }
    return ok();
  }

  // Fills in each token's piece and the look-up tables; from here on out_.tokens keeps its size.
  Status index_tokens() {
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
        // A token that is not all byte characters decodes to itself, and no word is it.
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
    return ok();
  }

  Status bpe_options(const json& model) {
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
    RETURN_IF_ERROR(fields.status());
    if (dropout != 0) return bad("model.dropout", "is not supported: encoding must not be random");
    if (!prefix.empty()) return bad("model.continuing_subword_prefix", "is not supported");
    if (!suffix.empty()) return bad("model.end_of_word_suffix", "is not supported");
    if (has_unk) {
      auto id = vocab_ids_.find(unk);
      if (id == vocab_ids_.end()) return bad("model.unk_token", in_quotes(unk) + " is not in model.vocab");
      bpe.unk = id->second;
    }
    bpe.byte_ids.fill(-1);
    if (byte_level_) {
      for (int b = 0; b < 256; ++b) {
        char byte = static_cast<char>(b);
        auto id = bpe.ids.find(std::string_view(&byte, 1));
        if (id == bpe.ids.end()) return bad("model.vocab", missing_byte(b));
        bpe.byte_ids[b] = id->second;
      }
      bpe.byte_fallback = false;  // never needed: every byte is known
    } else if (bpe.byte_fallback) {
      for (int b = 0; b < 256; ++b) {
        char name[16];
        std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(b));
        auto id = vocab_ids_.find(name);
        if (id == vocab_ids_.end()) return bad("model.vocab", missing_byte(b) + " (\"" + name + "\")");
        bpe.byte_ids[b] = id->second;
      }
    } else if (bpe.unk < 0) {
      return bad("model", "without byte_fallback, unk_token or ByteLevel some text has no tokens");
    }
    return ok();
  }

  static std::string missing_byte(int byte) {
    return "the token of byte " + std::to_string(byte) + " is missing, so some text has no tokens";
  }

  Status merges(const json& model) {
    auto list = get_array(model, "merges", at("model"));
    if (!list.ok()) return list.error();
    out_.bpe.reserve_merges(list.value()->size());
    uint32_t rank = 0;
    for (const json& merge : *list.value()) {
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
      if (!good) return bad(field(), "expected \"left right\" or [\"left\", \"right\"]");
      int32_t ids[3];
      std::string merged = std::string(parts[0]) + std::string(parts[1]);
      std::string_view contents[] = {parts[0], parts[1], merged};
      for (int i = 0; i < 3; ++i) {
        auto id = vocab_ids_.find(std::string(contents[i]));
        if (id == vocab_ids_.end()) return bad(field(), in_quotes(contents[i]) + " is not in model.vocab");
        ids[i] = id->second;
      }
      out_.bpe.add_merge(ids[0], ids[1], rank++, ids[2]);
    }
    return ok();
  }

  TokenizerFile where_;
  std::string file_;
  Tokenizer::Impl& out_;
  bool byte_level_ = false;
  std::unordered_map<std::string, int32_t> vocab_ids_;   // model.vocab alone
  Replaces replaces_;                                    // the decoder's
  std::unordered_map<int32_t, std::string> decoded_as_;  // where not the content
};

}  // namespace

Status load_tokenizer(std::string_view json_text, const std::string& file, Tokenizer::Impl& out) {
  auto root = parse_json(json_text, file, {.max_bytes = kMaxTokenizerBytes, .max_values = kMaxTokenizerValues});
  if (!root.ok()) return root.error();
  return TokenizerLoader(file, out).load(root.value());
}

}  // namespace xpyd
