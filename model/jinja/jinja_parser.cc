// Text -> tokens -> tree: the grammar of Jinja's template designer documentation. Unsupported constructs (inheritance,
// includes, unknown operators, filters, tests and methods) are refused by name.
#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/numbers.h"
#include "base/utf8.h"
#include "model/jinja/jinja_eval.h"

namespace xpyd::model::jinja {

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

// trim_blocks and lstrip_blocks are on, as in transformers' chats.
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

  // Takes data up to `end`, where a tag with this sign begins.
  void data(size_t end, char sign, bool is_output) {
    std::string_view text = std::string_view(source_).substr(at_, end - at_);
    if (sign == '-') {
      text = text.substr(0, trailing_space(text));
    } else if (sign != '+' && !is_output) {
      const size_t line = text.rfind('\n') + 1;  // 0 without a newline
      if ((line > 0 || line_begins_) && skip_space(text, line) == text.size()) text = text.substr(0, line);
    }
    if (!text.empty()) add(Token::Kind::data, std::string(text));
    go(end);
  }

  char sign_at(size_t at) const {
    return at < source_.size() && (source_[at] == '-' || source_[at] == '+') ? source_[at] : 0;
  }

  // Returns where the text after a closing bracket at `at` begins.
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
    std::string open;  // closing brackets that are still expected
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
      if (digits == 0 || hex.size() != digits || !read_number(hex, value, 16) || (value >= 0xd800 && value < 0xe000))
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

namespace {

constexpr int kMaxHeight = 200;
// Loosest first; kNone if the token joins no operands.
enum Power { kNone = -1, kOr, kAnd, kNot, kCompare, kSum, kConcat, kProduct, kRefused };

constexpr std::string_view kNoNames = " caller cycler dict joiner kwargs lipsum self super varargs ";
constexpr std::string_view kLoop = " index index0 revindex revindex0 first last length previtem nextitem ";

constexpr std::pair<std::string_view, Power> kOperators[] = {
    {"or", kOr},     {"and", kAnd},    {"==", kCompare}, {"!=", kCompare}, {"<", kCompare},  {"<=", kCompare},
    {">", kCompare}, {">=", kCompare}, {"in", kCompare}, {"+", kSum},      {"-", kSum},      {"~", kConcat},
    {"*", kProduct}, {"%", kProduct},  {"/", kRefused},  {"//", kRefused}, {"**", kRefused},
};

constexpr std::string_view kReserved = " true false none True False None loop ";

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}
  NodePtr run() { return block({}); }

 private:
  const Token& now() const { return tokens_[at_]; }
  const Token& next() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  std::string take() {
    line_ = now().line;
    return at_ + 1 < tokens_.size() ? tokens_[at_++].text : now().text;
  }
  bool skip(std::string_view word) {
    const bool there = now().is(word);
    if (there) take();
    return there;
  }
  [[noreturn]] void fail(const std::string& why) const { throw Fault{why, now().line}; }
  // Reports the token taken last.
  [[noreturn]] void refuse(const std::string& what) const { throw Fault{what + " is not supported", line_}; }
  [[noreturn]] void fail_expected(const std::string& what) const {
    fail("expected " + what + ", found " + (now().kind == Token::Kind::text ? "a string" : "'" + now().text + "'"));
  }
  void expect(std::string_view word) {
    if (!skip(word)) fail_expected("'" + std::string(word) + "'");
  }
  std::string name() {
    if (now().kind != Token::Kind::name) fail_expected("a name");
    return take();
  }

  // Makes a node on the line of the token taken last.
  template <class... Kids>
  NodePtr make(Kind kind, std::string name = "", Kids... kids) const {
    auto node = std::make_unique<Node>(Node{kind, line_, std::move(name)});
    (add(node, std::move(kids)), ...);
    return node;
  }
  NodePtr constant(Value value) const {
    auto node = make(Kind::constant);
    node->value = std::move(value);
    return node;
  }
  void add(const NodePtr& node, NodePtr kid) const {
    if (kid) node->height = std::max(node->height, kid->height + 1);
    if (node->height > kMaxHeight) throw Fault{"nested too deeply", node->line};
    node->kids.push_back(std::move(kid));
  }
  struct Depth {
    explicit Depth(Parser& p) : parser(p) {
      if (++parser.depth_ > kMaxHeight) parser.fail("nested too deeply");
    }
    ~Depth() { --parser.depth_; }
    Parser& parser;
  };

  // ---- Expressions

  NodePtr expression() {
    Depth depth(*this);
    auto node = operation(kOr);
    while (skip("if")) {
      node = make(Kind::conditional, "", std::move(node));
      add(node, operation(kOr));
      add(node, skip("else") ? expression() : nullptr);
    }
    return node;
  }

  Power power_here() const {
    if (now().is("not") && next().is("in")) return kCompare;
    for (const auto& [text, power] : kOperators)
      if (now().is(text)) return power;
    return kNone;
  }

