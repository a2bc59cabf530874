#include "model/jinja/jinja_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/utf8.h"
#include "model/jinja/jinja_eval.h"
#include "model/unicode.h"

namespace xpyd::model::jinja {
namespace {

constexpr int kMaxDepth = 100;  // json_value() has 64
constexpr size_t kMaxWeight = size_t{1} << 24;

// Null for a value that holds no others, and for a namespace, which its Evaluator empties.
const Extent* extent_of(const Value& value) {
  if (auto* list = value.list()) return &list->extent;
  if (auto* dict = value.dict()) return &dict->extent;
  if (auto* loop = value.get<Loop>()) return &loop->extent;
  auto* function = value.get<const Function>();
  return function ? &function->extent : nullptr;
}

void add(Extent& sum, const Value& value) {
  const Extent* inside = extent_of(value);
  sum.weight += weight_of(value);
  if (inside) sum.depth = std::max(sum.depth, 1 + inside->depth);
  if (sum.weight > kMaxWeight) throw Fault{"a list or dict became too large"};
  if (sum.depth > kMaxDepth) throw Fault{"lists or dicts are nested too deeply"};
}

class JsonBuilder {  // nlohmann's SAX interface
 public:
  bool null() { return place(None()); }
  bool boolean(bool value) { return place(value); }
  bool number_integer(int64_t value) { return place(value); }
  bool number_unsigned(uint64_t value) {
    if (value > uint64_t{INT64_MAX}) return place(static_cast<double>(value));
    return place(static_cast<int64_t>(value));
  }
  bool number_float(double value, const std::string&) { return place(value); }
  bool string(std::string& value) { return place(text_value({value, true})); }
  bool binary(nlohmann::json::binary_t&) { return false; }
  bool start_object(size_t) { return open(); }
  bool start_array(size_t) { return open(); }
  bool end_array() { return place(list_value(close().values)); }
  bool end_object() {
    Open done = close();
    std::vector<std::pair<Value, Value>> items;
    for (size_t i = 0; i < done.keys.size(); ++i)
      items.emplace_back(std::move(done.keys[i]), std::move(done.values[i]));
    return place(dict_value(std::move(items)));
  }
  bool key(std::string& name) {
    open_.back().keys.push_back(text_value({name, true}));
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) { return false; }
  Value root;

 private:
  struct Open {
    std::vector<Value> keys, values;
  };
  bool place(Value value) {
    (open_.empty() ? root : open_.back().values.emplace_back()) = std::move(value);
    return true;
  }
  bool open() {
    open_.emplace_back();
    return true;
  }
  Open close() {
    Open done = std::move(open_.back());
    open_.pop_back();
    return done;
  }
  std::vector<Open> open_;
};

bool is_space(uint32_t c) { return unicode::is_space(c) || (c >= 0x1c && c <= 0x1f); }

}  // namespace

// ---- Text

void Text::append(std::string_view text, bool from_client) {
  if (text.empty()) return;
  bytes += text;
  if (runs.empty() || runs.back().from_client != from_client) runs.push_back({0, from_client});
  runs.back().end = bytes.size();
}

void Text::append(const Text& text, size_t begin, size_t end) {
  end = std::min(end, text.bytes.size());
  auto run = std::upper_bound(text.runs.begin(), text.runs.end(), begin,
                              [](size_t at, const Run& r) { return at < r.end; });
  for (; begin < end; ++run) {
    const size_t stop = std::min(run->end, end);
    append(std::string_view(text.bytes).substr(begin, stop - begin), run->from_client);
    begin = stop;
  }
}

Text Text::substr(size_t begin, size_t end) const {
  Text part;
  part.append(*this, begin, end);
  part.safe = safe;
  return part;
}

bool Text::any_from_client() const {
  return std::any_of(runs.begin(), runs.end(), [](const Run& r) { return r.from_client; });
}

size_t skip_space(std::string_view text, size_t at) { return unicode::end_of_run(text, at, is_space); }
size_t trailing_space(std::string_view text) { return unicode::begin_of_run(text, text.size(), is_space); }

size_t code_point_at(std::string_view text, size_t index) {
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) {
    ++at;
    while (at < text.size() && (uint8_t(text[at]) & 0xc0) == 0x80) ++at;
  }
  return at;
}

