// Tokens -> tree: the grammar of Jinja's template designer documentation. What is not rendered here
// (inheritance, includes, unknown operators, filters, tests and methods) is refused by name.

#include <algorithm>
#include <charconv>

#include "model/jinja_eval.h"

namespace xpyd::jinja {
namespace {

constexpr int kMaxHeight = 200;
constexpr std::string_view kNoNames =
    " caller cycler dict joiner kwargs lipsum self super varargs ";
constexpr std::string_view kLoop =
    " index index0 revindex revindex0 first last length previtem nextitem ";

// Loosest first. `not` stands between `and` and comparisons.
enum Level { kOr, kAnd, kNot, kCompare, kSum, kConcat, kProduct, kUnary };
struct Operator {
  std::string_view text;
  Level level;
};
constexpr Operator kOperators[] = {
    {"or", kOr},      {"and", kAnd},   {"==", kCompare}, {"!=", kCompare}, {"<", kCompare},
    {"<=", kCompare}, {">", kCompare}, {">=", kCompare}, {"in", kCompare}, {"+", kSum},
    {"-", kSum},      {"~", kConcat},  {"*", kProduct},  {"%", kProduct},
};

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  NodePtr run() { return block({}); }

 private:
  using Token_ = Token::Kind;
  using Ends = std::initializer_list<std::string_view>;

  // ---- tokens

  const Token& now() const { return tokens_[at_]; }
  const Token& next() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token take() { return at_ + 1 < tokens_.size() ? tokens_[at_++] : tokens_[at_]; }
  bool skip(std::string_view word) {
    const bool there = now().is(word);
    if (there) take();
    return there;
  }
  [[noreturn]] void fail(const std::string& why) const { throw Fault{why, now().line}; }
  [[noreturn]] void fail_expected(const std::string& what) const {
    fail("expected " + what + ", found " +
         (now().kind == Token_::text ? "a string" : "'" + now().text + "'"));
  }
  void expect(std::string_view word) {
    if (!skip(word)) fail_expected("'" + std::string(word) + "'");
  }
  void expect(Token_ kind, const char* name) {
    if (now().kind != kind) fail_expected(name);
    take();
  }
  std::string name() {
    if (now().kind != Token_::name) fail_expected("a name");
    return take().text;
  }

  // ---- nodes

  NodePtr make(Kind kind, std::string name = "") const {
    return std::make_unique<Node>(Node{kind, now().line, std::move(name)});
  }
  void add(const NodePtr& node, NodePtr kid) {
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

  // ---- statements

  // Up to a tag that is one of `ends`, whose name is the current token then.
  NodePtr block(Ends ends) {
    Depth depth(*this);
    NodePtr nodes = make(Kind::block);
    for (;;) {
      NodePtr node;
      if (now().kind == Token_::end) {
        if (ends.size() > 0)
          fail("expected {% " + std::string(*(ends.end() - 1)) + " %}, found the template's end");
        return nodes;
      } else if (now().kind == Token_::data) {
        node = make(Kind::output);
        add(node, make(Kind::constant));
        node->kids[0]->value = text_value({take().text});
      } else if (now().kind == Token_::begin_output) {
        take();
        node = make(Kind::output);
        add(node, expression());
        expect(Token_::end_output, "'}}'");
      } else {
        take();  // begin_tag
        if (std::any_of(ends.begin(), ends.end(), [&](auto end) { return now().is(end); }))
          return nodes;
        node = statement();
        expect(Token_::end_tag, "'%}'");
      }
      add(nodes, std::move(node));
    }
  }
  // What follows a tag whose end is the current token.
  void add_block(const NodePtr& node, Ends ends) {
    expect(Token_::end_tag, "'%}'");
    add(node, block(ends));
  }

  NodePtr statement() {
    const int line = now().line;
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
      node = make(Kind::filter_block);
      add(node, filter(nullptr));
      add_block(node, {"endfilter"});
    } else if (tag == "generation") {
      node = make(Kind::scope);
      add_block(node, {"endgeneration"});
    } else {
      throw Fault{"{% " + tag + " %} is not supported", line};
    }
    if (now().kind != Token_::end_tag) take();  // the end tag's name
    loops_ = loops;
    scopes_ = scopes;
    return node;
  }

  // A name, or an attribute of one, as a target of assignments.
  NodePtr target(bool may_be_attribute) {
    if (now().is("(")) fail("a target in brackets is not supported");
    auto node = make(Kind::name, name());
    for (std::string_view reserved : {"true", "false", "none", "True", "False", "None", "loop"})
      if (node->name == reserved) fail("cannot assign to " + node->name);
    if (!may_be_attribute || !skip(".")) return node;
    auto whole = make(Kind::attribute, name());
    add(whole, std::move(node));
    return whole;
  }

