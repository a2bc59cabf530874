#include "base/json/json.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "base/os.h"

namespace xpyd {
namespace {

using nlohmann::json;

// Tracks the position in the text, because nlohmann's callbacks do not have it.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;
  CountingIterator(const char* at, const char** seen) : at_(at), seen_(seen) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *seen_ = ++at_;
    return *this;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** seen_;
};

// nlohmann quotes the offending token at any length.
std::string without_prefix(std::string text) {
  if (text.starts_with('[')) {
    if (size_t end = text.find("] "); end != text.npos) text.erase(0, end + 2);
  }
  if (text.starts_with("parse error")) {
    if (size_t colon = text.find(": "); colon != text.npos) text.erase(0, colon + 2);
  }
  constexpr size_t kLongest = 200;
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) c = '?';
  return text;
}

class Builder {  // nlohmann's SAX interface
 public:
  Builder(const JsonLimits& limits, const char* begin, const char** seen)
      : limits_(limits), begin_(begin), seen_(seen) {}

  bool null() { return put(nullptr); }
  bool boolean(bool value) { return put(value); }
  bool number_integer(json::number_integer_t value) { return put(value); }
  bool number_unsigned(json::number_unsigned_t value) { return put(value); }
  bool number_float(json::number_float_t value, const std::string&) { return put(value); }
  bool string(std::string& value) { return put(std::move(value)); }
  bool binary(json::binary_t&) { return fail("binary value"); }
  bool start_object(size_t) { return open(json::value_t::object); }
  bool start_array(size_t) { return open(json::value_t::array); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    auto [at, fresh] = open_.back()->get_ref<json::object_t&>().try_emplace(name);
    if (!fresh) return fail("duplicate key \"" + without_prefix(name) + "\"");
    slot_ = &at->second;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const json::exception& why) {
    error_ = "byte " + std::to_string(position) + ": " + without_prefix(why.what());
    return false;
  }

  json root;
  const std::string& error() const { return error_; }

 private:
  bool fail(const std::string& why) {
    error_ = "byte " + std::to_string(*seen_ - begin_) + ": " + why;
    return false;
  }
  template <class T>
  json* place(T&& value) {
    if (!open_.empty() && open_.back()->is_array())
      return &open_.back()->get_ref<json::array_t&>().emplace_back(std::forward<T>(value));
    json* at = open_.empty() ? &root : slot_;
    *at = json(std::forward<T>(value));
    return at;
  }
  template <class T>
  bool put(T&& value) {
    place(std::forward<T>(value));
    return true;
  }
  bool open(json::value_t kind) {
    if (static_cast<int>(open_.size()) >= limits_.max_depth)
      return fail("it is nested deeper than " + std::to_string(limits_.max_depth));
    open_.push_back(place(kind));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const JsonLimits& limits_;
  const char* begin_;
  const char** seen_;
  std::vector<json*> open_;  // the containers that enclose the next value
  json* slot_ = nullptr;     // the place of the value of the last key
  std::string error_;
};

std::string labelled(const std::string& what, const std::string& name) {
  return (what.empty() ? "" : what + ": ") + "field \"" + name + "\"";
}

Error wrong(const std::string& what, const std::string& name, const std::string& expected, const json* got) {
  std::string message = labelled(what, name) + ": expected " + expected;
  if (got == nullptr) return invalid(message + ", but the field is missing");
  std::string text = got->is_structured() ? std::string(got->type_name())
                                          : got->dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 60) + "...";
  return invalid(message + ", got " + text);
}

const json* member(const json& object, const std::string& name) {
  if (!object.is_object()) return nullptr;
  auto at = object.find(name);
  return at == object.end() ? nullptr : &*at;
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

void append_quoted(std::string& out, std::string_view text) {
  const auto plain = [](unsigned char c) { return c >= 0x20 && c < 0x7f && c != '"' && c != '\\'; };
  if (std::ranges::all_of(text, plain)) {  // most text of answers: no copy
    out += '"';
    out += text;
    out += '"';
  } else {
    out += json_text(json(text));
  }
}

}  // namespace

Result<json> parse_json(std::string_view text, const std::string& what, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes)
    return invalid(what + ": " + std::to_string(text.size()) + " bytes of JSON; expected at most " +
                   std::to_string(limits.max_bytes));
  if (const size_t nul = text.find('\0'); nul != text.npos)  // nlohmann would end there
    return invalid(what + ": byte " + std::to_string(nul + 1) + ": a NUL byte");
  const char* begin = text.data();
  const char* seen = begin;
  Builder builder(limits, begin, &seen);
  bool good = json::sax_parse(CountingIterator(begin, &seen), CountingIterator(begin + text.size(), &seen), &builder);
  if (!good) return invalid(what + ": " + builder.error());
  return std::move(builder.root);
}

