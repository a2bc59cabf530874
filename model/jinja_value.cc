#include "model/jinja_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/utf8.h"
#include "model/unicode.h"

namespace xpyd::jinja {
namespace {

constexpr int kMaxDepth = 100;  // json_value() has 64
constexpr size_t kMaxWeight = size_t{1} << 24;

template <class Items>
Extent measure(const Items& items) {
  Extent sum;
  int inside = 0;
  auto add = [&](const Value& v) {
    sum.weight += weight_of(v);
    if (auto* list = v.list()) inside = std::max(inside, list->extent.depth);
    if (auto* dict = v.dict()) inside = std::max(inside, dict->extent.depth);
    if (sum.weight > kMaxWeight) throw Fault{"a list or dict became too large"};
  };
  for (const auto& item : items) {
    if constexpr (std::is_same_v<Items, std::vector<Value>>) {
      add(item);
    } else {
      add(item.first);
      add(item.second);
    }
  }
  sum.depth += inside;
  if (sum.depth > kMaxDepth) throw Fault{"lists or dicts are nested too deeply"};
  return sum;
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
  bool start_object(size_t) { return open(false); }
  bool start_array(size_t) { return open(true); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    open_.back().keys.push_back(text_value({name, true}));
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) { return false; }
  Value root;

 private:
  struct Open {
    bool is_array;
    std::vector<Value> keys, values;
  };
  bool place(Value value) {
    (open_.empty() ? root : open_.back().values.emplace_back()) = std::move(value);
    return true;
  }
  bool open(bool is_array) {
    open_.push_back({is_array, {}, {}});
    return true;
  }
  bool close() {
    Open done = std::move(open_.back());
    open_.pop_back();
    if (done.is_array) return place(list_value(std::move(done.values)));
    std::vector<std::pair<Value, Value>> items;
    for (size_t i = 0; i < done.keys.size(); ++i)
      items.emplace_back(std::move(done.keys[i]), std::move(done.values[i]));
    return place(dict_value(std::move(items)));
  }
  std::vector<Open> open_;
};

// Python's repr of a float: the shortest digits that read back, in its choice of notation.
std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  auto shortest = [&](std::chars_format format) {
    return std::string(buffer, std::to_chars(buffer, buffer + sizeof buffer, value, format).ptr);
  };
  const double size = std::abs(value);
  if (value != 0 && (size < 1e-4 || size >= 1e16)) return shortest(std::chars_format::scientific);
  std::string digits = shortest(std::chars_format::fixed);
  return digits.find('.') == digits.npos ? digits + ".0" : digits;
}

void append_hex(std::string& out, const char* prefix, uint32_t value, int digits) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, "%s%0*x", prefix, digits, value);
  out += buffer;
}

std::string text_repr(std::string_view text) {
  const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, quote);
  while (!text.empty()) {
    const CodePoint c = next_code_point(text);
    if (c.value == '\n')
      out += "\\n";
    else if (c.value == '\r')
      out += "\\r";
    else if (c.value == '\t')
      out += "\\t";
    else if (c.value == '\\' || c.value == uint32_t(quote))
      (out += '\\') += char(c.value);
    else if (c.value < 0x20 || (c.value >= 0x7f && c.value <= 0xa0) || c.value == 0xad)
      append_hex(out, "\\x", c.value, 2);
    else if (c.value < 0x7f || unicode::is_letter(c.value) || unicode::is_number(c.value))
      out += text.substr(0, c.bytes);
    else
      throw Fault{"repr() of the character U+" + std::to_string(c.value) +
                  " (decimal) is not supported"};
    text.remove_prefix(c.bytes);
  }
  return out + quote;
}

