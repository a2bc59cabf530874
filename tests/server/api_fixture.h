// Shared by the tests of the endpoints: answers as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "tests/catch.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing {

using nlohmann::json;

inline json parsed(const std::string& text) {
  json out = json::parse(text.begin(), text.end(), nullptr, false);
  INFO(text);
  REQUIRE_FALSE(out.is_discarded());
  return out;
}

// JSON values compared as text: Catch2 takes seconds to compile their comparison.
inline std::string as_text(const json& value) { return value.dump(); }
inline std::string as_text(const std::string& value) { return json(value).dump(); }
inline std::string as_text(const char* value) { return as_text(std::string(value)); }
inline std::string as_text(int value) { return std::to_string(value); }
inline std::string as_text(std::nullptr_t) { return "null"; }
#define CHECK_SAME(a, b) CHECK(as_text(a) == as_text(b))

// Events of a stream without the closing [DONE], which must be there.
inline std::vector<json> chunks(const Reply& reply) {
  REQUIRE(reply.status == 200);
  REQUIRE(reply.complete);
  CHECK(reply.header("content-type") == "text/event-stream; charset=utf-8");
  auto events = reply.events();
  REQUIRE_FALSE(events.empty());
  CHECK(events.back() == "[DONE]");
  std::vector<json> out;
  for (size_t i = 0; i + 1 < events.size(); ++i) out.push_back(parsed(events[i]));
  return out;
}

inline bool is_error(const Reply& reply, int status, const std::string& type, const json& param,
                     const json& code) {
  json error = parsed(reply.body)["error"];
  return reply.status == status && error.size() == 4 && error["message"].is_string() &&
         error["message"] != "" && error["type"] == type && error["param"] == param &&
         error["code"] == code;
}

inline void check_error(const Reply& reply, int status, const std::string& type, const json& param,
                        const json& code) {
  INFO(status << " expected, got " << reply.status << " " << reply.body);
  CHECK(is_error(reply, status, type, param, code));
}

}  // namespace xpyd::testing