Result<std::string> read_small_file(const std::string& path, size_t max_bytes) {
  auto failed = [&](const std::string& why) { return Error{ErrorCode::io, path + ": " + why}; };
  std::error_code error;
  const std::filesystem::file_status file = std::filesystem::status(path, error);
  if (file.type() == std::filesystem::file_type::not_found) return Error{ErrorCode::not_found, path + ": no such file"};
  if (error) return failed(error.message());
  if (file.type() != std::filesystem::file_type::regular) return failed("not a regular file");
  if (const uintmax_t bytes = std::filesystem::file_size(path, error); bytes > max_bytes)
    return failed(std::to_string(bytes) + " bytes; expected at most " + std::to_string(max_bytes));
  std::ifstream in(path, std::ios::binary);
  if (!in) return failed(os_text());
  return std::string(std::istreambuf_iterator<char>(in), {});
}

std::string json_text(const json& value, int indent) {
  return value.dump(indent, ' ', false, json::error_handler_t::replace);
}

Result<json> parse_json_file(const std::string& path, const JsonLimits& limits) {
  auto text = read_small_file(path, limits.max_bytes);
  if (!text.ok()) return text.error();
  return parse_json(text.value(), path, limits);
}

const json* find_field(const json& object, const std::string& name) {
  const json* at = member(object, name);
  return at == nullptr || at->is_null() ? nullptr : at;
}

Result<int64_t> get_int(const json& object, const std::string& name, int64_t min, int64_t max,
                        const std::string& what) {
  const json* at = member(object, name);
  std::string expected = "an integer from " + std::to_string(min) + " to " + std::to_string(max);
  if (at == nullptr || !at->is_number_integer()) return wrong(what, name, expected, at);
  bool fits = !at->is_number_unsigned() || at->get<uint64_t>() <= uint64_t{INT64_MAX};
  if (!fits || at->get<int64_t>() < min || at->get<int64_t>() > max) return wrong(what, name, expected, at);
  return at->get<int64_t>();
}

Result<double> get_double(const json& object, const std::string& name, double min, double max,
                          const std::string& what) {
  const json* at = member(object, name);
  std::string expected = "a number from " + number_text(min) + " to " + number_text(max);
  if (at == nullptr || !at->is_number()) return wrong(what, name, expected, at);
  double value = at->get<double>();
  if (!std::isfinite(value) || value < min || value > max) return wrong(what, name, expected, at);
  return value;
}

Result<bool> get_bool(const json& object, const std::string& name, const std::string& what) {
  const json* at = member(object, name);
  if (at == nullptr || !at->is_boolean()) return wrong(what, name, "true or false", at);
  return at->get<bool>();
}

Result<std::string> get_string(const json& object, const std::string& name, const std::string& what) {
  const json* at = member(object, name);
  if (at == nullptr || !at->is_string()) return wrong(what, name, "a string", at);
  return at->get<std::string>();
}

Result<const json*> get_array(const json& object, const std::string& name, const std::string& what) {
  const json* at = member(object, name);
  if (at == nullptr || !at->is_array()) return wrong(what, name, "an array", at);
  return at;
}

Result<const json*> get_object(const json& object, const std::string& name, const std::string& what) {
  const json* at = member(object, name);
  if (at == nullptr || !at->is_object()) return wrong(what, name, "an object", at);
  return at;
}

JsonFields::JsonFields(const json& object, std::string what) : object_(object), what_(std::move(what)) {
  if (!object.is_object()) throw invalid(what_ + ": expected an object, got " + object.type_name());
}

void JsonFields::no_others() const {
  for (const auto& [name, value] : object_.items()) {
    if (std::ranges::find(asked_, name) != asked_.end()) continue;
    std::string known;
    for (const std::string& one : std::set(asked_.begin(), asked_.end())) known += (known.empty() ? "" : ", ") + one;
    throw invalid(what_ + ": " + name + ": no such field; expected " + known);
  }
}

JsonText& JsonText::open(char bracket) {
  comma();
  out_ += bracket;
  first_ = true;
  return *this;
}

JsonText& JsonText::close(char bracket) {
  out_ += bracket;
  first_ = false;
  return *this;
}

JsonText& JsonText::key(std::string_view name) {
  text(name);
  out_ += ':';
  first_ = true;
  return *this;
}

JsonText& JsonText::text(std::string_view value) {
  comma();
  append_quoted(out_, value);
  return *this;
}

JsonText& JsonText::raw(std::string_view json) {
  comma();
  out_ += json;
  return *this;
}

void JsonText::comma() {
  if (!first_) out_ += ',';
  first_ = false;
}

std::string json_quote(std::string_view text) { return JsonText().value(text).take(); }

}  // namespace xpyd