  // Parses operators that bind at least as tightly as `least`.
  NodePtr operation(int least) {
    NodePtr left;
    if (least <= kNot && skip("not")) {
      Depth depth(*this);
      left = make(Kind::not_);
      add(left, operation(kNot));
    } else {
      left = unary(true);
    }
    bool compared = false;
    for (Power power; (power = power_here()) >= least;) {
      std::string op = take();
      if (power == kRefused) refuse("the operator '" + op + "'");
      if (std::exchange(compared, power == kCompare) && compared) refuse("a chain of comparisons");
      if (op == "not") op += " " + take();
      left = make(Kind::binary, op, std::move(left));
      add(left, operation(power + 1));
    }
    return left;
  }

  NodePtr unary(bool with_filters) {
    Depth depth(*this);
    NodePtr node;
    if (skip("-")) {
      node = make(Kind::negative);
      add(node, unary(false));
    } else {
      node = primary();
    }
    node = postfix(std::move(node));
    while (with_filters && (now().is("|") || now().is("is")))
      node = builtin(take() == "|" ? Kind::filter : Kind::test, std::move(node));
    return node;
  }

  NodePtr primary() {
    const Token::Kind kind = now().kind;
    std::string text = now().text;
    if (kind == Token::Kind::integer) {
      int64_t value = 0;
      if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc())
        fail("an integer beyond 64 bits");
      take();
      return constant(value);
    }
    if (skip("(")) return elements(Kind::tuple, ")");
    if (skip("[")) return elements(Kind::list, "]");
    if (skip("{")) return elements(Kind::dict, "}");
    if (kind != Token::Kind::name && kind != Token::Kind::text) fail("unexpected '" + text + "'");
    take();
    if (kind == Token::Kind::text) {
      while (now().kind == Token::Kind::text) text += take();
      return constant(text_value({text}));
    }
    if (among(" true True false False ", text)) return constant(text == "true" || text == "True");
    if (among(" none None ", text)) return constant(None());
    if (among(kNoNames, text)) refuse("'" + text + "'");
    return make(Kind::name, text);
  }

  // Calls each() for the items between commas up to `closing`. Returns true if there was a comma.
  template <class Each>
  bool list(std::string_view closing, Each each) {
    bool comma = false;
    while (!skip(closing)) {
      each();
      if (!now().is(closing)) expect(","), comma = true;
    }
    return comma;
  }

  // One expression in round brackets is not a tuple.
  NodePtr elements(Kind kind, std::string_view closing) {
    auto node = make(kind);
    const bool comma = list(closing, [&] {
      add(node, expression());
      if (kind != Kind::dict) return;
      expect(":");
      add(node, expression());
    });
    const bool grouped = kind == Kind::tuple && node->kids.size() == 1 && !comma;
    return grouped ? std::move(node->kids[0]) : std::move(node);
  }

  NodePtr postfix(NodePtr node) {
    for (;;) {
      if (skip(".")) {
        auto whole = make(Kind::attribute, name());
        if (now().is("(") && !is_method(whole->name)) refuse("the method ." + whole->name + "()");
        if (node->name == "loop" && !among(kLoop, whole->name)) refuse("loop." + whole->name);
        add(whole, std::move(node));
        node = std::move(whole);
      } else if (skip("[")) {
        node = subscript(std::move(node));
      } else if (skip("(")) {
        node = make(Kind::call, "", std::move(node));
        arguments(node);
      } else {
        return node;
      }
    }
  }

  NodePtr subscript(NodePtr object) {
    auto node = make(Kind::item, "", std::move(object));
    auto part = [&] { return now().is(":") || now().is("]") ? nullptr : expression(); };
    add(node, part());
    if (skip(":")) {
      node->kind = Kind::slice;
      add(node, part());
      add(node, skip(":") ? part() : nullptr);
    } else if (!node->kids[1]) {
      fail("expected a subscript");
    }
    expect("]");
    return node;
  }

  // Parses arguments after an opening bracket into a call, filter or test that has its first kid.
  void arguments(const NodePtr& node) {
    list(")", [&] {
      std::string how;
      if (now().is("*")) {
        how = take();
      } else if (now().kind == Token::Kind::name && next().is("=")) {
        how = take();
        if (node->builtin && !takes(*node->builtin, how)) refuse("the argument '" + how + "' of '" + node->name + "'");
        take();
      }
      if (how.empty() && !node->names.empty() && !node->names.back().empty())
        fail("a positional argument after a keyword");
      node->names.push_back(how);
      add(node, expression());
    });
  }

  // Parses a filter or test of `operand`; a null operand stands for a block's text.
  NodePtr builtin(Kind kind, NodePtr operand) {
    const bool is_test = kind == Kind::test, negated = is_test && skip("not");
    auto node = make(kind, name(), std::move(operand));
    node->builtin = find_builtin(is_test ? "test" : "filter", node->name);
    if (!node->builtin) refuse((is_test ? "the test '" : "the filter '") + node->name + "'");
    const Token& t = now();
    if (skip("(")) {
      arguments(node);
    } else if (is_test && (t.kind == Token::Kind::text || t.kind == Token::Kind::integer || t.is("[") ||
                           (t.kind == Token::Kind::name && !among(" else or and is if ", t.text)))) {
      node->names.push_back("");
      add(node, postfix(primary()));
    }
    return negated ? make(Kind::not_, "", std::move(node)) : std::move(node);
  }

  // ---- Statements

  using Ends = std::initializer_list<std::string_view>;

  // Parses up to a tag that is one of `ends`; the current token is then that tag's name.
  NodePtr block(Ends ends) {
    Depth depth(*this);
    for (NodePtr nodes = make(Kind::block);;) {
      const Token::Kind kind = now().kind;
      if (kind == Token::Kind::end) {
        if (ends.size() == 0) return nodes;
        fail("expected {% " + std::string(*(ends.end() - 1)) + " %}, found the template's end");
      }
      std::string data = take();
      if (kind == Token::Kind::data) {
        add(nodes, make(Kind::output, "", constant(text_value({data}))));
      } else if (data == "{{") {
        add(nodes, make(Kind::output, "", expression()));
        expect("}}");
      } else {  // {%
        if (std::any_of(ends.begin(), ends.end(), [&](auto end) { return now().is(end); })) return nodes;
        add(nodes, statement());
        expect("%}");
      }
    }
  }
  // Parses the block after a tag, and returns the name of the tag that ends it.
  std::string add_block(const NodePtr& node, Ends ends) {
    expect("%}");
    add(node, block(ends));
    return take();
  }

  NodePtr statement() {
    const std::string tag = name();
    if (tag == "for") return for_loop();
    if (tag == "if") return if_else();
    if (tag == "break" || tag == "continue") {
      if (loops_ == 0) fail("{% " + tag + " %} outside of a loop");
      return make(tag == "break" ? Kind::break_loop : Kind::continue_loop);
    }
    const int loops = std::exchange(loops_, 0), scopes = scopes_++;
    NodePtr node;
    if (tag == "set") {
      node = set();
    } else if (tag == "macro") {
      node = macro();
    } else if (tag == "filter") {
      node = make(Kind::filter_block, "", builtin(Kind::filter, nullptr));
      add_block(node, {"endfilter"});
    } else if (tag == "generation") {
      node = make(Kind::scope);
      add_block(node, {"endgeneration"});
    } else {
      refuse("{% " + tag + " %}");
    }
    loops_ = loops;
    scopes_ = scopes;
    return node;
  }

  // Parses a target of an assignment: a name, or an attribute of one.
  NodePtr target(bool may_be_attribute) {
    if (skip("(")) refuse("a target in brackets");
    auto node = make(Kind::name, name());
    if (among(kReserved, node->name)) fail("cannot assign to " + node->name);
    if (!may_be_attribute || !skip(".")) return node;
    return make(Kind::attribute, name(), std::move(node));
  }

  NodePtr set() {
    auto node = make(Kind::set, "", target(true));
    if (skip("=")) {
      add(node, expression());
      return node;
    }
    node->kind = Kind::set_block;
    add_block(node, {"endset"});
    return node;
  }

  // A macro sees the template's own variables and its arguments only, so it may not be inside another scope.
  NodePtr macro() {
    if (scopes_ > 1) refuse("a macro inside of another scope");
    auto node = make(Kind::macro, name());
    std::vector<NodePtr> defaults;
    expect("(");
    while (!skip(")")) {
      if (!node->names.empty()) expect(",");
      node->names.push_back(name());
      if (skip("="))
        defaults.push_back(expression());
      else if (!defaults.empty())
        fail("a parameter without a default after one with it");
    }
    add_block(node, {"endmacro"});
    for (NodePtr& each : defaults) add(node, std::move(each));
    return node;
  }

  NodePtr for_loop() {
    auto item = target(false);
    if (now().is(",")) {
      item = make(Kind::tuple, "", std::move(item));
      while (skip(",")) add(item, target(false));
    }
    auto node = make(Kind::for_loop, "", std::move(item));
    expect("in");
    add(node, operation(kOr));
    add(node, skip("if") ? expression() : nullptr);
    if (skip("recursive")) refuse("a recursive loop");
    ++loops_, ++scopes_;
    const bool has_else = add_block(node, {"else", "endfor"}) == "else";
    --loops_;
    if (has_else)
      add_block(node, {"endfor"});
    else
      add(node, nullptr);
    --scopes_;
    return node;
  }

  NodePtr if_else() {
    auto node = make(Kind::if_else);
    std::string end = "elif";
    while (end == "elif") {
      add(node, expression());
      end = add_block(node, {"elif", "else", "endif"});
    }
    if (end == "else") add_block(node, {"endif"});
    return node;
  }

  const std::vector<Token> tokens_;
  size_t at_ = 0;
  int line_ = 1, depth_ = 0;
  int loops_ = 0, scopes_ = 0;
};

}  // namespace

NodePtr parse(std::vector<Token> tokens) { return Parser(std::move(tokens)).run(); }

}  // namespace xpyd::model::jinja
