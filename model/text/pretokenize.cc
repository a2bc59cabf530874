#include "model/text/pretokenize.h"

#include <utility>

#include "model/unicode.h"

namespace xpyd::model {
namespace {

void metaspace(const PreTokenizerStep& step, std::string_view text, bool at_start, Words& out) {
  std::string& word = out.owned.emplace_back(text);
  replace_all(word, " ", step.replacement);
  using Prepend = PreTokenizerStep::Prepend;
  bool wanted = step.prepend == Prepend::always || (step.prepend == Prepend::first && at_start);
  if (wanted && !word.starts_with(step.replacement)) word.insert(0, step.replacement);
  out.views.push_back(word);
}

}  // namespace

void pre_tokenize(const std::vector<PreTokenizerStep>& steps, std::string_view text, bool at_start, Words& out) {
  out.views.assign(1, text);
  out.owned.clear();
  std::vector<std::string_view> before;
  std::vector<Regex::Piece> pieces;
  for (const PreTokenizerStep& step : steps) {
    before.swap(out.views);
    out.views.clear();
    for (std::string_view word : before) {
      switch (step.kind) {
        case PreTokenizerStep::Kind::split:
          step.regex->cut(word, pieces);
          for (const Regex::Piece piece : pieces)
            if (piece.begin < piece.end) out.views.push_back(word.substr(piece.begin, piece.end - piece.begin));
          break;
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

std::string normalize(const std::vector<NormalizerStep>& steps, std::string_view text) {
  std::string out(text);
  for (const NormalizerStep& step : steps) {
    switch (step.kind) {
      case NormalizerStep::Kind::prepend:
        if (!out.empty()) out.insert(0, step.content);
        break;
      case NormalizerStep::Kind::replace: replace_all(out, step.pattern, step.content); break;
      case NormalizerStep::Kind::nfc: out = unicode::nfc(out); break;
    }
  }
  return out;
}

}  // namespace xpyd::model
