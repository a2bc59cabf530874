// A chat template as tokens and as a tree.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/jinja_value.h"

namespace xpyd::jinja {

struct Token {
  enum class Kind {
    data,
    name,
    text,
    integer,
    real,
    op,
    begin_output,
    end_output,
    begin_tag,
    end_tag,
    end
  };
  Kind kind;
  std::string text;
  int line;
  bool is(std::string_view op_or_name) const {
    return (kind == Kind::op || kind == Kind::name) && text == op_or_name;
  }
};
std::vector<Token> lex(std::string_view source);  // throws Fault

enum class Kind {
  // Statements. `kids` is what stands in the tag, `body` and `orelse` what stands between tags.
  data,          // value
  output,        // kids[0]
  set,           // kids[0] = kids[1]
  set_block,     // kids[0] = body, through kids[1] where it is there
  for_loop,      // kids: target, iterable, condition or null; flag: recursive
  if_else,       // kids[0]; the others are the elifs
  macro,         // name, params with the last kids.size() defaults
  call_block,    // kids[0] is the call; then as a macro
  filter_block,  // kids[0]
  with,          // kids: target, value, target, value, ...
  scope,         // generation: the body alone
  break_loop,
  continue_loop,
  // Expressions.
  constant,   // value
  name,       // name
  attribute,  // kids[0].name; as a target: name `text` of the namespace `name`
  item,       // kids[0][kids[1]]
  slice,      // kids: begin, end, step, each may be null
  list,
  tuple,
  dict,  // a dict's kids: key, value, key, value, ...
  call,  // kids[0](arguments)
  filter,
  test,  // kids[0] (null: a block's text), name, arguments
  not_,
  negative,
  positive,
  and_,
  or_,
  conditional,  // a if b else c: kids b, a, c
  compare,      // kids[0] names[0] kids[1] names[1] kids[2]...
  binary,       // name
  concat,
};

struct Node {
  Kind kind;
  int line;
  int height = 1;  // bounded, so that trees may be walked by recursion
  std::string name;
  Value value;
  bool flag = false;
  const Builtin* builtin = nullptr;  // of a filter or test
  std::vector<std::unique_ptr<Node>> kids, body, orelse;
  // Of calls: of kids[1...], "" is positional, "*" and "**" spread, others are keywords. Of macros:
  // the parameters. Of comparisons: the operators.
  std::vector<std::string> names;
};
using NodePtr = std::unique_ptr<Node>;

// Throws a Fault with its line for what is not Jinja or not supported.
std::vector<NodePtr> parse(std::string_view source);

}  // namespace xpyd::jinja
