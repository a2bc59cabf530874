#include "model/tokenizer_steps.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/utf8.h"

namespace xpyd {

using nlohmann::json;

std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 40;
  std::string cut = replace_invalid_utf8(text.substr(0, kLongest));
  std::string out = json_text(cut);
  return text.size() > kLongest ? out + "..." : out;
}

namespace {

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

}  // namespace

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

}  // namespace xpyd
