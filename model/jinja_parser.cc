// Tokens -> tree: the grammar of Jinja's template designer documentation. What is not rendered here
// (inheritance, includes, translation, unknown filters, tests and methods) is refused by name.

#include <algorithm>
#include <charconv>

#include "model/jinja_ast.h"
#include "model/jinja_eval.h"

namespace xpyd::jinja {
namespace {

constexpr int kMaxHeight = 200;

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(lex(source)) {}

  std::vector<NodePtr> run() { return body({}); }

 private:
  using Token_ = Token::Kind;
  using Ends = std::initializer_list<std::string_view>;

  const Token& now() const { return tokens_[at_]; }
  const Token& next() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token take() { return at_ + 1 < tokens_.size() ? tokens_[at_++] : tokens_[at_]; }
  bool skip(std::string_view word) {
    const bool there = now().is(word);
    if (there) take();
    return there;
  }
  [[noreturn]] void fail(const std::string& why) const { throw Fault{why, now().line}; }
  std::string described() const {
    switch (now().kind) {
      case Token_::end:
        return "the template's end";
      case Token_::end_output:
        return "'}}'";
      case Token_::end_tag:
        return "'%}'";
      case Token_::text:
        return "a string";
      default:
        return "'" + now().text + "'";
    }
  }
  void expect(std::string_view word) {
    if (!skip(word)) fail("expected '" + std::string(word) + "', found " + described());
  }
  void expect(Token_ kind, const char* name) {
    if (now().kind != kind) fail(std::string("expected ") + name + ", found " + described());
    take();
  }
  std::string name() {
    if (now().kind != Token_::name) fail("expected a name, found " + described());
    return take().text;
  }

  NodePtr make(Kind kind, std::string name = "") const {
    auto node = std::make_unique<Node>();
    node->kind = kind;
    node->line = now().line;
    node->name = std::move(name);
    return node;
  }
  void grow(Node& node, const Node* kid) {
    if (kid) node.height = std::max(node.height, kid->height + 1);
    if (node.height > kMaxHeight) throw Fault{"nested too deeply", node.line};
  }
  NodePtr& add(const NodePtr& node, NodePtr kid) {
    grow(*node, kid.get());
    return node->kids.emplace_back(std::move(kid));
  }
  NodePtr with(NodePtr node, NodePtr first, NodePtr second = nullptr) {
    add(node, std::move(first));
    if (second) add(node, std::move(second));
    return node;
  }
  struct Depth {
    explicit Depth(Parser& p) : parser(p) {
      if (++parser.depth_ > kMaxHeight) parser.fail("nested too deeply");
    }
    ~Depth() { --parser.depth_; }
    Parser& parser;
  };

  // ---- statements

  std::vector<NodePtr> body(Ends ends) {
    Depth depth(*this);
    std::vector<NodePtr> nodes;
    for (;;) {
      NodePtr node;
      if (now().kind == Token_::end) {
        if (ends.size() > 0)
          fail("expected {% " + std::string(*(ends.end() - 1)) + " %}, found the template's end");
        return nodes;
      } else if (now().kind == Token_::data) {
        node = make(Kind::data);
        node->value = text_value({take().text});
      } else if (now().kind == Token_::begin_output) {
        take();
        node = make(Kind::output);
        add(node, tuple());
        expect(Token_::end_output, "'}}'");
      } else {
        take();  // begin_tag
        for (std::string_view end : ends)
          if (now().is(end)) return nodes;
        node = statement();
        expect(Token_::end_tag, "'%}'");
      }
      nodes.push_back(std::move(node));
    }
  }
  std::vector<NodePtr> block(const NodePtr& node, Ends ends) {
    skip(":");
    expect(Token_::end_tag, "'%}'");
    auto nodes = body(ends);
    for (const NodePtr& kid : nodes) grow(*node, kid.get());
    return nodes;
  }

