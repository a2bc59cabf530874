// JSON in tests. Reading, writing and comparing it takes a compiler seconds, so json.cc does it once.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/catch.h"

namespace xpyd::testing {

using nlohmann::json;

json parsed(const std::string& text);  // ends the test if it is no JSON
json parsed_file(const std::string& path);

std::string as_text(const json& value);
std::string as_text(const std::string& value);
std::string as_text(const char* value);
std::string as_text(int value);
std::string as_text(std::nullptr_t);
#define CHECK_SAME(a, b) CHECK(as_text(a) == as_text(b))

}  // namespace xpyd::testing

template <>
struct Catch::StringMaker<nlohmann::json> {
  static std::string convert(const nlohmann::json& value);
};
