#include "model/tokenizer_added.h"

#include <algorithm>

#include "base/utf8.h"
#include "model/unicode.h"

namespace xpyd {
namespace {

// The character that ends just before `at`, which is not 0.
CodePoint code_point_before(std::string_view text, size_t at) {
  size_t begin = at - 1;
  while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xc0) == 0x80) --begin;
  return next_code_point(text.substr(begin));
}

bool touches_word(std::string_view text, size_t begin, size_t end) {
  return (begin > 0 && unicode::is_word(code_point_before(text, begin).value)) ||
         (end < text.size() && unicode::is_word(next_code_point(text.substr(end)).value));
}

size_t skip_spaces_left(std::string_view text, size_t at) {
  while (at > 0) {
    CodePoint c = code_point_before(text, at);
    if (!unicode::is_space(c.value)) break;
    at -= c.bytes;
  }
  return at;
}

size_t skip_spaces_right(std::string_view text, size_t at) {
  while (at < text.size()) {
    CodePoint c = next_code_point(text.substr(at));
    if (!unicode::is_space(c.value)) break;
    at += c.bytes;
  }
  return at;
}

}  // namespace

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
    // A match that is refused below still uses up its text, as in Hugging Face's tokenizers.
    at = end;
    if (token.special && !part->parse_special) continue;
    if (token.single_word && touches_word(text, begin, end)) continue;
    if (token.lstrip) begin = std::max(done, skip_spaces_left(text, begin));
    if (token.rstrip) end = skip_spaces_right(text, end);
    if (done < begin) out.push_back({done, begin, -1});
    out.push_back({begin, end, token.id});
    done = end;
  }
  if (done != text.size()) out.push_back({done, text.size(), -1});
}

}  // namespace xpyd