  NodePtr statement() {
    const std::string tag = name();
    if (tag == "set") return set();
    if (tag == "for") return for_loop();
    if (tag == "if") return if_else();
    if (tag == "break" || tag == "continue") {
      if (loops_ == 0) fail("{% " + tag + " %} outside of a loop");
      return make(tag == "break" ? Kind::break_loop : Kind::continue_loop);
    }
    const int loops = std::exchange(loops_, tag == "with" ? loops_ : 0);
    NodePtr node;
    if (tag == "macro") {
      node = make(Kind::macro, name());
      if (!now().is("(")) fail("expected '(', found " + described());
      parameters(node);
      node->body = block(node, {"endmacro"});
    } else if (tag == "call") {
      node = make(Kind::call_block, "caller");
      if (now().is("(")) parameters(node);
      node->kids.insert(node->kids.begin(), expression());
      grow(*node, node->kids[0].get());
      if (node->kids[0]->kind != Kind::call) fail("{% call %} without a call");
      node->body = block(node, {"endcall"});
    } else if (tag == "filter") {
      node = make(Kind::filter_block);
      add(node, filters(nullptr, true));
      node->body = block(node, {"endfilter"});
    } else if (tag == "generation") {
      node = make(Kind::scope);
      node->body = block(node, {"endgeneration"});
    } else if (tag == "with") {
      node = make(Kind::with);
      while (now().kind != Token_::end_tag && !now().is(":")) {
        if (!node->kids.empty()) expect(",");
        add(node, target(false));
        expect("=");
        add(node, expression());
      }
      node->body = block(node, {"endwith"});
    } else {
      throw Fault{"{% " + tag + " %} is not supported", tokens_[at_ - 1].line};
    }
    take();  // the end tag's name
    loops_ = loops;
    return node;
  }

  NodePtr set() {
    auto node = make(Kind::set);
    add(node, target(true));
    if (skip("=")) {
      add(node, tuple());
      return node;
    }
    node->kind = Kind::set_block;
    if (now().is("|")) add(node, filters(nullptr, false));
    const int loops = std::exchange(loops_, 0);
    node->body = block(node, {"endset"});
    take();
    loops_ = loops;
    return node;
  }

  NodePtr for_loop() {
    auto node = make(Kind::for_loop);
    add(node, target(false));
    expect("in");
    add(node, tuple(false, "recursive"));
    add(node, skip("if") ? expression() : nullptr);
    node->flag = skip("recursive");
    ++loops_;
    node->body = block(node, {"endfor", "else"});
    --loops_;
    if (skip("else")) node->orelse = block(node, {"endfor"});
    take();
    return node;
  }

  NodePtr if_else() {
    auto node = make(Kind::if_else);
    add(node, tuple(false));
    node->body = block(node, {"elif", "else", "endif"});
    while (skip("elif")) {
      auto branch = make(Kind::if_else);
      add(branch, tuple(false));
      branch->body = block(branch, {"elif", "else", "endif"});
      add(node, std::move(branch));
    }
    if (skip("else")) node->orelse = block(node, {"endif"});
    take();
    return node;
  }

  // "(a, b=1)": names, and the defaults of the last of them as kids.
  void parameters(const NodePtr& node) {
    expect("(");
    while (!now().is(")")) {
      if (!node->names.empty()) expect(",");
      node->names.push_back(name());
      if (skip("="))
        add(node, expression());
      else if (!node->kids.empty())
        fail("a parameter without a default after one with it");
    }
    expect(")");
  }

  NodePtr target(bool with_namespace) {
    auto one = [&]() -> NodePtr {
      if (skip("(")) {
        auto inner = target(with_namespace);
        expect(")");
        return inner;
      }
      auto node = make(Kind::name, name());
      for (std::string_view constant : {"true", "false", "none", "True", "False", "None"})
        if (node->name == constant) fail("cannot assign to " + node->name);
      if (with_namespace && skip(".")) {
        node->kind = Kind::attribute;
        node->value = text_value({name()});
      }
      return node;
    };
    Depth depth(*this);
    auto first = one();
    if (!now().is(",")) return first;
    auto all = make(Kind::tuple);
    add(all, std::move(first));
    while (skip(",")) {
      if (now().kind != Token_::name && !now().is("(")) break;
      if (now().is("in")) break;
      add(all, one());
    }
    return all;
  }

  // ---- expressions, loosest first

  NodePtr tuple(bool with_condition = true, std::string_view end = "", bool in_brackets = false) {
    auto ends = [&] {
      return now().kind == Token_::end_output || now().kind == Token_::end_tag || now().is(")") ||
             (!end.empty() && now().is(end));
    };
    auto one = [&] { return with_condition ? expression() : or_else(); };
    auto node = make(Kind::tuple);
    if (!ends()) {
      auto first = one();
      if (!now().is(",")) return first;
      add(node, std::move(first));
      while (skip(",") && !ends()) add(node, one());
    } else if (!in_brackets) {
      fail("expected an expression, found " + described());
    }
    return node;
  }

