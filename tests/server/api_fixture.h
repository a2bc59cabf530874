// Shared by the tests of the endpoints: answers as JSON.
#pragma once

#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/json.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing {

// Events of a stream without the closing [DONE], which must be there.
std::vector<json> chunks(const Reply& reply);

// A request's body, and what stands at JSON pointers of its answer, of a stream's events as an array, as JSON text.
struct Answer {
  std::string body;
  std::vector<std::pair<const char*, const char*>> parts;
};
void check_answers(TestServer& server, const std::string& path, const std::vector<Answer>& answers);

bool is_error(const Reply& reply, int status, const std::string& type, const json& param, const json& code);
void check_error(const Reply& reply, int status, const std::string& type, const json& param, const json& code);

}  // namespace xpyd::testing
