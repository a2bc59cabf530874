// libFuzzer: the input up to its first NUL byte is a chat template, and the rest is a JSON object of variables. Neither
// may crash, hang or exceed the limits, and every byte of an output has an origin.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/json/json.h"
#include "base/utf8.h"
#include "model/jinja/jinja.h"

using namespace xpyd;
using namespace xpyd::testing;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), size);
  const std::string_view json = input.substr(std::min(end + 1, size));
  auto made = jinja::Template::parse(input.substr(0, end));
  if (!made.ok()) {
    XPYD_CHECK(!made.error().message.empty());
    return 0;
  }
  std::vector<std::pair<std::string, jinja::Value>> variables;
  if (parse_json(json, "variables").ok()) {
    const jinja::Value all = jinja::json_value(json);
    if (all.dict())
      for (const auto& [name, value] : all.dict()->items) variables.emplace_back(name.text()->bytes, value);
  }
  const jinja::Limits limits{.work = 1 << 18, .output_bytes = 1 << 16};
  auto out = made.value().render(variables, 1753574400, limits);
  if (!out.ok()) return 0;
  const jinja::Text& text = out.value();
  XPYD_CHECK(text.bytes.size() <= limits.output_bytes && is_utf8(text.bytes));
  size_t at = 0;
  for (const auto& run : text.runs) {
    XPYD_CHECK(run.end > at);
    at = run.end;
  }
  XPYD_CHECK(at == text.bytes.size());
  return 0;
}
