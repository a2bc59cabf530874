// Tokens -> tree: expressions.
#include <charconv>

#include "model/jinja_parser.h"

namespace xpyd::jinja {

constexpr std::string_view kNoNames = " caller cycler dict joiner kwargs lipsum self super varargs ";
constexpr std::string_view kLoop = " index index0 revindex revindex0 first last length previtem nextitem ";

const std::pair<std::string_view, ExpressionParser::Power> ExpressionParser::kOperators[] = {
    {"or", kOr},     {"and", kAnd},    {"==", kCompare}, {"!=", kCompare}, {"<", kCompare},  {"<=", kCompare},
    {">", kCompare}, {">=", kCompare}, {"in", kCompare}, {"+", kSum},      {"-", kSum},      {"~", kConcat},
    {"*", kProduct}, {"%", kProduct},  {"/", kRefused},  {"//", kRefused}, {"**", kRefused},
};

NodePtr ExpressionParser::expression() {
  Depth depth(*this);
  auto node = operation(kOr);
  while (skip("if")) {
    node = make(Kind::conditional, "", std::move(node));
    add(node, operation(kOr));
    add(node, skip("else") ? expression() : nullptr);
  }
  return node;
}

ExpressionParser::Power ExpressionParser::power_here() const {
  if (now().is("not") && next().is("in")) return kCompare;
  for (const auto& [text, power] : kOperators)
    if (now().is(text)) return power;
  return kNone;
}

NodePtr ExpressionParser::operation(int least) {
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

NodePtr ExpressionParser::unary(bool with_filters) {
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

NodePtr ExpressionParser::primary() {
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

// Calls each() for what stands between commas up to `closing`; whether a comma stood there.
template <class Each>
bool ExpressionParser::list(std::string_view closing, Each each) {
  bool comma = false;
  while (!skip(closing)) {
    each();
    if (!now().is(closing)) expect(","), comma = true;
  }
  return comma;
}

// One expression in round brackets is no tuple.
NodePtr ExpressionParser::elements(Kind kind, std::string_view closing) {
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

NodePtr ExpressionParser::postfix(NodePtr node) {
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

NodePtr ExpressionParser::subscript(NodePtr object) {
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

// Behind a bracket, onto a call, filter or test whose first kid is there.
void ExpressionParser::arguments(const NodePtr& node) {
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

NodePtr ExpressionParser::builtin(Kind kind, NodePtr operand) {
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

}  // namespace xpyd::jinja
