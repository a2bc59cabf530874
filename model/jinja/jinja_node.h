// A template as a tree, and the table of filters, tests and methods.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/jinja/jinja.h"

namespace xpyd::model::jinja {

// Any error within the interpreter; the functions of jinja.h return it as an Error.
struct Fault {
  std::string what;
  int line = 0;  // 0: not known yet
};

enum class Kind {
  // Statements.
  block,     // kids in a row
  output,    // kids[0]
  set,       // kids[0] = kids[1]
  for_loop,  // kids: target, iterable, condition or null, block
  if_else,   // kids: condition, block, condition, block, ..., then perhaps the else block
  macro,     // name, block kids[0], parameters `names`
  // Expressions.
  constant,     // value
  name,         // name
  attribute,    // kids[0].name
  item,         // kids[0][kids[1]]
  slice,        // kids[0][kids[1]:kids[2]:kids[3]]; the last three may be null
  list,         // kids
  dict,         // kids: key, value, key, value, ...
  tuple,        // names that a loop sets
  call,         // name(kids), named `names`: "" is positional
  filter,       // kids[0]|name(kids[1..]); an argument that is not given is null
  test,         // kids[0] is name(kids[1..])
  method,       // kids[0].name(kids[1..])
  not_,         // kids[0]
  binary,       // kids[0] name kids[1]
  conditional,  // kids[0] if kids[1] else kids[2], which may be null
};

struct Node {
  Kind kind;
  int line;
  std::string name;
  Value value = {};
  int height = 1;  // bounded, so that code may recurse through a tree
  std::vector<std::unique_ptr<Node>> kids = {};
  std::vector<std::string> names = {};
};
using NodePtr = std::unique_ptr<Node>;

// Throws a Fault with its line for input that is not Jinja or not supported.
NodePtr parse_nodes(std::string_view source);

struct Builtin {
  Kind kind;  // filter, test or method
  std::string_view name;
  std::vector<std::string_view> parameters = {};
  bool at_once = false;  // reads none of what a value holds
};
const Builtin* find_builtin(Kind kind, std::string_view name);

bool equal(const Value& a, const Value& b);
std::string str(const Value& value);                 // Python's str() of texts, numbers, booleans and none
std::string tojson(const Value& value, int indent);  // Python's json.dumps(); indent < 0: one line

}  // namespace xpyd::model::jinja