void append_json_text(std::string_view text, bool ensure_ascii, std::string& out) {
  out += '"';
  while (!text.empty()) {
    const CodePoint c = next_code_point(text);
    static constexpr std::string_view kPlain = "\"\\\n\r\t\b\f", kEscapes = "\"\\nrtbf";
    const size_t at = c.value < 0x80 ? kPlain.find(char(c.value)) : kPlain.npos;
    if (at != kPlain.npos)
      (out += '\\') += kEscapes[at];
    else if (c.value < 0x20 || (ensure_ascii && c.value > 0x7e && c.value < 0x10000))
      append_hex(out, "\\u", c.value, 4);
    else if (ensure_ascii && c.value >= 0x10000) {
      append_hex(out, "\\u", 0xd800 + ((c.value - 0x10000) >> 10), 4);
      append_hex(out, "\\u", 0xdc00 + (c.value & 0x3ff), 4);
    } else
      out += text.substr(0, c.bytes);
    text.remove_prefix(c.bytes);
  }
  out += '"';
}

void dump(const Value& value, const JsonStyle& style, int level, std::string& out) {
  auto line = [&](int at) {
    if (!style.pretty) return;
    out += '\n';
    for (int i = 0; i < at; ++i) out += style.indent;
  };
  auto scalar = [&](const Value& v) -> std::string {
    if (v.is_none()) return "null";
    if (v.is_bool()) return v.truth() ? "true" : "false";
    if (v.is_integer()) return std::to_string(v.integer());
    if (const double* d = v.real())
      return std::isnan(*d)   ? "NaN"
             : std::isinf(*d) ? (*d < 0 ? "-Infinity" : "Infinity")
                              : float_repr(*d);
    throw Fault{std::string("tojson of ") + v.type_name()};
  };
  if (const Text* text = value.text()) {
    append_json_text(text->bytes, style.ensure_ascii, out);
  } else if (const List* list = value.list()) {
    if (list->form > List::Form::tuple) throw Fault{std::string("tojson of ") + value.type_name()};
    out += '[';
    for (size_t i = 0; i < list->items.size(); ++i) {
      if (i > 0) out += style.item_separator;
      line(level + 1);
      dump(list->items[i], style, level + 1, out);
    }
    if (!list->items.empty()) line(level);
    out += ']';
  } else if (const Dict* dict = value.dict()) {
    std::vector<const std::pair<Value, Value>*> items;
    for (const auto& item : dict->items) items.push_back(&item);
    if (style.sort_keys)
      std::stable_sort(items.begin(), items.end(),
                       [](auto* a, auto* b) { return less(a->first, b->first); });
    out += '{';
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += style.item_separator;
      line(level + 1);
      const Text* key = items[i]->first.text();
      append_json_text(key ? key->bytes : scalar(items[i]->first), style.ensure_ascii, out);
      out += style.key_separator;
      dump(items[i]->second, style, level + 1, out);
    }
    if (!items.empty()) line(level);
    out += '}';
  } else {
    out += scalar(value);
  }
}

}  // namespace

bool is_python_space(uint32_t c) { return unicode::is_space(c) || (c >= 0x1c && c <= 0x1f); }

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
  return part;
}

bool Text::any_from_client() const {
  return std::any_of(runs.begin(), runs.end(), [](const Run& r) { return r.from_client; });
}

const Value* Dict::find(std::string_view key) const {
  for (const auto& [name, value] : items)
    if (const Text* text = name.text(); text && text->bytes == key) return &value;
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
  if (auto* t = text()) return t->any_from_client();
  if (auto* l = list())
    return std::any_of(l->items.begin(), l->items.end(),
                       [](const Value& v) { return v.any_from_client(); });
  if (auto* d = dict())
    return std::any_of(d->items.begin(), d->items.end(), [](const auto& i) {
      return i.first.any_from_client() || i.second.any_from_client();
    });
  return false;
}

const char* Value::type_name() const {
  if (auto* l = list()) {
    static constexpr const char* kForms[] = {"a list", "a tuple", "a dict's view", "a range",
                                             "a generator"};
    return kForms[static_cast<int>(l->form)];
  }
  static constexpr const char* kNames[] = {
      "an undefined value", "none",   "a boolean", "an integer",  "a float",
      "a string",           "a list", "a dict",    "a namespace", "the loop",
      "a function"};
  return kNames[as.index()];
}

Value text_value(Text text) { return std::make_shared<const Text>(std::move(text)); }

Value list_value(std::vector<Value> items, List::Form form) {
  const Extent extent = measure(items);
  return std::make_shared<const List>(List{form, std::move(items), false, extent});
}

