// A chat template as tokens and as a tree.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/jinja_value.h"

namespace xpyd::jinja {

struct Token {
  enum class Kind { data, name, text, integer, op, end };  // op: {{ }} {% %} too
  Kind kind;
  std::string text;
  int line;
  bool is(std::string_view op_or_name) const { return (kind == Kind::op || kind == Kind::name) && text == op_or_name; }
};
std::vector<Token> lex(std::string_view source);  // throws Fault

enum class Kind {
  // Statements.
  block,         // kids in a row
  output,        // kids[0]
  set,           // kids[0] = kids[1]
  set_block,     // kids[0] = the text of block kids[1]
  for_loop,      // kids: target, iterable, condition or null, block, else block or null
  if_else,       // kids: condition, block, condition, block, ..., perhaps the else block
  macro,         // name, block kids[0], parameters `names`, the last of which have defaults kids[1..]
  filter_block,  // filters kids[0] around a null; block kids[1]
  scope,         // block kids[0]: {% generation %}
  break_loop,
  continue_loop,
  // Expressions.
  constant,   // value
  name,       // name
  attribute,  // kids[0].name
  item,       // kids[0][kids[1]]
  slice,      // kids[0][kids[1]:kids[2]:kids[3]], of which the last three may be null
  list,
  tuple,
  dict,    // kids: key, value, key, value, ...
  call,    // kids[0](kids[1..]), named `names`: "" is positional, "*" is spread
  filter,  // kids[0]|builtin(kids[1..]); kids[0] is null where a block's text goes
  test,    // kids[0] is builtin(kids[1..])
  not_,
  negative,
  binary,       // kids[0] name kids[1]
  conditional,  // kids[0] if kids[1] else kids[2], which may be null
};

struct Node {
  Kind kind;
  int line;
  std::string name;
  int height = 1;  // bounded, so that trees may be walked by recursion
  Value value = {};
  const Builtin* builtin = nullptr;
  std::vector<std::unique_ptr<Node>> kids = {};
  std::vector<std::string> names = {};
};
using NodePtr = std::unique_ptr<Node>;

// Throws a Fault with its line for what is not Jinja or not supported.
NodePtr parse(std::vector<Token> tokens);

}  // namespace xpyd::jinja
