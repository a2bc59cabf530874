#include "model/text/tokenizer.h"

#include <algorithm>

#include "base/utf8.h"
#include "model/folder.h"
#include "model/text/tokenizer_impl.h"

namespace xpyd::model {
namespace {

constexpr std::string_view kMark = "\xef\xb7\x90";  // U+FDD0, which is never a character

}  // namespace

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

std::vector<int32_t> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  const std::string valid = replace_invalid_utf8(text);
  if (!options.guarded) return impl_->encode(valid, {}, options.add_special_tokens);
  std::string unmarked;
  std::vector<size_t> borders;
  size_t begin = 0;
  for (size_t mark; (mark = valid.find(kMark, begin)) != valid.npos; begin = mark + kMark.size()) {
    unmarked.append(valid, begin, mark - begin);
    borders.push_back(unmarked.size());
  }
  unmarked.append(valid, begin);
  return impl_->encode(unmarked, borders, options.add_special_tokens);
}

std::string Tokenizer::guard(std::string_view text) const {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = size_t(next_code_point(text.substr(at)).bytes);
    out += text.substr(at, bytes);
    if (impl_->added.find(text.substr(at), true)) out += kMark;
    at += bytes;
  }
  return out;
}

std::vector<int32_t> Tokenizer::Impl::encode(std::string_view text, const std::vector<size_t>& borders,
                                             bool add_special_tokens) const {
  std::vector<int32_t> ids;
  Bpe::Workspace space;
  if (add_special_tokens) ids = prefix;
  Words words;
  for (const AddedTokens::Piece& piece : added.split(text, borders)) {
    if (piece.id >= 0) {
      ids.push_back(piece.id);
      continue;
    }
    const auto border = std::upper_bound(borders.begin(), borders.end(), piece.begin);
    const bool allow_special = border == borders.end() || *border >= piece.end;
    const std::string segment = normalize(normalizer, text.substr(piece.begin, piece.end - piece.begin));
    pre_tokenize(pre_tokenizer, segment, piece.begin == 0, words);
    for (std::string_view word : words.views) bpe.encode(word, allow_special, space, ids);
  }
  if (add_special_tokens) ids.insert(ids.end(), suffix.begin(), suffix.end());
  return ids;
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

bool Tokenizer::strips_leading_space() const { return impl_->decoder.strip_space; }

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

void AddedTokens::add(const AddedToken& token) {
  tokens_.emplace(token.content, token);
  lengths_.insert(token.content.size());
  begins_[static_cast<uint8_t>(token.content[0])] = true;
}

const AddedToken* AddedTokens::find(std::string_view text, bool only_special) const {
  if (!begins_[static_cast<uint8_t>(text[0])]) return nullptr;
  for (const size_t bytes : lengths_) {
    const auto found = bytes <= text.size() ? tokens_.find(text.substr(0, bytes)) : tokens_.end();
    if (found != tokens_.end() && (found->second.special || !only_special)) return &found->second;
  }
  return nullptr;
}

std::vector<AddedTokens::Piece> AddedTokens::split(std::string_view text, const std::vector<size_t>& borders) const {
  std::vector<Piece> out;
  size_t done = 0;  // text before this is in `out`
  auto border = borders.begin();
  for (size_t at = 0; at < text.size();) {
    while (border != borders.end() && *border <= at) ++border;
    const size_t end = border == borders.end() ? text.size() : *border;
    const AddedToken* token = find(text.substr(at, end - at), false);
    if (token == nullptr) {
      ++at;
      continue;
    }
    if (done < at) out.push_back({done, at, -1});
    done = at + token->content.size();
    out.push_back({at, done, token->id});
    at = done;
  }
  if (done < text.size()) out.push_back({done, text.size(), -1});
  return out;
}

}  // namespace xpyd::model
