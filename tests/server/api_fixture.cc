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

void check_answers(TestServer& server, const std::string& path, const std::vector<Answer>& answers) {
  for (const Answer& answer : answers) {
    const Reply reply = server.post(path, answer.body);
    INFO(answer.body << "\n" << reply.body);
    REQUIRE(reply.status == 200);
    const json whole = reply.body.starts_with("data: ") ? json(chunks(reply)) : parsed(reply.body);
    for (const auto& [pointer, value] : answer.parts) {
      INFO(pointer);
      REQUIRE(whole.contains(json::json_pointer(pointer)));
      CHECK_SAME(whole.at(json::json_pointer(pointer)), parsed(value));
    }
  }
}

void check_error(const Reply& reply, int status, const std::string& type, const json& param, const json& code) {
  INFO(status << " expected, got " << reply.status << " " << reply.body);
  json error = parsed(reply.body)["error"];
  CHECK(reply.status == status);
  CHECK((error.size() == 4 && error["message"].is_string() && error["message"] != ""));
  CHECK((error["type"] == type && error["param"] == param && error["code"] == code));
}

}  // namespace xpyd::testing
