// Tokens -> tree: the grammar of Jinja's template designer documentation. What is not rendered here
// (inheritance, includes, unknown operators, filters, tests and methods) is refused by name.
#include "model/jinja_parser.h"

namespace xpyd::jinja {
namespace {

constexpr std::string_view kReserved = " true false none True False None loop ";

class Parser : ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;
  NodePtr run() { return block({}); }

 private:
  using Ends = std::initializer_list<std::string_view>;

  // Up to a tag that is one of `ends`, whose name is the current token then.
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
  // What follows a tag, and the name of the tag that ends it.
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

  // A name, or an attribute of one, as a target of assignments.
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

  // Macros see the template's own variables and their arguments, so none is inside of another
  // scope.
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

  int loops_ = 0, scopes_ = 0;
};

}  // namespace

NodePtr parse(std::vector<Token> tokens) { return Parser(std::move(tokens)).run(); }

}  // namespace xpyd::jinja