  NodePtr set() {
    auto node = make(Kind::set);
    add(node, target(true));
    if (skip("=")) {
      add(node, expression());
      return node;
    }
    node->kind = Kind::set_block;
    add_block(node, {"endset"});
    return node;
  }

  // Macros see the template's own variables and their arguments, so none is inside of another
  // scope.
  NodePtr macro() {
    if (scopes_ > 1) fail("a macro inside of another scope is not supported");
    auto node = make(Kind::macro, name());
    std::vector<NodePtr> defaults;
    expect("(");
    while (!now().is(")")) {
      if (!node->names.empty()) expect(",");
      node->names.push_back(name());
      if (skip("="))
        defaults.push_back(expression());
      else if (!defaults.empty())
        fail("a parameter without a default after one with it");
    }
    expect(")");
    add_block(node, {"endmacro"});
    for (NodePtr& each : defaults) add(node, std::move(each));
    return node;
  }

  NodePtr for_loop() {
    auto node = make(Kind::for_loop);
    auto item = target(false);
    if (now().is(",")) {
      auto all = make(Kind::tuple);
      add(all, std::move(item));
      while (skip(",")) add(all, target(false));
      item = std::move(all);
    }
    add(node, std::move(item));
    expect("in");
    add(node, binary(kOr));
    add(node, skip("if") ? expression() : nullptr);
    if (now().is("recursive")) fail("a recursive loop is not supported");
    ++loops_, ++scopes_;
    add_block(node, {"endfor", "else"});
    --loops_;
    if (skip("else"))
      add_block(node, {"endfor"});
    else
      add(node, nullptr);
    --scopes_;
    take();
    return node;
  }

  NodePtr if_else() {
    auto node = make(Kind::if_else);
    do {
      add(node, expression());
      add_block(node, {"elif", "else", "endif"});
    } while (skip("elif"));
    if (skip("else")) add_block(node, {"endif"});
    take();
    return node;
  }

  // ---- expressions

  NodePtr expression() {
    Depth depth(*this);
    auto node = binary(kOr);
    while (now().is("if")) {
      auto whole = make(Kind::conditional);
      take();
      add(whole, std::move(node));
      add(whole, binary(kOr));
      add(whole, skip("else") ? expression() : nullptr);
      node = std::move(whole);
    }
    return node;
  }

  // The operator of this level that stands here, or "".
  std::string operator_here(int level) const {
    if (level == kCompare && now().is("not") && next().is("in")) return "not in";
    for (const Operator& op : kOperators)
      if (op.level == level && now().is(op.text)) return now().text;
    return "";
  }

  NodePtr binary(int level) {
    if (level == kUnary) return unary(true);
    if (level == kNot) return negation();
    auto left = binary(level + 1);
    bool compared = false;
    for (std::string op; !(op = operator_here(level)).empty();) {
      if (compared) fail("a chain of comparisons is not supported");
      compared = level == kCompare;
      auto whole = make(Kind::binary, op);
      take();
      if (op == "not in") take();
      add(whole, std::move(left));
      add(whole, binary(level + 1));
      left = std::move(whole);
    }
    for (std::string_view op : {"/", "//", "**"})
      if (now().is(op)) fail("the operator '" + std::string(op) + "' is not supported");
    return left;
  }

  NodePtr negation() {
    if (!now().is("not")) return binary(kNot + 1);
    Depth depth(*this);
    auto node = make(Kind::not_);
    take();
    add(node, negation());
    return node;
  }

  NodePtr unary(bool with_filters) {
    Depth depth(*this);
    NodePtr node;
    if (now().is("-")) {
      node = make(Kind::negative);
      take();
      add(node, unary(false));
    } else {
      node = primary();
    }
    node = postfix(std::move(node));
    while (with_filters) {
      if (skip("|"))
        node = filter(std::move(node));
      else if (skip("is"))
        node = test(std::move(node));
      else
        break;
    }
    return node;
  }

