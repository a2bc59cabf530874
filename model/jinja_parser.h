// What a chat template's statements and their expressions are parsed with.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/jinja_eval.h"

namespace xpyd::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

 protected:
  static constexpr int kMaxHeight = 200;
  // Loosest first; where nothing stands that joins two operands, -1.
  enum Power { kNone = -1, kOr, kAnd, kNot, kCompare, kSum, kConcat, kProduct, kRefused };

  NodePtr expression();
  NodePtr operation(int least);  // of operators that bind at least as tightly
  // A filter or test of its operand, which is null where a block's text goes.
  NodePtr builtin(Kind kind, NodePtr operand);

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
  // Of the token taken last.
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

  // On the line of the token taken last.
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
    explicit Depth(ExpressionParser& p) : parser(p) {
      if (++parser.depth_ > kMaxHeight) parser.fail("nested too deeply");
    }
    ~Depth() { --parser.depth_; }
    ExpressionParser& parser;
  };

 private:
  Power power_here() const;
  NodePtr unary(bool with_filters);
  NodePtr primary();
  template <class Each>
  bool list(std::string_view closing, Each each);
  NodePtr elements(Kind kind, std::string_view closing);
  NodePtr postfix(NodePtr node);
  NodePtr subscript(NodePtr object);
  void arguments(const NodePtr& node);

  static const std::pair<std::string_view, Power> kOperators[];
  const std::vector<Token> tokens_;
  size_t at_ = 0;
  int line_ = 1, depth_ = 0;
};

}  // namespace xpyd::jinja