// ---- Values

const Value* Dict::find(std::string_view key) const {
  for (const auto& [known, value] : items)
    if (const Text* text = known.text(); text && text->bytes == key) return &value;
  return nullptr;
}

int64_t Value::integer() const {
  if (const int64_t* i = std::get_if<int64_t>(&as)) return *i;
  if (is_bool()) return std::get<bool>(as);
  throw Fault{std::string("expected an integer, got ") + type_name()};
}

double Value::number() const { return real() ? *real() : static_cast<double>(integer()); }

bool Value::truth() const {
  if (is_undefined() || is_none()) return false;
  if (is_number()) return number() != 0;
  if (auto* t = text()) return !t->bytes.empty();
  if (auto* l = list()) return l->form == List::Form::lazy || !l->items.empty();
  if (auto* d = dict()) return !d->items.empty();
  return true;
}

bool Value::any_from_client() const {
  auto any = [](const Value& v) { return v.any_from_client(); };
  if (auto* t = text()) return t->any_from_client();
  if (auto* l = list()) return std::any_of(l->items.begin(), l->items.end(), any);
  return dict() && std::any_of(dict()->items.begin(), dict()->items.end(),
                               [&](auto& item) { return any(item.first) || any(item.second); });
}

const char* Value::type_name() const {
  static constexpr const char* kForms[] = {"a list", "a tuple", "a view", "a generator"};
  if (auto* l = list()) return kForms[static_cast<int>(l->form)];
  static constexpr const char* kNames[] = {"an undefined value", "none",   "a boolean", "an integer",  "a float",
                                           "a string",           "a list", "a dict",    "a namespace", "the loop",
                                           "a function"};
  return kNames[as.index()];
}

Value text_value(Text text) { return std::make_shared<const Text>(std::move(text)); }

Value method_value(const Builtin& method, Value self) {
  Extent extent;
  add(extent, self);
  return std::make_shared<const Function>(Function{nullptr, &method, std::move(self), extent});
}

Value loop_value(std::vector<Value> items) {
  Extent extent;
  for (const Value& item : items) add(extent, item);
  return std::make_shared<Loop>(Loop{std::move(items), 0, extent});
}

Value list_value(std::vector<Value> items, List::Form form) {
  Extent extent;
  for (const Value& item : items) add(extent, item);
  return std::make_shared<const List>(List{form, std::move(items), false, extent});
}

Value dict_value(std::vector<std::pair<Value, Value>> items) {
  Extent extent;
  for (const auto& [key, value] : items) {
    if (!key.text() && !key.is_integer()) throw Fault{std::string("a dict's key may not be ") + key.type_name()};
    add(extent, key);
    add(extent, value);
  }
  return std::make_shared<const Dict>(Dict{std::move(items), extent});
}

Value json_value(std::string_view json) {
  JsonBuilder builder;
  nlohmann::json::sax_parse(json, &builder);
  return std::move(builder.root);
}

size_t weight_of(const Text& text) { return text.bytes.size() / 16 + text.runs.size() / 2; }

