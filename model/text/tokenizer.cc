#include "model/text/tokenizer.h"

#include <algorithm>

#include "base/utf8.h"
#include "model/folder.h"
#include "model/text/tokenizer_impl.h"
#include "model/unicode.h"

namespace xpyd::model {

Tokenizer::Tokenizer() : impl_(std::make_unique<Impl>()) {}
Tokenizer::~Tokenizer() = default;

Result<std::unique_ptr<const Tokenizer>> Tokenizer::load(const std::string& dir) {
  std::string path = dir + "/tokenizer.json";
  auto text = read_model_file(path, kMaxTokenizerBytes);
  if (!text.ok()) return text.error();
  return parse(text.value(), path);
}

Result<std::unique_ptr<const Tokenizer>> Tokenizer::parse(std::string_view json_text, const std::string& file_name) {
  std::unique_ptr<Tokenizer> tokenizer(new Tokenizer());
  Status loaded = load_tokenizer(json_text, file_name, *tokenizer->impl_);
  if (!loaded.ok()) return loaded.error();
  return std::unique_ptr<const Tokenizer>(std::move(tokenizer));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  const Part part{text, true};
  return encode(std::span(&part, 1), add_special_tokens);
}

std::vector<int32_t> Tokenizer::encode(std::span<const Part> parts, bool add_special_tokens) const {
  if (parts.size() == 1 && is_utf8(parts[0].text))
    return impl_->encode(parts[0].text, {{parts[0].text.size(), parts[0].parse_special_tokens}}, add_special_tokens);
  std::string text;
  std::vector<AddedTokens::Part> borders;
  for (const Part& part : parts) {
    text += replace_invalid_utf8(part.text);
    borders.push_back({text.size(), part.parse_special_tokens});
  }
  return impl_->encode(text, borders, add_special_tokens);
}

std::vector<int32_t> Tokenizer::Impl::encode(std::string_view text, const std::vector<AddedTokens::Part>& parts,
                                             bool add_special_tokens) const {
  std::vector<int32_t> ids;
  Bpe::Workspace space;
  Matching matching(text.size());
  if (add_special_tokens) ids = prefix;
  std::vector<AddedTokens::Piece> pieces;
  added.split(text, parts, pieces);
  auto part = parts.begin();
  for (const AddedTokens::Piece& piece : pieces) {
    if (piece.id >= 0) {
      ids.push_back(piece.id);
      continue;
    }
    // The parts of this piece, counted from its beginning.
    while (part->end <= piece.begin) ++part;
    std::vector<AddedTokens::Part> inside;
    for (auto at = part; inside.empty() || inside.back().end < piece.end - piece.begin; ++at)
      inside.push_back({std::min(at->end, piece.end) - piece.begin, at->parse_special});
    encode_segment(text.substr(piece.begin, piece.end - piece.begin), inside, piece.begin == 0, matching, space, ids);
  }
  if (add_special_tokens) ids.insert(ids.end(), suffix.begin(), suffix.end());
  return ids;
}

void Tokenizer::Impl::encode_segment(std::string_view text, const std::vector<AddedTokens::Part>& parts, bool at_start,
                                     Matching& matching, Bpe::Workspace& space, std::vector<int32_t>& out) const {
  const std::string_view original = text;
  std::string normalized;
  if (!normalizer.empty()) {
    normalized = normalize(normalizer, text);
    text = normalized;
  }
  bool parse_special = std::all_of(parts.begin(), parts.end(),
                                   [](const AddedTokens::Part& p) { return p.parse_special; });
  Words words;
  auto encode_words = [&](std::string_view stretch, bool first) {
    pre_tokenize(pre_tokenizer, stretch, first, matching, words);
    for (std::string_view word : words.views) bpe.encode(word, parse_special, space, out);
  };
  if (added_normalized.empty()) return encode_words(text, at_start);

  // Borders of the parts in normalized text, if it equals the parts' normalized texts in a row. Otherwise, as with a
  // border inside a composed character, no special token is parsed.
  std::vector<AddedTokens::Part> borders;
  if (parts.size() > 1 && added_normalized.any_special()) {
    std::string joined;
    for (size_t begin = 0; const AddedTokens::Part& part : parts) {
      joined += normalize(normalizer, original.substr(begin, part.end - begin), begin == 0);
      borders.push_back({joined.size(), part.parse_special});
      begin = part.end;
    }
    if (joined != text) borders.clear();
  }
  if (borders.empty()) borders = {{text.size(), parse_special}};
  std::vector<AddedTokens::Piece> pieces;
  added_normalized.split(text, borders, pieces);
  for (const AddedTokens::Piece& piece : pieces) {
    if (piece.id >= 0)
      out.push_back(piece.id);
    else
      encode_words(text.substr(piece.begin, piece.end - piece.begin), at_start && piece.begin == 0);
  }
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, bool skip_special_tokens) const {
  Detokenizer detokenizer(*this, skip_special_tokens);
  std::string text;
  for (int32_t id : ids) text += detokenizer.feed(id);
  return text + detokenizer.flush();
}

const std::string& Tokenizer::piece(int32_t id) const {
  static const std::string kNone;
  return id >= 0 && id < vocab_size() ? impl_->tokens[id].piece : kNone;
}

bool Tokenizer::is_special(int32_t id) const { return id >= 0 && id < vocab_size() && impl_->tokens[id].special; }

bool Tokenizer::strips_leading_space() const { return impl_->decoder.strip_space || impl_->decoder.strip_first_token; }

int Tokenizer::vocab_size() const { return static_cast<int>(impl_->tokens.size()); }

int32_t Tokenizer::token_id(std::string_view content) const {
  auto at = impl_->by_content.find(content);
  return at == impl_->by_content.end() ? -1 : at->second;
}

std::string Detokenizer::feed(int32_t id) {
  XPYD_CHECK(tokenizer_ != nullptr);
  const Tokenizer::Impl& impl = *tokenizer_->impl_;
  if (id < 0 || id >= tokenizer_->vocab_size()) return "";
  const Tokenizer::Impl::Token& token = impl.tokens[id];
  if (!token.known || (skip_special_ && token.special)) return "";

  if (impl.decoder.byte_level) {
    pending_ += token.piece;
    size_t waiting = unfinished_utf8_suffix(pending_);
    std::string ready = replace_invalid_utf8(std::string_view(pending_).substr(0, pending_.size() - waiting));
    pending_.erase(0, pending_.size() - waiting);
    return ready;
  }
  if (token.is_byte) {
    pending_ += token.piece;
    return "";
  }
  std::string text = end_run();
  if (first_ && impl.decoder.strip_first_token) {
    first_ = false;
    return text + token.first_piece;
  }
  return stripped(std::move(text) + token.piece);
}

std::string Detokenizer::flush() {
  if (tokenizer_ == nullptr) return "";
  if (!tokenizer_->impl_->decoder.byte_level) return stripped(end_run());
  std::string text = replace_invalid_utf8(pending_);
  pending_.clear();
  return text;
}

// Returns the text of the run of byte tokens: as a whole if valid, else one U+FFFD per token.
std::string Detokenizer::end_run() {
  std::string text;
  if (is_utf8(pending_))
    text = pending_;
  else
    for (size_t i = 0; i < pending_.size(); ++i) text += kReplacementCharacter;
  pending_.clear();
  return text;
}

std::string Detokenizer::stripped(std::string text) {
  if (!first_ || text.empty()) return text;
  first_ = false;
  if (tokenizer_->impl_->decoder.strip_space && text[0] == ' ') text.erase(0, 1);
  return text;
}

// ---- Added tokens

void AddedTokens::add(const AddedToken& token, std::string_view pattern) {
  uint32_t node = 0;
  for (char c : pattern) {
    uint64_t edge = uint64_t{node} << 8 | static_cast<uint8_t>(c);
    auto [at, fresh] = edges_.try_emplace(edge, static_cast<uint32_t>(ends_.size()));
    if (fresh) ends_.push_back(-1);
    node = at->second;
  }
  if (ends_[node] >= 0) return;
  ends_[node] = static_cast<int32_t>(tokens_.size());
  begins_[static_cast<uint8_t>(pattern[0])] = true;
  tokens_.push_back(token);
}

int32_t AddedTokens::longest(std::string_view text, size_t at, size_t* bytes) const {
  int32_t found = -1;
  uint32_t node = 0;
  for (size_t i = at; i < text.size(); ++i) {
    auto edge = edges_.find(uint64_t{node} << 8 | static_cast<uint8_t>(text[i]));
    if (edge == edges_.end()) break;
    node = edge->second;
    if (ends_[node] >= 0) found = ends_[node], *bytes = i + 1 - at;
  }
  return found;
}

bool AddedTokens::any_special() const {
  return std::any_of(tokens_.begin(), tokens_.end(), [](auto& token) { return token.special; });
}

void AddedTokens::split(std::string_view text, const std::vector<Part>& parts, std::vector<Piece>& out) const {
  out.clear();
  size_t done = 0;  // text before this is in `out`
  auto part = parts.begin();
  for (size_t at = 0; at < text.size();) {
    while (part->end <= at) ++part;
    size_t bytes = 0;
    int32_t index = -1;
    if (begins_[static_cast<uint8_t>(text[at])]) index = longest(text.substr(0, part->end), at, &bytes);
    if (index < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[index];
    size_t begin = at, end = at + bytes;
    // A match that is refused below still consumes its text, as in Hugging Face's tokenizers.
    at = end;
    if (token.special && !part->parse_special) continue;
    using namespace unicode;
    const bool in_word = begin_of_run(text, begin, is_word, 1) < begin || end_of_run(text, end, is_word, 1) > end;
    if (token.single_word && in_word) continue;
    if (token.lstrip) begin = std::max(done, begin_of_run(text, begin, is_space));
    if (token.rstrip) end = end_of_run(text, end, is_space);
    if (done < begin) out.push_back({done, begin, -1});
    out.push_back({begin, end, token.id});
    done = end;
  }
  if (done != text.size()) out.push_back({done, text.size(), -1});
}

}  // namespace xpyd::model
