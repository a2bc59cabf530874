// libFuzzer: the input up to its first NUL byte is a chat template, and the rest is a JSON object of variables. Neither
// may crash, and an output is UTF-8.
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
  jinja::Value variables;
  if (parse_json(json, "variables").ok()) variables = jinja::json_value(json);
  auto out = made.value().render(variables.dict() ? *variables.dict() : jinja::Dict(), 1753574400);
  XPYD_CHECK(!out.ok() || is_utf8(out.value()));
  return 0;
}