size_t weight_of(const Value& value) {
  if (auto* t = value.text()) return 1 + weight_of(*t);
  const Extent* extent = extent_of(value);
  return extent ? extent->weight : 1;
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number())
    return a.real() || b.real() ? a.number() == b.number() : a.integer() == b.integer();
  if (a.as.index() != b.as.index()) return false;
  if (auto* t = a.text()) return t->bytes == b.text()->bytes;
  if (auto* l = a.list()) {
    const auto& theirs = b.list()->items;
    return l->form == b.list()->form &&
           std::equal(l->items.begin(), l->items.end(), theirs.begin(), theirs.end(), equal);
  }
  if (auto* d = a.dict()) {
    auto as_text = [](const Value& key) { return (key.text() ? "text " : "") + str(key).bytes; };
    std::unordered_map<std::string, const Value*> theirs;
    for (const auto& [key, item] : b.dict()->items) theirs.emplace(as_text(key), &item);
    return d->items.size() == theirs.size() && std::all_of(d->items.begin(), d->items.end(), [&](const auto& item) {
             auto at = theirs.find(as_text(item.first));
             return at != theirs.end() && equal(item.second, *at->second);
           });
  }
  if (a.is_undefined() || a.is_none()) return true;
  return a.get<Namespace>() == b.get<Namespace>() && a.get<Loop>() == b.get<Loop>() &&
         a.get<const Function>() == b.get<const Function>();
}

bool less(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) return a.real() || b.real() ? a.number() < b.number() : a.integer() < b.integer();
  if (a.text() && b.text()) return a.text()->bytes < b.text()->bytes;  // by code points
  throw Fault{std::string("no order between ") + a.type_name() + " and " + b.type_name()};
}

// ---- Values as text: Python's str() and json.dumps()

namespace {

struct Style {
  bool json = false, ensure_ascii = false;
  int64_t indent = -1;  // spaces per level; negative: all in one line
  std::string item_separator = ", ", key_separator = ": ";
};

// Python's repr of a float: the shortest digits that read back, in Python's notation.
std::string float_repr(double value) {
  if (!std::isfinite(value)) throw Fault{"a float that is no number"};
  char buffer[64];
  const double size = std::abs(value);
  const bool scientific = value != 0 && (size < 1e-4 || size >= 1e16);
  const auto format = scientific ? std::chars_format::scientific : std::chars_format::fixed;
  std::string digits(buffer, std::to_chars(buffer, buffer + sizeof buffer, value, format).ptr);
  return scientific || digits.find('.') != digits.npos ? digits : digits + ".0";
}

void append_hex(std::string& out, const char* prefix, uint32_t value, int digits) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, "%s%0*x", prefix, digits, value);
  out += buffer;
}

// Writes a quoted string. `keeps` tells which characters stay, `escape` writes the others.
template <class Keeps, class Escape>
void quote(std::string_view text, char mark, std::string_view plain, std::string_view escapes, Keeps keeps,
           Escape escape, std::string& out) {
  out += mark;
  while (!text.empty()) {
    const CodePoint c = next_code_point(text);
    const size_t at = c.value < 0x80 ? plain.find(char(c.value)) : plain.npos;
    if (at != plain.npos || c.value == uint32_t(mark))
      (out += '\\') += at == plain.npos ? mark : escapes[at];
    else if (keeps(c.value))
      out += text.substr(0, size_t(c.bytes));
    else
      escape(c.value);
    text.remove_prefix(size_t(c.bytes));
  }
  out += mark;
}

void append_repr(std::string_view text, std::string& out) {
  auto keeps = [](uint32_t c) {
    if (c < 0xa1 || c == 0xad) return c >= 0x20 && c < 0x7f;
    if (unicode::is_letter(c) || unicode::is_number(c)) return true;
    throw Fault{"repr() of a character beyond ASCII that is no letter or digit"};
  };
  const char mark = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  quote(
      text, mark, "\\\n\r\t", "\\nrt", keeps, [&](uint32_t c) { append_hex(out, "\\x", c, 2); }, out);
}

void append_json(std::string_view text, bool ensure_ascii, std::string& out) {
  auto keeps = [&](uint32_t c) { return c >= 0x20 && (c < 0x7f || !ensure_ascii); };
  auto escape = [&](uint32_t c) {
    if (c >= 0x10000) append_hex(out, "\\u", 0xd800 + ((c - 0x10000) >> 10), 4);
    append_hex(out, "\\u", c >= 0x10000 ? 0xdc00 + (c & 0x3ff) : c, 4);
  };
  quote(text, '"', "\\\n\r\t\b\f", "\\nrtbf", keeps, escape, out);
}

