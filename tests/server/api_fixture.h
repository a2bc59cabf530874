// Helpers of the endpoint tests: answers as JSON.
#pragma once

#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/json.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing {

// Returns the events of a stream without the closing [DONE], and requires that [DONE] is there.
std::vector<json> chunks(const Reply& reply);

// The body of a request, and the JSON text that is expected at JSON pointers of its answer. A stream's events form an
// array.
struct Answer {
  std::string body;
  std::vector<std::pair<const char*, const char*>> parts;
};
void check_answers(TestServer& server, const std::string& path, const std::vector<Answer>& answers);

void check_error(const Reply& reply, int status, const std::string& type, const json& param, const json& code);

}  // namespace xpyd::testing
