// Event streams, and what happens when the cluster refuses or fails.
#include <set>

#include "server/api.h"
#include "tests/server/api_fixture.h"

namespace xpyd::testing::api_stream_test {

TEST_CASE("api: a completion stream has one event per token", "[server][api]") {
  TestServer server;
  Reply reply = server.post("/v1/completions", R"({"prompt":"a","max_tokens":5,"stream":true})");
  auto events = chunks(reply);
  REQUIRE(events.size() == 5);  // no usage chunk unless asked
  std::string text;
  for (const json& event : events) {
    CHECK_SAME(event["object"], "text_completion");
    CHECK_SAME(event["id"], events[0]["id"]);
    CHECK_FALSE(event.contains("usage"));
    REQUIRE(event["choices"].size() == 1);
    text += event["choices"][0]["text"].get<std::string>();
  }
  CHECK(text == "hello");
  CHECK(reply.body.find("\r") == std::string::npos);
}

TEST_CASE("api: a chat stream brings the role with the first token", "[server][api]") {
  TestServer server;
  auto events = chunks(server.post(
      "/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"max_tokens":3,"n":2,"stream":true})"));
  REQUIRE(events.size() == 6);
  std::string text[2];
  for (const json& event : events) {
    CHECK_SAME(event["object"], "chat.completion.chunk");
    const json& choice = event["choices"][0];
    REQUIRE(choice.contains("delta"));
    auto& so_far = text[choice["index"].get<int>()];
    CHECK(choice["delta"].contains("role") == so_far.empty());
    so_far += choice["delta"]["content"].get<std::string>();
  }
  CHECK(text[0] == "hel");
  CHECK(text[1] == "hel");
}

TEST_CASE("api: a stream's head is sent before the first token, and no event", "[server][api]") {
  TestServer server;
  server.service.hold(true);
  Client client(server.port());
  client.send(
      request_text("POST", "/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"stream":true})"));
  const std::string head = client.read_some();
  CHECK(head.starts_with("HTTP/1.1 200 OK\r\n"));
  CHECK(head.find("Content-Type: text/event-stream") != std::string::npos);
  CHECK(head.ends_with("\r\n\r\n"));
  CHECK(server.service.in_flight() == 1);
  CHECK(client.quiet());
  server.service.hold(false);
  CHECK(client.read_some().find("\"role\":\"assistant\",\"content\":\"h\"") != std::string::npos);
}

TEST_CASE("api: usage in streams, when asked for", "[server][api]") {
  TestServer server;
  std::string start = R"({"prompt":["ab","c"],"max_tokens":2,"stream":true,"stream_options":)";
  auto events = chunks(server.post("/v1/completions", start + R"({"include_usage":true}})"));
  REQUIRE(events.size() == 5);
  for (int i = 0; i < 4; ++i) CHECK_SAME(events[i]["usage"], nullptr);
  CHECK(events[0].contains("usage"));
  CHECK_SAME(events[4]["choices"], json::array());
  CHECK_SAME(events[4]["usage"]["prompt_tokens"], 3);
  CHECK_SAME(events[4]["usage"]["completion_tokens"], 4);
  events = chunks(server.post("/v1/completions", start + R"({"continuous_usage_stats":true}})"));
  REQUIRE(events.size() == 4);
  for (const json& event : events) CHECK(event["usage"]["completion_tokens"].get<int>() >= 1);
}

TEST_CASE("api: text of any kind stays one data line of valid UTF-8", "[server][api]") {
  TestServer server;
  server.service.script = [](const Request&, int) {
    return std::vector{FakeService::token(10, "a\nb\r\n\x01\"\\"),
                       FakeService::token(11, "\xe2\x82\xac \xf0\x9f\x98\x80"),
                       FakeService::token(12, "\xff\xc0\xaf", FinishReason::stop)};
  };
  auto events = chunks(server.post("/v1/completions", R"({"prompt":"a","stream":true})"));
  REQUIRE(events.size() == 3);
  CHECK_SAME(events[0]["choices"][0]["text"], "a\nb\r\n\x01\"\\");
  CHECK_SAME(events[1]["choices"][0]["text"], "\xe2\x82\xac \xf0\x9f\x98\x80");
  CHECK_SAME(events[2]["choices"][0]["text"], "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
}

TEST_CASE("api: the cluster refuses", "[server][api]") {
  TestServer server;
  server.service.admit = [](const Request& r) -> Status {
    if (r.prompt[0] == 'b') return Error{ErrorCode::unavailable, "the queue is full"};
    if (r.prompt[0] == 'c') return invalid("needs 9 blocks of 8");
    return ok();
  };
  Reply full = server.post("/v1/completions", R"({"prompt":"b","stream":true})");
  check_error(full, 503, "overloaded_error", nullptr, "queue_full");
  CHECK(full.header("retry-after") == "1");
  CHECK(full.header("x-should-retry") == "");
  CHECK(full.reason == "Service Unavailable: the queue is full");
  check_error(server.post("/v1/completions", R"({"prompt":"c"})"), 400, "invalid_request_error", "prompt", nullptr);
  // The second of three is refused: the first is given back, the third never sent.
  server.service.hold(true);
  CHECK_SAME(server.post("/v1/completions", R"({"prompt":["a","b","a"]})").status, 503);
  CHECK(server.service.wait([](auto& s) { return s.in_flight() == 0; }));
  CHECK(server.service.aborted().size() == 1);
  CHECK(server.service.seen().size() == 1);
}

TEST_CASE("api: a failure is a status, and an event of a stream whose head has gone out", "[server][api]") {
  TestServer server;
  bool early = true;
  FinishReason how = FinishReason::error;
  server.service.script = [&](const Request&, int choice) {
    TokenEvent end = FakeService::token(-1, "", how);
    end.error = "transfer failed";
    if (choice == 1) return std::vector<TokenEvent>(100, FakeService::token('x', "x"));
    return early ? std::vector{end} : std::vector{FakeService::token('a', "a"), end};
  };
  const Reply whole = server.post("/v1/completions", R"({"prompt":"a"})");
  check_error(whole, 500, "server_error", nullptr, "internal_error");
  CHECK(whole.header("x-should-retry") == "false");
  const Reply streamed = server.post("/v1/completions", R"({"prompt":"a","stream":true})");
  if (streamed.status == 200) {
    REQUIRE(streamed.events().size() == 2);
    CHECK(parsed(streamed.events()[0])["error"]["message"] == "transfer failed");
  } else {  // it failed at once
    check_error(streamed, 500, "server_error", nullptr, "internal_error");
  }
  how = FinishReason::timeout;
  check_error(server.post("/v1/completions", R"({"prompt":"a"})"), 504, "server_error", nullptr, "request_timeout");
  how = FinishReason::error;
  early = false;
  Reply reply = server.post("/v1/completions", R"({"prompt":"a","stream":true,"n":2})");
  CHECK(reply.status == 200);
  CHECK(reply.complete);
  auto events = reply.events();
  REQUIRE(events.size() >= 3);
  CHECK(events.back() == "[DONE]");
  CHECK(parsed(events[events.size() - 2])["error"]["message"] == "transfer failed");
  // The other choice is not left running.
  CHECK(server.service.wait([](auto& s) { return s.aborted().size() == 1; }));
}

TEST_CASE("api: a cluster that never answers does not hold its client for ever", "[server][api]") {
  // The frontend's own limit comes five seconds after the deadline that the cluster should have kept.
  TestServer server([](ServerOptions& o) { o.request_timeout_s = 0.1; });
  server.service.hold(true);
  check_error(server.post("/v1/completions", R"({"prompt":"a"})"), 504, "server_error", nullptr, "request_timeout");
  CHECK(server.service.aborted().size() == 1);
}

}  // namespace xpyd::testing::api_stream_test
