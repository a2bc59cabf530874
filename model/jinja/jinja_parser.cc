// Text -> tokens -> tree.
#include <algorithm>

#include "base/numbers.h"
#include "base/utf8.h"
#include "model/jinja/jinja_node.h"

namespace xpyd::model::jinja {
namespace {

struct Token {
  enum class Kind { data, name, text, integer, op, end } kind;  // op includes {{ }} {% %}
  std::string text;
  int line;
  bool is(std::string_view op_or_name) const { return (kind == Kind::op || kind == Kind::name) && text == op_or_name; }
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name(char c) { return is_digit(c) || c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(source) {
    if (!is_utf8(source)) fail("the template is not UTF-8");
    if (source_.ends_with('\n')) source_.remove_suffix(1);  // keep_trailing_newline is off
  }

  std::vector<Token> run() {
    while (at_ < source_.size()) root();
    add(Token::Kind::end, "end of the template");
    return std::move(tokens_);
  }

 private:
  void add(Token::Kind kind, std::string_view text) { tokens_.push_back({kind, std::string(text), line_}); }
  [[noreturn]] void fail(const std::string& why) const { throw Fault{why, line_}; }
  bool here(std::string_view text, size_t at) const { return source_.substr(std::min(at, source_.size())).starts_with(text); }
  void go(size_t to) {
    line_ += int(std::count(source_.begin() + long(at_), source_.begin() + long(to), '\n'));
    at_ = to;
  }
  size_t skip_space(size_t at) const { return std::min(source_.find_first_not_of(" \t\r\n", at), source_.size()); }

  // Takes data, and the tag or comment after it.
  void root() {
    size_t at = at_;
    while (at < source_.size() && !here("{{", at) && !here("{%", at) && !here("{#", at)) ++at;
    std::string_view text = source_.substr(at_, at - at_);
    const char what = at < source_.size() ? source_[at + 1] : 0;
    const bool strips = here("-", at + 2);
    const size_t line = text.rfind('\n') + 1;  // 0 without a newline
    const bool at_line_start = line > 0 || at_ == 0 || source_[at_ - 1] == '\n';
    if (strips)
      text = text.substr(0, text.find_last_not_of(" \t\r\n") + 1);
    else if ((what == '%' || what == '#') && at_line_start && text.find_first_not_of(" \t", line) == text.npos)
      text = text.substr(0, line);  // lstrip_blocks
    if (!text.empty()) add(Token::Kind::data, text);
    go(at);
    if (what == 0) return;
    if (what == '#') {
      const size_t end = source_.find("#}", at + 2);
      if (end == source_.npos) fail("a comment {# is not closed");
      return leave(end, source_[end - 1] == '-', true);
    }
    add(Token::Kind::op, what == '{' ? "{{" : "{%");
    go(at + 2 + strips);
    tag(what == '{' ? "}}" : "%}");
  }

  // Goes behind a closing bracket at `at`.
  void leave(size_t at, bool strips, bool trims_newline) {
    at += 2;
    go(strips ? skip_space(at) : at + (trims_newline && here("\n", at)));
  }

  void tag(std::string_view closing) {
    for (int open = 0;;) {
      go(skip_space(at_));
      if (at_ >= source_.size()) fail("a tag is not closed");
      const bool strips = here("-", at_) && here(closing, at_ + 1);
      if (open == 0 && (strips || here(closing, at_))) {
        add(Token::Kind::op, closing);
        return leave(at_ + strips, strips, closing == "%}");
      }
      const char c = source_[at_];
      if (is_name(c)) {
        size_t end = at_;
        while (end < source_.size() && is_name(source_[end])) ++end;
        if (end - at_ > 255) fail("a name has more than 255 bytes");
        add(is_digit(c) ? Token::Kind::integer : Token::Kind::name, source_.substr(at_, end - at_));
        go(end);
      } else if (c == '\'' || c == '"') {
        text(c);
      } else {
        open += c == '(' || c == '[' || c == '{' ? 1 : c == ')' || c == ']' || c == '}' ? -1 : 0;
        const bool two = here("==", at_) || here("!=", at_) || here(">=", at_) || here("<=", at_);
        add(Token::Kind::op, source_.substr(at_, 1 + two));
        go(at_ + 1 + two);
      }
    }
  }

  void text(char quote) {
    std::string out;
    size_t at = at_ + 1;
    for (; at < source_.size() && source_[at] != quote; ++at) {
      if (source_[at] != '\\') {
        out += source_[at];
        continue;
      }
      static constexpr std::string_view kPlain = "\\'\"nrt", kMeans = "\\'\"\n\r\t";
      const size_t known = ++at < source_.size() ? kPlain.find(source_[at]) : kPlain.npos;
      if (known == kPlain.npos) fail("this escape in a string is not supported");
      out += kMeans[known];
    }
    if (at >= source_.size()) fail("a string is not closed");
    add(Token::Kind::text, out);
    go(at + 1);
  }

  std::string_view source_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

// Loosest first.
constexpr std::pair<std::string_view, int> kOperators[] = {
    {"or", 0}, {"and", 1}, {"==", 3}, {"!=", 3}, {"<", 3}, {"<=", 3}, {">", 3},
    {">=", 3}, {"in", 3},  {"+", 4},  {"-", 4},  {"~", 5}, {"%", 6},
};
constexpr std::string_view kLoop = " first last length index index0 previtem nextitem ";
constexpr int kNot = 2, kCompare = 3, kMaxDepth = 200;

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
  [[noreturn]] void refuse(const std::string& what) const { throw Fault{what + " is not supported", line_}; }
  [[noreturn]] void fail_expected(const std::string& what) const {
    throw Fault{"expected " + what + ", found '" + now().text + "'", now().line};
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
    (add(*node, std::move(kids)), ...);
    return node;
  }
  void add(Node& node, NodePtr kid) const {
    if (kid) node.height = std::max(node.height, kid->height + 1);
    if (node.height > kMaxDepth) refuse("so deep a template");
    node.kids.push_back(std::move(kid));
  }
  NodePtr constant(Value value) const {
    auto node = make(Kind::constant);
    node->value = std::move(value);
    return node;
  }

  // ---- Expressions

  NodePtr expression() {
    if (++depth_ > kMaxDepth) refuse("so deep an expression");
    auto node = operation(0);
    if (skip("if")) {
      auto condition = operation(0);
      node = make(Kind::conditional, "", std::move(node), std::move(condition), skip("else") ? expression() : nullptr);
    }
    --depth_;
    return node;
  }

  // Parses operators that bind at least as tightly as `least`.
  NodePtr operation(int least) {
    if (++depth_ > kMaxDepth) refuse("so deep an expression");
    NodePtr left = least <= kNot && skip("not") ? make(Kind::not_, "", operation(kNot)) : filtered();
    for (int before = -1;;) {
      const bool not_in = now().is("not") && next().is("in");
      int power = not_in ? kCompare : -1;
      for (const auto& [text, known] : kOperators)
        if (now().is(text)) power = known;
      if (power < least) break;
      if (power == kCompare && before == kCompare) refuse("a chain of comparisons");
      before = power;
      std::string op = take();
      if (not_in) op += " " + take();
      left = make(Kind::binary, op, std::move(left), operation(power + 1));
    }
    --depth_;
    return left;
  }

  NodePtr filtered() {
    auto node = postfix(primary());
    while (now().is("|") || now().is("is")) {
      const Kind kind = take() == "|" ? Kind::filter : Kind::test;
      const bool negated = kind == Kind::test && skip("not");
      node = builtin(kind, name(), std::move(node));
      if (negated) node = make(Kind::not_, "", std::move(node));
    }
    return node;
  }

  // Parses the arguments of a filter, test or method, and puts each at the place of its parameter.
  NodePtr builtin(Kind kind, const std::string& name, NodePtr of) {
    const std::string what = (kind == Kind::filter ? "the filter " : kind == Kind::test ? "the test " : "the method .") + name;
    const Builtin* known = find_builtin(kind, name);
    if (known == nullptr) refuse(what);
    auto node = make(kind, name, std::move(of));
    const auto given = make(Kind::call);
    if (skip("(")) arguments(*given);
    const std::vector<std::string_view>& parameters = known->parameters;
    node->kids.resize(1 + parameters.size());
    for (size_t i = 0; i < given->kids.size(); ++i) {
      const auto named = std::find(parameters.begin(), parameters.end(), given->names[i]);
      const size_t at = given->names[i].empty() ? i : size_t(named - parameters.begin());
      if (at >= parameters.size()) refuse("an argument of " + what);
      node->kids[1 + at] = std::move(given->kids[i]);
    }
    node->height = std::max(node->height, given->height);
    return node;
  }

  NodePtr primary() {
    const Token::Kind kind = now().kind;
    if (skip("(")) {
      auto node = expression();
      expect(")");
      return node;
    }
    if (skip("[")) return elements(Kind::list, "]");
    if (skip("{")) return elements(Kind::dict, "}");
    const bool negative = skip("-");
    if (now().kind == Token::Kind::integer) {
      int64_t value = 0;
      if (!read_number(now().text, value)) fail_expected("an integer");
      take();
      return constant({negative ? -value : value});
    }
    if (negative || (kind != Token::Kind::name && kind != Token::Kind::text)) fail_expected("an expression");
    std::string text = take();
    if (kind == Token::Kind::text) return constant(text_value(text));
    if (text == "true" || text == "True" || text == "false" || text == "False")
      return constant({text[0] == 't' || text[0] == 'T'});
    if (text == "none" || text == "None") return constant({None()});
    return make(Kind::name, text);
  }

  NodePtr elements(Kind kind, std::string_view closing) {
    auto node = make(kind);
    while (!skip(closing)) {
      add(*node, expression());
      if (kind == Kind::dict) {
        expect(":");
        add(*node, expression());
      }
      if (!now().is(closing)) expect(",");
    }
    return node;
  }

  NodePtr postfix(NodePtr node) {
    for (;;) {
      if (skip(".")) {
        const std::string field = name();
        if (now().is("(") || find_builtin(Kind::method, field)) {
          if (!now().is("(")) refuse("the method ." + field + " without a call");
          node = builtin(Kind::method, field, std::move(node));
          continue;
        }
        const bool of_loop = node->kind == Kind::name && node->name == "loop";
        if (of_loop && kLoop.find(" " + field + " ") == kLoop.npos) refuse("loop." + field);
        node = make(Kind::attribute, field, std::move(node));
      } else if (skip("[")) {
        auto part = [&] { return now().is(":") || now().is("]") ? nullptr : expression(); };
        auto first = part();
        node = make(Kind::item, "", std::move(node), std::move(first));
        while (skip(":")) {
          node->kind = Kind::slice;
          add(*node, part());
        }
        node->kids.resize(node->kind == Kind::slice ? 4 : 2);
        expect("]");
        if (node->kind == Kind::item && !node->kids[1]) fail_expected("an index");
      } else if (node->kind == Kind::name && skip("(")) {
        node = make(Kind::call, node->name);
        arguments(*node);
      } else {
        return node;
      }
    }
  }

  void arguments(Node& node) {
    while (!skip(")")) {
      if (!node.names.empty()) expect(",");
      node.names.push_back(now().kind == Token::Kind::name && next().is("=") ? take() : "");
      if (!node.names.back().empty()) take();
      add(node, expression());
    }
  }

  // ---- Statements

  using Ends = std::initializer_list<std::string_view>;

  // Parses up to a tag that is one of `ends`; the current token is then that tag's name.
  NodePtr block(Ends ends) {
    if (++depth_ > kMaxDepth) refuse("so deep a block");
    for (NodePtr nodes = make(Kind::block);;) {
      const Token::Kind kind = now().kind;
      if (kind == Token::Kind::end) {
        if (ends.size() > 0) fail_expected("{% " + std::string(*(ends.end() - 1)) + " %}");
        return nodes;
      }
      std::string data = take();
      if (kind == Token::Kind::data) {
        add(*nodes, make(Kind::output, "", constant(text_value(data))));
      } else if (data == "{{") {
        add(*nodes, make(Kind::output, "", expression()));
        expect("}}");
      } else {  // {%
        if (std::any_of(ends.begin(), ends.end(), [&](auto end) { return now().is(end); })) {
          --depth_;
          return nodes;
        }
        add(*nodes, statement());
        expect("%}");
      }
    }
  }
  // Parses the block after a tag, and returns the name of the tag that ends it.
  std::string add_block(const NodePtr& node, Ends ends) {
    expect("%}");
    add(*node, block(ends));
    return take();
  }

  NodePtr statement() {
    const std::string tag = name();
    if (tag == "for") return for_loop();
    if (tag == "if") return if_else();
    if (tag == "macro") return macro();
    if (tag != "set") refuse("{% " + tag + " %}");
    auto target = make(Kind::name, name());
    if (skip(".")) target = make(Kind::attribute, name(), std::move(target));
    expect("=");
    return make(Kind::set, "", std::move(target), expression());
  }

  NodePtr macro() {
    auto node = make(Kind::macro, name());
    expect("(");
    while (!skip(")")) {
      if (!node->names.empty()) expect(",");
      node->names.push_back(name());
    }
    add_block(node, {"endmacro"});
    return node;
  }

  NodePtr for_loop() {
    auto target = make(Kind::tuple, "", make(Kind::name, name()));
    while (skip(",")) add(*target, make(Kind::name, name()));
    expect("in");
    auto items = operation(0);
    auto node = make(Kind::for_loop, "", std::move(target), std::move(items), skip("if") ? expression() : nullptr);
    add_block(node, {"endfor"});
    return node;
  }

  NodePtr if_else() {
    auto node = make(Kind::if_else);
    std::string end = "elif";
    while (end == "elif") {
      add(*node, expression());
      end = add_block(node, {"elif", "else", "endif"});
    }
    if (end == "else") add_block(node, {"endif"});
    return node;
  }

  const std::vector<Token> tokens_;
  size_t at_ = 0;
  int line_ = 1, depth_ = 0;
};

}  // namespace

NodePtr parse_nodes(std::string_view source) { return Parser(Lexer(source).run()).run(); }

}  // namespace xpyd::model::jinja
