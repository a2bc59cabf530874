#include "tests/json.h"

#include <fstream>
#include <sstream>

namespace xpyd::testing {

json parsed(const std::string& text) {
  json out = json::parse(text, nullptr, false);
  INFO(text);
  REQUIRE_FALSE(out.is_discarded());
  return out;
}

json parsed_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return parsed(text.str());
}

std::string as_text(const json& value) { return value.dump(); }
std::string as_text(const std::string& value) { return json(value).dump(); }
std::string as_text(const char* value) { return as_text(std::string(value)); }
std::string as_text(int value) { return std::to_string(value); }
std::string as_text(std::nullptr_t) { return "null"; }

}  // namespace xpyd::testing

std::string Catch::StringMaker<nlohmann::json>::convert(const nlohmann::json& value) { return value.dump(); }
