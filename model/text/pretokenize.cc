#include "model/text/pretokenize.h"

#include <algorithm>
#include <utility>

#include "model/unicode.h"

namespace xpyd::model {
namespace {

constexpr std::pair<const char*, SplitBehavior> kBehaviors[] = {
    {"Isolated", SplitBehavior::isolated},
    {"Removed", SplitBehavior::removed},
    {"MergedWithPrevious", SplitBehavior::merged_with_previous},
    {"MergedWithNext", SplitBehavior::merged_with_next},
    {"Contiguous", SplitBehavior::contiguous},
};

// As Hugging Face's NormalizedString::split: empty matches count as pieces while pieces are joined.
void split(const PreTokenizerStep& step, std::string_view text, Matching& matching, std::vector<Regex::Piece>& pieces,
           std::vector<std::string_view>& out) {
  step.regex->cut(text, matching, pieces);
  if (step.invert)
    for (Regex::Piece& piece : pieces) piece.match = !piece.match;
  const bool forward = step.behavior != SplitBehavior::merged_with_next;
  if (!forward) std::reverse(pieces.begin(), pieces.end());
  size_t n = 0;  // words, at the vector's begin
  bool before = false;
  for (const Regex::Piece piece : pieces) {
    bool join = false;
    switch (step.behavior) {
      case SplitBehavior::isolated: break;
      case SplitBehavior::removed:
        if (piece.match) continue;
        break;
      case SplitBehavior::merged_with_previous:
      case SplitBehavior::merged_with_next: join = piece.match && !before; break;
      case SplitBehavior::contiguous: join = piece.match == before; break;
    }
    before = piece.match;
    if (!join || n == 0)
      pieces[n++] = piece;
    else if (forward)
      pieces[n - 1].end = piece.end;
    else
      pieces[n - 1].begin = piece.begin;
  }
  pieces.resize(n);
  if (!forward) std::reverse(pieces.begin(), pieces.end());
  for (const Regex::Piece& piece : pieces)
    if (piece.begin < piece.end) out.push_back(text.substr(piece.begin, piece.end - piece.begin));
}

void metaspace(const PreTokenizerStep& step, std::string_view text, bool at_start, Words& out) {
  std::string& word = out.owned.emplace_back(text);
  replace_all(word, " ", step.replacement);
  using Prepend = PreTokenizerStep::Prepend;
  bool wanted = step.prepend == Prepend::always || (step.prepend == Prepend::first && at_start);
  if (wanted && !word.starts_with(step.replacement)) word.insert(0, step.replacement);
  std::string_view rest = word;
  while (step.split_words) {
    size_t cut = rest.find(step.replacement, 1);
    if (cut == rest.npos) break;
    out.views.push_back(rest.substr(0, cut));
    rest.remove_prefix(cut);
  }
  out.views.push_back(rest);
}

}  // namespace

std::optional<SplitBehavior> find_split_behavior(std::string_view name) {
  for (const auto& [known, behavior] : kBehaviors)
    if (name == known) return behavior;
  return std::nullopt;
}

void pre_tokenize(const std::vector<PreTokenizerStep>& steps, std::string_view text, bool at_start, Matching& matching,
                  Words& out) {
  out.views.assign(1, text);
  out.owned.clear();
  std::vector<std::string_view> before;
  std::vector<Regex::Piece> pieces;
  for (const PreTokenizerStep& step : steps) {
    before.swap(out.views);
    out.views.clear();
    for (std::string_view word : before) {
      switch (step.kind) {
        case PreTokenizerStep::Kind::split: split(step, word, matching, pieces, out.views); break;
        case PreTokenizerStep::Kind::add_space:
          if (!word.starts_with(' ')) word = out.owned.emplace_back(" " + std::string(word));
          out.views.push_back(word);
          break;
        case PreTokenizerStep::Kind::metaspace:
          metaspace(step, word, at_start && word.data() == before.front().data(), out);
          break;
      }
    }
  }
}

void replace_all(std::string& text, std::string_view pattern, std::string_view content) {
  size_t at = text.find(pattern);
  if (at == text.npos) return;
  std::string out;
  size_t done = 0;
  for (; at != text.npos; at = text.find(pattern, done)) {
    out.append(text, done, at - done).append(content);
    done = at + pattern.size();
  }
  out.append(text, done);
  text = std::move(out);
}

std::string normalize(const std::vector<NormalizerStep>& steps, std::string_view text, bool begins) {
  std::string out(text);
  for (const NormalizerStep& step : steps) {
    switch (step.kind) {
      case NormalizerStep::Kind::prepend:
        if (begins && !out.empty()) out.insert(0, step.content);
        break;
      case NormalizerStep::Kind::replace: replace_all(out, step.pattern, step.content); break;
      case NormalizerStep::Kind::nfc: out = unicode::nfc(out); break;
    }
  }
  return out;
}

}  // namespace xpyd::model
