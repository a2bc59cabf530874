#include "tests/server/api_fixture.h"

namespace xpyd::testing {

std::vector<json> chunks(const Reply& reply) {
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

bool is_error(const Reply& reply, int status, const std::string& type, const json& param, const json& code) {
  json error = parsed(reply.body)["error"];
  return reply.status == status && error.size() == 4 && error["message"].is_string() && error["message"] != "" &&
         error["type"] == type && error["param"] == param && error["code"] == code;
}

void check_error(const Reply& reply, int status, const std::string& type, const json& param, const json& code) {
  INFO(status << " expected, got " << reply.status << " " << reply.body);
  CHECK(is_error(reply, status, type, param, code));
}

}  // namespace xpyd::testing