  NodePtr expression() {
    Depth depth(*this);
    auto node = or_else();
    while (now().is("if")) {
      auto whole = make(Kind::conditional);
      take();
      add(whole, or_else());
      add(whole, std::move(node));
      add(whole, skip("else") ? expression() : nullptr);
      node = std::move(whole);
    }
    return node;
  }
  template <class Below>
  NodePtr left_to_right(std::initializer_list<std::pair<std::string_view, Kind>> ops, Below below) {
    auto node = below();
    for (;;) {
      auto op = std::find_if(ops.begin(), ops.end(), [&](auto& o) { return now().is(o.first); });
      if (op == ops.end()) return node;
      auto whole = make(op->second, std::string(op->first));
      take();
      node = with(std::move(whole), std::move(node), below());
    }
  }
  NodePtr or_else() {
    return left_to_right({{"or", Kind::or_}}, [&] { return and_then(); });
  }
  NodePtr and_then() {
    return left_to_right({{"and", Kind::and_}}, [&] { return negation(); });
  }
  NodePtr negation() {
    if (!now().is("not")) return comparison();
    Depth depth(*this);
    auto node = make(Kind::not_);
    take();
    return with(std::move(node), negation());
  }
  NodePtr comparison() {
    auto first = sum();
    auto node = make(Kind::compare);
    for (;;) {
      std::string op;
      for (std::string_view known : {"==", "!=", "<", "<=", ">", ">=", "in"})
        if (now().is(known)) op = known;
      if (now().is("not") && next().is("in")) {
        op = "not in";
        take();
      }
      if (op.empty()) break;
      if (node->kids.empty()) add(node, std::move(first));
      take();
      node->names.push_back(op);
      add(node, sum());
    }
    return node->kids.empty() ? std::move(first) : std::move(node);
  }
  NodePtr sum() {
    return left_to_right({{"+", Kind::binary}, {"-", Kind::binary}}, [&] { return concat(); });
  }
  NodePtr concat() {
    auto first = product();
    if (!now().is("~")) return first;
    auto node = with(make(Kind::concat), std::move(first));
    while (skip("~")) add(node, product());
    return node;
  }
  NodePtr product() {
    return left_to_right(
        {{"*", Kind::binary}, {"/", Kind::binary}, {"//", Kind::binary}, {"%", Kind::binary}},
        [&] { return power(); });
  }
  NodePtr power() {
    return left_to_right({{"**", Kind::binary}}, [&] { return unary(true); });
  }
  NodePtr unary(bool with_filters) {
    Depth depth(*this);
    NodePtr node;
    if (now().is("-") || now().is("+")) {
      node = make(now().is("-") ? Kind::negative : Kind::positive);
      take();
      add(node, unary(false));
    } else {
      node = primary();
    }
    node = postfix(std::move(node));
    if (!with_filters) return node;
    for (;;) {
      if (now().is("|"))
        node = filters(std::move(node), false);
      else if (now().is("is"))
        node = test(std::move(node));
      else if (now().is("("))
        node = call(std::move(node));
      else
        return node;
    }
  }

  NodePtr primary() {
    auto node = make(Kind::constant);
    const Token token = now();
    switch (token.kind) {
      case Token_::name:
        take();
        if (token.text == "true" || token.text == "True")
          node->value = true;
        else if (token.text == "false" || token.text == "False")
          node->value = false;
        else if (token.text == "none" || token.text == "None")
          node->value = None();
        else {
          for (std::string_view no :
               {"lipsum", "cycler", "joiner", "self", "super", "varargs", "kwargs"})
            if (token.text == no) throw Fault{"'" + token.text + "' is not supported", token.line};
          node->kind = Kind::name;
          node->name = token.text;
        }
        return node;
      case Token_::text: {
        std::string text;
        while (now().kind == Token_::text) text += take().text;
        node->value = text_value({text});
        return node;
      }
      case Token_::integer: {
        int64_t value = 0;
        auto [end, error] =
            std::from_chars(token.text.data(), token.text.data() + token.text.size(), value);
        if (error != std::errc()) fail("an integer beyond 64 bits");
        take();
        node->value = value;
        return node;
      }
      case Token_::real:
        node->value = std::strtod(take().text.c_str(), nullptr);
        return node;
      default:
        break;
    }
    if (skip("(")) {
      node = tuple(true, "", true);
      expect(")");
    } else if (skip("[")) {
      node->kind = Kind::list;
      while (!now().is("]")) {
        if (!node->kids.empty()) expect(",");
        if (!now().is("]")) add(node, expression());
      }
      expect("]");
    } else if (skip("{")) {
      node->kind = Kind::dict;
      while (!now().is("}")) {
        if (!node->kids.empty()) expect(",");
        if (now().is("}")) break;
        add(node, expression());
        expect(":");
        add(node, expression());
      }
      expect("}");
    } else {
      fail("unexpected " + described());
    }
    return node;
  }

