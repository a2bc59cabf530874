// JSON from outside (requests, config.json, tokenizer.json, a safetensors header), parsed into nlohmann::json with
// bounds; readers of single fields, whose errors name the field; and JsonText, which writes answers and stream events.
//
// Thread safety: plain functions and values.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/status.h"

namespace xpyd {

struct JsonLimits {
  int max_depth = 64;            // depth of nested arrays and objects
  size_t max_bytes = 64u << 20;  // of text
};

// Parses strict RFC 8259 in valid UTF-8: no comments, trailing commas, NaN, lone surrogates, or numbers that overflow a
// double. The error, also of a limit, is `invalid_argument` and reads "WHAT: byte N: ...", with N counted from 1. A
// key that an object has twice is an error. An integer that does not fit 64 bits becomes a double. The value owns its
// strings. The fields of an object are sorted by name; their order in the text is lost.
Result<nlohmann::json> parse_json(std::string_view text, const std::string& what, const JsonLimits& limits = {});

// Reads a whole file. A file longer than max_bytes is refused before it is read.
Result<nlohmann::json> parse_json_file(const std::string& path, const JsonLimits& limits = {});
Result<std::string> read_small_file(const std::string& path, size_t max_bytes);

// Returns the text on one line, or with each level `indent` spaces deeper. Invalid UTF-8 becomes U+FFFD.
std::string json_text(const nlohmann::json& value, int indent = -1);

// Returns field `name` of `object`. If it is missing, of another type or out of range, the error names the field and
// what was expected; `what` (a file or "request") precedes it when given. 1.0 and "1" are not integers. get_double
// takes any finite number.
Result<int64_t> get_int(const nlohmann::json& object, const std::string& name, int64_t min, int64_t max,
                        const std::string& what = "");
Result<double> get_double(const nlohmann::json& object, const std::string& name, double min, double max,
                          const std::string& what = "");
Result<bool> get_bool(const nlohmann::json& object, const std::string& name, const std::string& what = "");
Result<std::string> get_string(const nlohmann::json& object, const std::string& name, const std::string& what = "");
// The result points into `object`.
Result<const nlohmann::json*> get_array(const nlohmann::json& object, const std::string& name,
                                        const std::string& what = "");
Result<const nlohmann::json*> get_object(const nlohmann::json& object, const std::string& name,
                                         const std::string& what = "");
// Returns the field's value, or nullptr if it is missing or null.
const nlohmann::json* find_field(const nlohmann::json& object, const std::string& name);

// Reads fields of one object. The first wrong field is thrown as an Error:
//   JsonFields fields(json, "config.json");
//   config.hidden = fields.integer("hidden_size", 1, 1 << 20);
//   config.rope_theta = fields.number_or("rope_theta", 1, 1e12, 10000);
// find() and the `_or` readers treat a missing or null field as absent. A field that is present is still checked.
class JsonFields {
 public:
  JsonFields(const nlohmann::json& object, std::string what);
  int64_t integer(const std::string& name, int64_t min, int64_t max) {
    return need(get_int(object_, asked(name), min, max, what_));
  }
  double number(const std::string& name, double min, double max) {
    return need(get_double(object_, asked(name), min, max, what_));
  }
  bool boolean(const std::string& name) { return need(get_bool(object_, asked(name), what_)); }
  std::string string(const std::string& name) { return need(get_string(object_, asked(name), what_)); }
  const nlohmann::json& array(const std::string& name) { return *need(get_array(object_, asked(name), what_)); }
  const nlohmann::json* find(const std::string& name) { return find_field(object_, asked(name)); }
  int64_t integer_or(const std::string& name, int64_t min, int64_t max, int64_t fallback) {
    return find(name) ? integer(name, min, max) : fallback;
  }
  double number_or(const std::string& name, double min, double max, double fallback) {
    return find(name) ? number(name, min, max) : fallback;
  }
  bool boolean_or(const std::string& name, bool fallback) { return find(name) ? boolean(name) : fallback; }
  std::string string_or(const std::string& name, std::string fallback) { return find(name) ? string(name) : fallback; }
  // Throws an Error if the object has a field that was not asked for, such as a misspelt one.
  void no_others() const;

 private:
  const std::string& asked(const std::string& name) { return asked_.emplace_back(name); }
  const nlohmann::json& object_;
  std::string what_;
  std::vector<std::string> asked_;
};

// Writes JSON without a tree and without an allocation per field. The result is one line of valid UTF-8 for any bytes
// in a string; readers of server-sent events need both.
//
//   JsonText json;
//   json.open('{').add("id", id, "object", "text_completion").key("choices").open('[') ... close(']').close('}');
//
// Commas are written automatically. A close without its open is a bug that gives bad JSON.
class JsonText {
 public:
  JsonText& open(char bracket);
  JsonText& close(char bracket);
  JsonText& key(std::string_view name);
  // Writes text, a number in the shortest form that reads back equal (null if it is not finite), true, false, null, or
  // a list of these.
  template <class T>
  JsonText& value(const T& x) {
    if constexpr (std::is_same_v<T, std::nullptr_t>) {
      return raw("null");
    } else if constexpr (std::is_same_v<T, bool>) {
      return raw(x ? "true" : "false");
    } else if constexpr (std::is_arithmetic_v<T>) {
      if constexpr (std::is_floating_point_v<T>)
        if (!std::isfinite(x)) return raw("null");
      char digits[40];
      const char* end = std::to_chars(digits, digits + sizeof digits, x).ptr;
      return raw(std::string_view(digits, size_t(end - digits)));
    } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
      return text(x);
    } else {
      open('[');
      for (const auto& one : x) value(one);
      return close(']');
    }
  }
  // Writes fields: name, value, name, value, ...
  template <class T, class... More>
  JsonText& add(std::string_view name, const T& x, const More&... more) {
    key(name).value(x);
    if constexpr (sizeof...(more) > 0) add(more...);
    return *this;
  }
  template <class... Fields>
  JsonText& object(const Fields&... fields) {
    return open('{').add(fields...).close('}');
  }
  JsonText& raw(std::string_view json);  // `json` is already JSON
  std::string take() { return std::move(out_); }

 private:
  JsonText& text(std::string_view value);
  void comma();
  std::string out_;
  bool first_ = true;  // the next value or key needs no comma
};
std::string json_quote(std::string_view text);  // invalid UTF-8 becomes U+FFFD

}  // namespace xpyd