struct Brackets {
  std::string open, close;
};

// Writes the items of a list or dict by `each`, one per line if there is an indent.
template <class Each>
void enclose(const Brackets& brackets, size_t n, const Style& style, int64_t level, Each each, std::string& out) {
  auto line = [&](int64_t at) {
    if (style.indent >= 0) (out += '\n').append(size_t(at * style.indent), ' ');
  };
  out += brackets.open;
  for (size_t i = 0; i < n; ++i) {
    if (i > 0) out += style.item_separator;
    line(level + 1);
    each(i);
  }
  if (n > 0) line(level);
  out += brackets.close;
}

// Writes a value as JSON or as Python's repr().
void append(const Value& value, const Style& style, int64_t level, std::string& out) {
  const List* list = value.list();
  const bool json = style.json;
  auto write = [&](const Value& v) { append(v, style, level + 1, out); };
  if (const Text* text = value.text(); text && (json || !text->safe)) {
    json ? append_json(text->bytes, style.ensure_ascii, out) : append_repr(text->bytes, out);
  } else if (list && list->is_sequence()) {
    const bool tuple = !json && list->form == List::Form::tuple;
    const Brackets round = {"(", list->items.size() == 1 ? ",)" : ")"}, square = {"[", "]"};
    enclose(
        tuple ? round : square, list->items.size(), style, level, [&](size_t i) { write(list->items[i]); }, out);
  } else if (const Dict* dict = value.dict()) {
    auto item = [&](size_t i) {
      if (json && !dict->items[i].first.text()) throw Fault{"tojson of a dict with integer keys"};
      write(dict->items[i].first);
      out += style.key_separator;
      write(dict->items[i].second);
    };
    enclose({"{", "}"}, dict->items.size(), style, level, item, out);
  } else if (value.is_none()) {
    out += json ? "null" : "None";
  } else if (value.is_bool()) {
    out += value.truth() ? json ? "true" : "True" : json ? "false" : "False";
  } else if (value.is_integer()) {
    out += std::to_string(value.integer());
  } else if (value.real()) {
    out += float_repr(*value.real());
  } else if (value.is_undefined() && !json) {
    out += "Undefined";
  } else {
    throw Fault{std::string(json ? "tojson of " : "text of ") + value.type_name()};
  }
}

}  // namespace

Text str(const Value& value) {
  if (value.text()) return *value.text();
  if (value.is_undefined()) return {};
  std::string out;
  append(value, {}, 0, out);
  return {out, value.any_from_client()};
}

// Python's json.dumps().
Value tojson(Evaluator& e, const Value& v, const Arguments& a) {
  Style style{.json = true, .ensure_ascii = a[0].truth()};
  e.charge(4 * weight_of(v));
  if (a[1].given()) {
    style.indent = a[1].integer();
    style.item_separator = ',';
    if (style.indent < 0 || style.indent > 16) throw Fault{"tojson: expected an indent of 0 to 16"};
    e.charge(weight_of(v) * size_t(4 * style.indent));
  }
  if (a[2].given()) {
    if (!a[2].list() || a[2].list()->items.size() != 2) throw Fault{"tojson: expected two separators"};
    style.item_separator = text_of(a[2].list()->items[0]).bytes;
    style.key_separator = text_of(a[2].list()->items[1]).bytes;
    if (style.item_separator.size() + style.key_separator.size() > 16)
      throw Fault{"tojson: expected separators of at most 16 bytes"};
  }
  std::string out;
  append(v, style, 0, out);
  return text_value({out, v.any_from_client()});
}

}  // namespace xpyd::model::jinja