  NodePtr postfix(NodePtr node) {
    for (;;) {
      if (now().is(".")) {
        auto whole = make(Kind::attribute);
        take();
        if (now().kind == Token_::integer) {
          whole->kind = Kind::item;
          add(whole, std::move(node));
          add(whole, primary());
        } else {
          whole->name = name();
          add(whole, std::move(node));
          if (now().is("(") && !is_method(whole->name))
            throw Fault{"the method ." + whole->name + "() is not supported", whole->line};
        }
        node = std::move(whole);
      } else if (now().is("[")) {
        auto whole = make(Kind::item);
        take();
        add(whole, std::move(node));
        add(whole, subscript());
        if (!now().is("]")) fail("expected ']', found " + described());
        take();
        node = std::move(whole);
      } else if (now().is("(")) {
        node = call(std::move(node));
      } else {
        return node;
      }
    }
  }

  NodePtr subscript() {
    auto node = make(Kind::slice);
    auto part = [&] { return now().is(":") || now().is("]") ? nullptr : expression(); };
    auto first = part();
    if (!now().is(":")) return first ? std::move(first) : (fail("expected a subscript"), nullptr);
    add(node, std::move(first));
    take();
    add(node, part());
    add(node, skip(":") ? part() : nullptr);
    return node;
  }

  // "(...)" onto a call, filter or test whose first kid is there.
  void arguments(const NodePtr& node) {
    expect("(");
    bool keywords = false;
    for (bool first = true; !now().is(")"); first = false) {
      if (!first) expect(",");
      if (now().is(")")) break;
      std::string how;
      if (now().is("*") || now().is("**")) {
        how = take().text;
      } else if (now().kind == Token_::name && next().is("=")) {
        how = take().text;
        take();
      }
      if (how.empty() && keywords) fail("a positional argument after a keyword");
      keywords |= !how.empty();
      node->names.push_back(how);
      add(node, expression());
    }
    expect(")");
  }
  NodePtr call(NodePtr callee) {
    auto node = make(Kind::call);
    add(node, std::move(callee));
    arguments(node);
    return node;
  }
  NodePtr filters(NodePtr node, bool without_bar) {
    while (without_bar || now().is("|")) {
      if (!without_bar) take();
      without_bar = false;
      auto whole = make(Kind::filter, name());
      whole->builtin = find_filter(whole->name);
      if (!whole->builtin)
        throw Fault{"the filter '" + whole->name + "' is not supported", whole->line};
      add(whole, std::move(node));
      if (now().is("(")) arguments(whole);
      node = std::move(whole);
    }
    return node;
  }
  NodePtr test(NodePtr node) {
    take();
    const bool negated = skip("not");
    auto whole = make(Kind::test, name());
    whole->builtin = find_test(whole->name);
    if (!whole->builtin)
      throw Fault{"the test '" + whole->name + "' is not supported", whole->line};
    add(whole, std::move(node));
    const Token& t = now();
    if (t.is("(")) {
      arguments(whole);
    } else if (t.kind == Token_::text || t.kind == Token_::integer || t.kind == Token_::real ||
               t.is("[") || t.is("{") ||
               (t.kind == Token_::name && !t.is("else") && !t.is("or") && !t.is("and"))) {
      if (t.is("is")) fail("tests cannot be chained");
      whole->names.push_back("");
      add(whole, postfix(primary()));
    }
    return negated ? with(make(Kind::not_), std::move(whole)) : std::move(whole);
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0, loops_ = 0;
};

}  // namespace

std::vector<NodePtr> parse(std::string_view source) { return Parser(source).run(); }

}  // namespace xpyd::jinja