  NodePtr primary() {
    auto node = make(Kind::constant);
    if (now().kind == Token_::name) {
      node->name = take().text;
      const std::string& word = node->name;
      if (word == "true" || word == "True" || word == "false" || word == "False")
        node->value = word == "true" || word == "True";
      else if (word == "none" || word == "None")
        node->value = None();
      else if (kNoNames.find(" " + word + " ") != kNoNames.npos)
        throw Fault{"'" + word + "' is not supported", node->line};
      else
        node->kind = Kind::name;
    } else if (now().kind == Token_::text) {
      std::string text;
      while (now().kind == Token_::text) text += take().text;
      node->value = text_value({text});
    } else if (now().kind == Token_::integer) {
      int64_t value = 0;
      const std::string& digits = now().text;
      auto error = std::from_chars(digits.data(), digits.data() + digits.size(), value).ec;
      if (error != std::errc()) fail("an integer beyond 64 bits");
      take();
      node->value = value;
    } else if (skip("(")) {
      node = elements(Kind::tuple, ")");
    } else if (skip("[")) {
      node = elements(Kind::list, "]");
    } else if (skip("{")) {
      node = elements(Kind::dict, "}");
    } else {
      fail("unexpected '" + now().text + "'");
    }
    return node;
  }

  // Up to the closing bracket. One expression in round brackets is no tuple.
  NodePtr elements(Kind kind, std::string_view closing) {
    auto node = make(kind);
    bool comma = false;
    while (!now().is(closing)) {
      add(node, expression());
      if (kind == Kind::dict) {
        expect(":");
        add(node, expression());
      }
      if (!now().is(closing)) expect(","), comma = true;
    }
    expect(closing);
    const bool grouped = kind == Kind::tuple && node->kids.size() == 1 && !comma;
    return grouped ? std::move(node->kids[0]) : std::move(node);
  }

  NodePtr postfix(NodePtr node) {
    for (;;) {
      if (now().is(".")) {
        auto whole = make(Kind::attribute);
        take();
        whole->name = name();
        if (now().is("(") && !is_method(whole->name))
          throw Fault{"the method ." + whole->name + "() is not supported", whole->line};
        if (node->name == "loop" && kLoop.find(" " + whole->name + " ") == kLoop.npos)
          throw Fault{"loop." + whole->name + " is not supported", whole->line};
        add(whole, std::move(node));
        node = std::move(whole);
      } else if (now().is("[")) {
        node = subscript(std::move(node));
      } else if (now().is("(")) {
        auto whole = make(Kind::call);
        add(whole, std::move(node));
        arguments(whole);
        node = std::move(whole);
      } else {
        return node;
      }
    }
  }

  NodePtr subscript(NodePtr object) {
    auto node = make(Kind::item);
    take();
    add(node, std::move(object));
    auto part = [&] { return now().is(":") || now().is("]") ? nullptr : expression(); };
    add(node, part());
    if (now().is(":")) {
      node->kind = Kind::slice;
      take();
      add(node, part());
      add(node, skip(":") ? part() : nullptr);
    } else if (!node->kids[1]) {
      fail("expected a subscript");
    }
    expect("]");
    return node;
  }

  // "(...)" onto a call, filter or test whose first kid is there.
  void arguments(const NodePtr& node) {
    expect("(");
    while (!now().is(")")) {
      std::string how;
      if (now().is("*")) {
        how = take().text;
      } else if (now().kind == Token_::name && next().is("=")) {
        if (node->builtin && !takes(*node->builtin, now().text))
          fail("the argument '" + now().text + "' of '" + node->name + "' is not supported");
        how = take().text;
        take();
      }
      if (how.empty() && !node->names.empty() && !node->names.back().empty())
        fail("a positional argument after a keyword");
      node->names.push_back(how);
      add(node, expression());
      if (!now().is(")")) expect(",");
    }
    expect(")");
  }

  NodePtr filter(NodePtr operand) {
    auto node = make(Kind::filter);
    node->name = name();
    node->builtin = find_filter(node->name);
    if (!node->builtin) throw Fault{"the filter '" + node->name + "' is not supported", node->line};
    add(node, std::move(operand));
    if (now().is("(")) arguments(node);
    return node;
  }

  NodePtr test(NodePtr operand) {
    const bool negated = skip("not");
    auto node = make(Kind::test);
    node->name = name();
    node->builtin = find_test(node->name);
    if (!node->builtin) throw Fault{"the test '" + node->name + "' is not supported", node->line};
    add(node, std::move(operand));
    const Token& t = now();
    const bool operand_follows = t.kind == Token_::name && !t.is("else") && !t.is("or") &&
                                 !t.is("and") && !t.is("is") && !t.is("if");
    if (t.is("(")) {
      arguments(node);
    } else if (operand_follows || t.kind == Token_::text || t.kind == Token_::integer ||
               t.is("[")) {
      node->names.push_back("");
      add(node, postfix(primary()));
    }
    if (!negated) return node;
    auto whole = make(Kind::not_);
    add(whole, std::move(node));
    return whole;
  }

  const std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0, loops_ = 0, scopes_ = 0;
};

}  // namespace

NodePtr parse(std::vector<Token> tokens) { return Parser(std::move(tokens)).run(); }

}  // namespace xpyd::jinja
