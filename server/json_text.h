// Writes JSON text for answers and stream events: no tree, no allocation per field. Whatever bytes
// a string holds, the result is one line of valid UTF-8 (SSE readers need both).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace xpyd {

std::string json_quote(std::string_view text);  // invalid UTF-8 becomes U+FFFD

// JsonText json;
// json.open('{').key("id").text(id).key("choices").open('[') ... close(']').close('}');
// Commas come by themselves. Closing what is not open is a bug that shows as bad JSON.
class JsonText {
 public:
  JsonText& open(char bracket) {
    comma();
    out_ += bracket;
    first_ = true;
    return *this;
  }
  JsonText& close(char bracket) {
    out_ += bracket;
    first_ = false;
    return *this;
  }
  JsonText& key(std::string_view name);
  JsonText& text(std::string_view value);
  JsonText& integer(int64_t value);
  JsonText& number(double value);  // shortest form that reads back equal; null where not finite
  JsonText& number(float value);
  JsonText& boolean(bool value) { return raw(value ? "true" : "false"); }
  JsonText& null() { return raw("null"); }
  JsonText& raw(std::string_view json);
  std::string take() { return std::move(out_); }

 private:
  template <class T>
  JsonText& append_number(T value);
  void comma() {
    if (!first_) out_ += ',';
    first_ = false;
  }
  std::string out_;
  bool first_ = true;  // the next value or key needs no comma
};

}  // namespace xpyd
