// Values: made of JSON, compared, and as text.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/json/json.h"
#include "model/jinja/jinja_node.h"

namespace xpyd::model::jinja {
namespace {

class JsonBuilder {  // nlohmann's SAX interface
 public:
  bool null() { return place({None()}); }
  bool boolean(bool value) { return place({value}); }
  bool number_integer(int64_t value) { return place({value}); }
  bool number_unsigned(uint64_t value) {
    return value > uint64_t{INT64_MAX} ? place({static_cast<double>(value)}) : place({static_cast<int64_t>(value)});
  }
  bool number_float(double value, const std::string&) { return place({value}); }
  bool string(std::string& value) { return place(text_value(value)); }
  bool binary(nlohmann::json::binary_t&) { return false; }
  bool start_object(size_t) { return open(); }
  bool start_array(size_t) { return open(); }
  bool end_object() {
    Dict dict = std::move(open_.back().dict);
    open_.pop_back();
    return place(dict_value(std::move(dict)));
  }
  bool end_array() {
    List list = std::move(open_.back().list);
    open_.pop_back();
    return place(list_value(std::move(list)));
  }
  bool key(std::string& name) {
    open_.back().dict.emplace_back(name, Value());
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) { return false; }
  Value root;

 private:
  struct Open {  // an object if it has a key
    Dict dict;
    List list;
  };
  bool open() {
    open_.emplace_back();
    return true;
  }
  bool place(Value value) {
    if (open_.empty())
      root = std::move(value);
    else if (!open_.back().dict.empty())
      open_.back().dict.back().second = std::move(value);
    else
      open_.back().list.push_back(std::move(value));
    return true;
  }
  std::vector<Open> open_;
};

// Writes items between brackets by `each`, one per line if there is an indent.
template <class Each>
void enclose(const char* brackets, size_t n, int indent, int level, Each each, std::string& out) {
  const auto line = [&](int at) {
    if (indent >= 0) (out += '\n').append(size_t(at * indent), ' ');
  };
  out += brackets[0];
  for (size_t i = 0; i < n; ++i) {
    if (i > 0) out += indent >= 0 ? "," : ", ";
    line(level + 1);
    each(i);
  }
  if (n > 0) line(level);
  out += brackets[1];
}

void append_json(const Value& value, int indent, int level, std::string& out) {
  if (auto* text = value.text()) {
    out += nlohmann::json(*text).dump();
  } else if (auto* list = value.list()) {
    enclose(
        "[]", list->size(), indent, level, [&](size_t i) { append_json((*list)[i], indent, level + 1, out); }, out);
  } else if (auto* dict = value.dict()) {
    const auto item = [&](size_t i) {
      out += nlohmann::json((*dict)[i].first).dump() + ": ";
      append_json((*dict)[i].second, indent, level + 1, out);
    };
    enclose("{}", dict->size(), indent, level, item, out);
  } else if (value.is_none()) {
    out += "null";
  } else if (auto* boolean = std::get_if<bool>(&value.as)) {
    out += *boolean ? "true" : "false";
  } else if (auto* integer = std::get_if<int64_t>(&value.as)) {
    out += std::to_string(*integer);
  } else if (auto* real = std::get_if<double>(&value.as)) {
    out += nlohmann::json(*real).dump();
  } else {
    throw Fault{"tojson of an undefined value, a namespace or a function"};
  }
}

// Gives a list or dict `held` the weight of its items and itself, and a height above theirs.
Value above(Value held, uint64_t weight, uint32_t height) {
  if (height >= 500) throw Fault{"lists and dicts are nested too deeply"};
  held.weight = uint32_t(std::min<uint64_t>(weight, kMaxWeight));
  held.height = height + 1;
  return held;
}

}  // namespace

Value text_value(std::string text) {
  const auto weight = uint32_t(std::min<uint64_t>(1 + text.size() / 16, kMaxWeight));
  return {std::make_shared<const std::string>(std::move(text)), weight};
}
Value list_value(List items) {
  uint64_t weight = 1;
  uint32_t height = 0;
  for (const Value& item : items) weight += item.weight, height = std::max(height, item.height);
  return above({std::make_shared<const List>(std::move(items))}, weight, height);
}
Value dict_value(Dict items) {
  uint64_t weight = 1;
  uint32_t height = 0;
  for (const auto& [key, item] : items)
    weight += 1 + key.size() / 16 + item.weight, height = std::max(height, item.height);
  return above({std::make_shared<const Dict>(std::move(items))}, weight, height);
}

Value json_value(std::string_view json) {
  JsonBuilder builder;
  nlohmann::json::sax_parse(json, &builder);
  return std::move(builder.root);
}

const Value* find(const Dict& dict, std::string_view key) {
  const auto found = std::find_if(dict.begin(), dict.end(), [&](const auto& item) { return item.first == key; });
  return found == dict.end() ? nullptr : &found->second;
}

bool Value::truth() const {
  if (const bool* boolean = std::get_if<bool>(&as)) return *boolean;
  if (const int64_t* integer = std::get_if<int64_t>(&as)) return *integer != 0;
  if (const double* real = std::get_if<double>(&as)) return *real != 0;
  if (text()) return !text()->empty();
  if (list()) return !list()->empty();
  if (dict()) return !dict()->empty();
  return !is_undefined() && !is_none();
}

bool equal(const Value& a, const Value& b) {
  if (a.as.index() != b.as.index()) return false;
  if (a.text()) return *a.text() == *b.text();
  if (a.list()) return std::equal(a.list()->begin(), a.list()->end(), b.list()->begin(), b.list()->end(), equal);
  if (a.dict()) {
    if (a.dict()->size() != b.dict()->size()) return false;
    const auto sorted = [](Dict dict) {
      std::sort(dict.begin(), dict.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
      return dict;
    };
    const Dict left = sorted(*a.dict()), right = sorted(*b.dict());
    return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                      [](const auto& x, const auto& y) { return x.first == y.first && equal(x.second, y.second); });
  }
  if (auto* boolean = std::get_if<bool>(&a.as)) return *boolean == std::get<bool>(b.as);
  if (auto* integer = std::get_if<int64_t>(&a.as)) return *integer == std::get<int64_t>(b.as);
  if (auto* real = std::get_if<double>(&a.as)) return *real == std::get<double>(b.as);
  return a.get<Namespace>() == b.get<Namespace>();
}

std::string str(const Value& value) {
  if (value.text()) return *value.text();
  if (value.is_undefined()) return "";
  if (value.is_none()) return "None";
  if (const bool* boolean = std::get_if<bool>(&value.as)) return *boolean ? "True" : "False";
  if (std::holds_alternative<int64_t>(value.as) || std::holds_alternative<double>(value.as)) return tojson(value, -1);
  throw Fault{"a list, a dict, a namespace or a function as text"};
}

std::string tojson(const Value& value, int indent) {
  std::string out;
  append_json(value, indent, 0, out);
  return out;
}

}  // namespace xpyd::model::jinja