Value dict_value(std::vector<std::pair<Value, Value>> items) {
  const Extent extent = measure(items);
  return std::make_shared<const Dict>(Dict{std::move(items), extent});
}

Value json_value(std::string_view json) {
  JsonBuilder builder;
  nlohmann::json::sax_parse(json, &builder);
  return std::move(builder.root);
}

size_t weight_of(const Value& value) {
  if (auto* t = value.text()) return 1 + t->bytes.size() / 16;
  if (auto* l = value.list()) return l->extent.weight;
  return value.dict() ? value.dict()->extent.weight : 1;
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number())
    return a.real() || b.real() ? a.number() == b.number() : a.integer() == b.integer();
  if (a.as.index() != b.as.index()) return false;
  if (auto* t = a.text()) return t->bytes == b.text()->bytes;
  if (auto* l = a.list())
    return l->form == b.list()->form &&
           std::equal(l->items.begin(), l->items.end(), b.list()->items.begin(),
                      b.list()->items.end(), equal);
  if (auto* d = a.dict()) {
    std::unordered_map<std::string, const Value*> theirs;
    for (const auto& [key, item] : b.dict()->items) theirs.emplace(repr(key), &item);
    return d->items.size() == theirs.size() &&
           std::all_of(d->items.begin(), d->items.end(), [&](const auto& item) {
             auto at = theirs.find(repr(item.first));
             return at != theirs.end() && equal(item.second, *at->second);
           });
  }
  if (a.is_undefined() || a.is_none()) return true;
  return a.get<Namespace>() == b.get<Namespace>() && a.get<Loop>() == b.get<Loop>() &&
         a.get<const Function>() == b.get<const Function>();
}

bool less(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number())
    return a.real() || b.real() ? a.number() < b.number() : a.integer() < b.integer();
  if (a.text() && b.text()) return a.text()->bytes < b.text()->bytes;  // as code points
  if (a.list() && b.list() && a.list()->form == b.list()->form &&
      a.list()->form <= List::Form::tuple) {
    const auto &x = a.list()->items, &y = b.list()->items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
      if (!equal(x[i], y[i])) return less(x[i], y[i]);
    return x.size() < y.size();
  }
  throw Fault{std::string("no order between ") + a.type_name() + " and " + b.type_name()};
}

std::string repr(const Value& value) {
  if (value.is_none()) return "None";
  if (value.is_bool()) return value.truth() ? "True" : "False";
  if (value.is_integer()) return std::to_string(value.integer());
  if (const double* d = value.real()) return float_repr(*d);
  if (auto* t = value.text())
    return t->safe ? "Markup(" + text_repr(t->bytes) + ")" : text_repr(t->bytes);
  std::string out;
  if (auto* l = value.list(); l && l->form <= List::Form::tuple) {
    for (const Value& item : l->items) (out += out.empty() ? "" : ", ") += repr(item);
    if (l->form == List::Form::list) return "[" + out + "]";
    return "(" + out + (l->items.size() == 1 ? ",)" : ")");
  }
  if (auto* d = value.dict()) {
    for (const auto& [key, item] : d->items)
      (out += out.empty() ? "" : ", ") += repr(key) + ": " + repr(item);
    return "{" + out + "}";
  }
  if (value.is_undefined()) return "Undefined";
  throw Fault{std::string("text of ") + value.type_name()};
}

Text str(const Value& value) {
  if (auto* t = value.text()) return *t;
  if (value.is_undefined()) return {};
  return {repr(value), value.any_from_client()};
}

Text to_json(const Value& value, const JsonStyle& style) {
  std::string out;
  dump(value, style, 0, out);
  return {out, value.any_from_client()};
}

size_t code_point_at(std::string_view text, size_t index) {
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) do
      ++at;
    while (at < text.size() && (uint8_t(text[at]) & 0xc0) == 0x80);
  return at;
}

size_t count_code_points(std::string_view text) {
  return size_t(
      std::count_if(text.begin(), text.end(), [](char c) { return (uint8_t(c) & 0xc0) != 0x80; }));
}

}  // namespace xpyd::jinja
