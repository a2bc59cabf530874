// Jinja's built-in tests, by its documentation.

#include "model/jinja_eval.h"

namespace xpyd::jinja {
namespace {

using A = Arguments;

enum class Is { lt, le, gt, ge };
template <Is which>
Value ordered(Evaluator&, const Value& v, A& a) {
  const Value& b = a.positional[0];
  switch (which) {
    case Is::lt:
      return less(v, b);
    case Is::gt:
      return less(b, v);
    case Is::le:
      return less(v, b) || equal(v, b);
    case Is::ge:
      return less(b, v) || equal(v, b);
  }
}
Value eq(Evaluator&, const Value& v, A& a) { return equal(v, a.positional[0]); }
Value ne(Evaluator&, const Value& v, A& a) { return !equal(v, a.positional[0]); }
int64_t modulo(const Value& v, int64_t by) {
  if (by == 0) throw Fault{"division by zero"};
  return by == -1 ? 0 : v.integer() % by;
}
Value in(Evaluator& e, const Value& v, A& a) {
  if (const Text* text = a.positional[0].text())
    return v.text() ? text->bytes.find(v.text()->bytes) != std::string::npos
                    : throw Fault{"in: expected a string"};
  for (const Value& each : e.iterate(a.positional[0]))
    if (equal(v, each)) return true;
  return false;
}

Value has_case(Evaluator& e, const Value& v, const char* method) {
  const Value text = text_value({str(v).bytes});
  return e.call(*find_method(text, method), text, {});
}
using E = Evaluator;
using V = const Value&;

constexpr Builtin kTests[] = {
    {"", "boolean", "", [](E&, V v, A&) { return Value(v.is_bool()); }},
    {"", "callable", "", [](E&, V v, A&) { return Value(v.get<const Function>() != nullptr); }},
    {"", "defined", "", [](E&, V v, A&) { return Value(!v.is_undefined()); }},
    {"", "divisibleby", "num",
     [](E&, V v, A& a) { return Value(modulo(v, a.positional[0].integer()) == 0); }},
    {"", "eq", "other", eq},
    {"", "==", "other", eq},
    {"", "equalto", "other", eq},
    {"", "even", "", [](E&, V v, A&) { return Value(modulo(v, 2) == 0); }},
    {"", "false", "", [](E&, V v, A&) { return Value(v.is_bool() && !v.truth()); }},
    {"", "filter", "", [](E&, V v, A&) { return Value(v.text() && find_filter(v.text()->bytes)); }},
    {"", "float", "", [](E&, V v, A&) { return Value(v.real() != nullptr); }},
    {"", "ge", "other", ordered<Is::ge>},
    {"", ">=", "other", ordered<Is::ge>},
    {"", "gt", "other", ordered<Is::gt>},
    {"", ">", "other", ordered<Is::gt>},
    {"", "greaterthan", "other", ordered<Is::gt>},
    {"", "in", "seq", in},
    {"", "integer", "", [](E&, V v, A&) { return Value(v.is_integer()); }},
    {"", "iterable", "",
     [](E&, V v, A&) {
       return Value(v.is_undefined() || v.text() || v.list() || v.dict() || v.get<Loop>());
     }},
    {"", "le", "other", ordered<Is::le>},
    {"", "<=", "other", ordered<Is::le>},
    {"", "lower", "", [](E& e, V v, A&) { return has_case(e, v, "islower"); }},
    {"", "lt", "other", ordered<Is::lt>},
    {"", "<", "other", ordered<Is::lt>},
    {"", "lessthan", "other", ordered<Is::lt>},
    {"", "mapping", "", [](E&, V v, A&) { return Value(v.dict() != nullptr); }},
    {"", "ne", "other", ne},
    {"", "!=", "other", ne},
    {"", "none", "", [](E&, V v, A&) { return Value(v.is_none()); }},
    {"", "number", "", [](E&, V v, A&) { return Value(v.is_number()); }},
    {"", "odd", "", [](E&, V v, A&) { return Value(modulo(v, 2) != 0); }},
    {"", "sequence", "",
     [](E&, V v, A&) {
       return Value(v.is_undefined() || v.text() || v.dict() ||
                    (v.list() &&
                     (v.list()->form <= List::Form::tuple || v.list()->form == List::Form::range)));
     }},
    {"", "string", "", [](E&, V v, A&) { return Value(v.text() != nullptr); }},
    {"", "test", "", [](E&, V v, A&) { return Value(v.text() && find_test(v.text()->bytes)); }},
    {"", "true", "", [](E&, V v, A&) { return Value(v.is_bool() && v.truth()); }},
    {"", "undefined", "", [](E&, V v, A&) { return Value(v.is_undefined()); }},
    {"", "upper", "", [](E& e, V v, A&) { return has_case(e, v, "isupper"); }},
};

}  // namespace

const Builtin* find_test(std::string_view name) {
  for (const Builtin& row : kTests)
    if (name == row.name) return &row;
  return nullptr;
}

}  // namespace xpyd::jinja
