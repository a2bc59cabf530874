// Template text -> tokens, with trim_blocks and lstrip_blocks on, as transformers renders chats.

#include <algorithm>
#include <charconv>

#include "base/utf8.h"
#include "model/jinja_tree.h"

namespace xpyd::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name(char c) { return is_digit(c) || c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

std::string unified_newlines(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\r')
      out += text[i];
    else if (i + 1 >= text.size() || text[i + 1] != '\n')
      out += '\n';
  }
  if (out.ends_with('\n')) out.pop_back();  // keep_trailing_newline is off
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) root();
    add(Token::Kind::end, "end of the template");
    return std::move(tokens_);
  }

 private:
  void add(Token::Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  [[noreturn]] void fail(const std::string& why) const { throw Fault{why, line_}; }
  bool here(std::string_view text, size_t at) const { return source_.compare(at, text.size(), text) == 0; }
  void go(size_t to) {
    line_ += int(std::count(source_.begin() + at_, source_.begin() + to, '\n'));
    line_begins_ = to > at_ ? source_[to - 1] == '\n' : line_begins_;
    at_ = to;
  }

  // Data up to `end`, where a tag with this sign begins.
  void data(size_t end, char sign, bool is_output) {
    std::string_view text = std::string_view(source_).substr(at_, end - at_);
    if (sign == '-') {
      text = text.substr(0, trailing_space(text));
    } else if (sign != '+' && !is_output) {
      const size_t line = text.rfind('\n') + 1;  // 0 where there is none
      if ((line > 0 || line_begins_) && skip_space(text, line) == text.size()) text = text.substr(0, line);
    }
    if (!text.empty()) add(Token::Kind::data, std::string(text));
    go(end);
  }

  char sign_at(size_t at) const {
    return at < source_.size() && (source_[at] == '-' || source_[at] == '+') ? source_[at] : 0;
  }

  // Where what follows a closing bracket at `at` begins.
  size_t after(size_t at, char sign, bool trims_newline) const {
    at += 2;
    if (sign == '-') return skip_space(source_, at);
    return at + (sign == 0 && trims_newline && at < source_.size() && source_[at] == '\n');
  }

  void root() {
    size_t at = at_;
    for (; at < source_.size(); ++at)
      if (here("{{", at) || here("{%", at) || here("{#", at)) break;
    if (at == source_.size()) {
      add(Token::Kind::data, source_.substr(at_));
      return go(at);
    }
    const char sign = sign_at(at + 2), what = source_[at + 1];
    data(at, sign, what == '{');
    const size_t inside = at + 2 + (sign != 0);
    if (what == '#') return comment(inside);
    if (what == '%' && raw(inside)) return;
    add(Token::Kind::op, what == '{' ? "{{" : "{%");
    go(inside);
    tag(what == '{' ? "}}" : "%}");
  }

  void comment(size_t inside) {
    const size_t end = source_.find("#}", inside);
    if (end == source_.npos) fail("a comment {# is not closed");
    go(after(end, end > inside ? sign_at(end - 1) : 0, true));
  }

  bool raw(size_t inside) {
    size_t at = skip_space(source_, inside);
    if (!here("raw", at)) return false;
    at = skip_space(source_, at + 3);
    if (here("-%}", at))
      at = skip_space(source_, at + 3);
    else if (here("%}", at))
      at += 2;
    else
      return false;
    go(at);
    for (size_t end = at; (end = source_.find("{%", end)) != source_.npos; end += 2) {
      const char sign = sign_at(end + 2);
      size_t word = skip_space(source_, end + 2 + (sign != 0));
      if (!here("endraw", word)) continue;
      word = skip_space(source_, word + 6);
      const char closing = sign_at(word);
      if (!here("%}", word + (closing != 0))) continue;
      data(end, sign, false);
      go(after(word + (closing != 0), closing, true));
      return true;
    }
    fail("{% raw %} is not closed");
  }

  void tag(std::string_view closing) {
    std::string open;  // brackets that wait for their partner
    const bool is_output = closing == "}}";
    for (;;) {
      go(skip_space(source_, at_));
      if (at_ >= source_.size()) fail("a tag is not closed");
      char sign = sign_at(at_);
      if (is_output && sign == '+') sign = 0;
      if (open.empty() && here(closing, at_ + (sign != 0))) {
        add(Token::Kind::op, std::string(closing));
        return go(after(at_ + (sign != 0), sign, !is_output));
      }
      const char c = source_[at_];
      if (is_digit(c))
        number();
      else if (is_name(c))
        word();
      else if (c == '\'' || c == '"')
        text(c);
      else
        symbol(open);
    }
  }

  void number() {
    size_t end = at_;
    while (end < source_.size() && is_digit(source_[end])) ++end;
    const bool fraction = source_[end] == '.' && end + 1 < source_.size() && is_digit(source_[end + 1]);
    const bool zeros = source_[at_] == '0' && end > at_ + 1;
    if (fraction || zeros || (end < source_.size() && is_name(source_[end])))
      fail("a number that is no decimal integer is not supported");
    add(Token::Kind::integer, source_.substr(at_, end - at_));
    go(end);
  }

  void word() {
    size_t end = at_;
    while (end < source_.size() && is_name(source_[end])) ++end;
    add(Token::Kind::name, source_.substr(at_, end - at_));
    go(end);
  }

  void text(char quote) {
    std::string out;
    size_t at = at_ + 1;
    for (; at < source_.size() && source_[at] != quote; ++at) {
      if (source_[at] != '\\') {
        out += source_[at];
        continue;
      }
      if (++at >= source_.size()) break;
      const char c = source_[at];
      static constexpr std::string_view kPlain = "\\'\"nrt", kMeans = "\\'\"\n\r\t";
      if (const size_t known = kPlain.find(c); known != kPlain.npos) {
        out += kMeans[known];
        continue;
      }
      const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 0;
      const std::string hex = source_.substr(at + 1, digits);
      uint32_t value = 0;
      auto [end, error] = std::from_chars(hex.data(), hex.data() + hex.size(), value, 16);
      if (digits == 0 || error != std::errc() || end != hex.data() + digits || (value >= 0xd800 && value < 0xe000))
        fail("the escape \\" + std::string(1, c) + " in a string is not supported");
      append_utf8(out, value);
      at += digits;
    }
    if (at >= source_.size()) fail("a string is not closed");
    add(Token::Kind::text, out);
    go(at + 1);
  }

  void symbol(std::string& open) {
    static constexpr std::string_view kLong[] = {"//", "**", "==", "!=", ">=", "<="};
    std::string op = source_.substr(at_, 1);
    for (std::string_view two : kLong)
      if (here(two, at_)) op = two;
    const size_t bracket = std::string_view("([{").find(op[0]), closes = std::string_view(")]}").find(op[0]);
    if (bracket != std::string_view::npos) {
      open += ")]}"[bracket];
    } else if (closes != std::string_view::npos) {
      if (open.empty() || open.back() != op[0]) fail("unexpected '" + op + "'");
      open.pop_back();
    } else if (op.size() == 1 && std::string_view("+-/*%~><=.:|,;").find(op[0]) == std::string_view::npos) {
      fail("unexpected character '" + op + "'");
    }
    add(Token::Kind::op, op);
    go(at_ + op.size());
  }

  const std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_begins_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> lex(std::string_view source) {
  if (!is_utf8(source)) throw Fault{"the template is not UTF-8"};
  return Lexer(unified_newlines(source)).run();
}

}  // namespace xpyd::jinja
