#include "model/pretokenize.h"

#include "base/utf8.h"
#include "model/unicode.h"

namespace xpyd::model {
namespace {

enum class Class { end, letter, number, newline, space, other };  // newline: \r or \n

struct Char {
  Class kind;
  uint32_t code_point;
  size_t bytes;
};

// One regex, alternative by alternative, at a position in the text. The comments name the alternative.
class Scanner {
 public:
  Scanner(SplitPattern pattern, std::string_view text) : pattern_(pattern), text_(text) {}

  // End of the match that begins at `begin`, which is before the end of the text.
  size_t match_end(size_t begin) const {
    Char first = at(begin);
    if (size_t end = contraction(begin)) return end;
    return pattern_ == SplitPattern::gpt2 ? gpt2(begin, first) : modern(begin, first);
  }

 private:
  Char at(size_t i) const {
    if (i >= text_.size()) return {Class::end, 0, 0};
    CodePoint c = next_code_point(text_.substr(i));
    Class kind = c.value == '\r' || c.value == '\n' ? Class::newline
                 : unicode::is_letter(c.value)      ? Class::letter
                 : unicode::is_space(c.value)       ? Class::space
                 : unicode::is_number(c.value)      ? Class::number
                                                    : Class::other;
    return {kind, c.value, static_cast<size_t>(c.bytes)};
  }
  // End of the run of `kind` from i on, of at most `most` characters.
  size_t run(size_t i, Class kind, size_t most = SIZE_MAX) const {
    for (Char c = at(i); most > 0 && c.kind == kind; --most, c = at(i)) i += c.bytes;
    return i;
  }

  // (?i:'s|'t|'re|'ve|'m|'ll|'d), for gpt2 without (?i: ; U+017F is an s when case is ignored.
  size_t contraction(size_t i) const {
    if (text_[i] != '\'') return 0;
    bool any_case = pattern_ != SplitPattern::gpt2;
    auto letter = [&](size_t at) -> char {
      if (at >= text_.size()) return 0;
      char c = text_[at];
      if (any_case && text_.substr(at, 2) == "\xc5\xbf") return 's';
      return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c;
    };
    char a = letter(i + 1), b = letter(i + 2);
    if (a == 's') return i + 1 + at(i + 1).bytes;
    if (a == 't' || a == 'm' || a == 'd') return i + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return i + 3;
    return 0;
  }

  //  ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  size_t gpt2(size_t begin, Char first) const {
    size_t i = first.code_point == ' ' ? begin + 1 : begin;
    Class kind = at(i).kind;
    if (kind == Class::letter || kind == Class::number || kind == Class::other) return run(i, kind);
    return spaces(begin);
  }

  size_t modern(size_t begin, Char first) const {
    // [^\r\n\p{L}\p{N}]?\p{L}+
    if (first.kind == Class::letter) return run(begin, Class::letter);
    Char second = at(begin + first.bytes);
    if ((first.kind == Class::space || first.kind == Class::other) && second.kind == Class::letter)
      return run(begin + first.bytes, Class::letter);
    // \p{N}{1,3}, for qwen2 \p{N}
    if (first.kind == Class::number) return run(begin, Class::number, pattern_ == SplitPattern::llama3 ? 3 : 1);
    //  ?[^\s\p{L}\p{N}]+[\r\n]*
    size_t i = first.code_point == ' ' ? begin + 1 : begin;
    if (at(i).kind == Class::other) return run(run(i, Class::other), Class::newline);
    // \s*[\r\n]+|\s+(?!\S)|\s+
    return spaces(begin);
  }

  // `begin` is at a white space character.
  size_t spaces(size_t begin) const {
    size_t end = begin, last = begin, after_newline = 0;  // last: begin of the run's last character
    for (Char c = at(end); c.kind == Class::space || c.kind == Class::newline; c = at(end)) {
      last = end;
      end += c.bytes;
      if (c.kind == Class::newline) after_newline = end;
    }
    // \s* gives back until a line break follows: the match ends after the run's last one.
    if (pattern_ != SplitPattern::gpt2 && after_newline != 0) return after_newline;
    // \s+(?!\S) leaves the last one to the word that follows; alone, it is \s+.
    return end == text_.size() || last == begin ? end : last;
  }

  SplitPattern pattern_;
  std::string_view text_;
};

struct Known {
  SplitPattern pattern;
  const char* regex;
};
const Known kKnown[] = {
    {SplitPattern::gpt2, R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {SplitPattern::llama3,
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {SplitPattern::qwen2,
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
};

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

const char* const kKnownSplitPatterns = "GPT-2, Llama 3, Qwen 2";

std::optional<SplitPattern> find_split_pattern(std::string_view regex) {
  for (const Known& known : kKnown)
    if (regex == known.regex) return known.pattern;
  return std::nullopt;
}

void split_text(SplitPattern pattern, std::string_view text, std::vector<std::string_view>& out) {
  Scanner scanner(pattern, text);
  for (size_t begin = 0; begin < text.size();) {
    size_t end = scanner.match_end(begin);
    out.push_back(text.substr(begin, end - begin));
    begin = end;
  }
}

void pre_tokenize(const std::vector<PreTokenizerStep>& steps, std::string_view text, bool at_start, Words& out) {
  out.views.assign(1, text);
  out.owned.clear();
  std::vector<std::string_view> before;
  for (const PreTokenizerStep& step : steps) {
    before.swap(out.views);
    out.views.clear();
    for (std::string_view word : before) {
      switch (step.kind) {
        case PreTokenizerStep::Kind::split: split_text(step.pattern, word, out.views); break;
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
