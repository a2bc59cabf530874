#include "server/http/http_client.h"

#include <netinet/tcp.h>

#include <future>
#include <optional>

#include "base/utf8.h"
#include "tests/catch.h"
#include "tests/server/fake_server.h"

namespace xpyd::testing::http_client_test {

using testing::FakeRequest;
using testing::FakeServer;

struct Received {
  HttpOutcome outcome;
  std::string body;
};

// What the client makes of an answer that arrives in pieces of `step` bytes, after which the server closes.
Received receive(const std::string& answer, size_t step) {
  FakeServer server([&](int fd, const FakeRequest&) {
    const int now = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &now, sizeof now);
    for (size_t at = 0; at < answer.size(); at += step) FakeServer::send_all(fd, answer.substr(at, step));
  });
  const auto client = HttpClient::create(parse_http_url(server.url()).value(), {}).value();
  Received received;
  bool done = false;
  client->start(
      {.target = "/", .body = "{}"}, [&](int, std::string_view part) { received.body += part; },
      [&](const HttpOutcome& outcome) {
        received.outcome = outcome;
        done = true;
      });
  while (!done) client->poll(0.1);
  return received;
}

TEST_CASE("http client: URLs are split into host, port and prefix, and bad ones are refused", "[http_client]") {
  auto url = parse_http_url("http://127.0.0.1:8000");
  REQUIRE(url);
  CHECK(url.value().host == "127.0.0.1");
  CHECK(url.value().port == 8000);
  CHECK(url.value().prefix == "");
  CHECK(url.value().authority() == "127.0.0.1:8000");
  url = parse_http_url("http://[::1]:9/base//");
  REQUIRE(url);
  CHECK(url.value().host == "::1");
  CHECK(url.value().authority() == "[::1]:9");
  CHECK(url.value().prefix == "/base");
  url = parse_http_url("http://host");
  REQUIRE(url);
  CHECK(url.value().port == 80);
  for (const char* bad :
       {"", "127.0.0.1:8000", "https://x", "http://", "http://:80", "http://x:", "http://x:0", "http://x:65536",
        "http://x:8a", "http://a b", "http://x/?q", "http://me@x", "http://x\r\nEvil: 1"}) {
    INFO(bad);
    CHECK_FALSE(parse_http_url(bad));
  }
  CHECK_FALSE(HttpClient::create({"127.0.0.1", 1, ""}, {{"A", "b\r\nEvil: 1"}}));
  CHECK_FALSE(HttpClient::create({"no.such.host.invalid", 1, ""}, {}));
}

TEST_CASE("http client: a response parses the same however it is cut", "[http_client]") {
  const struct {
    std::string bytes;
    int status;
    std::string reason, body, retry_after;
  } cases[] = {
      {"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nRetry-After:  2 \r\n\r\n"
       "5\r\nhello\r\n1;ext=1\r\n \r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n",
       200, "OK", "hello 0123456789", "2"},
      {"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy", 503, "Service Unavailable", "busy", ""},
      {"HTTP/1.1 200 OK\r\n\r\nall of it", 200, "OK", "all of it", ""},
      {"HTTP/1.1 204 No Content\r\n\r\n", 204, "No Content", "", ""},
  };
  for (const auto& c : cases)
    for (size_t step : {1, 2, 7, 1000}) {
      INFO("in pieces of " << step << " bytes: " << c.bytes);
      const Received received = receive(c.bytes, step);
      CHECK(received.outcome.error == "");
      CHECK(received.outcome.status == c.status);
      CHECK(received.outcome.reason == c.reason);
      CHECK(received.outcome.retry_after == c.retry_after);
      CHECK(received.body == c.body);
    }
}

TEST_CASE("http client: a chunk is passed on before the next one arrives", "[http_client]") {
  std::promise<void> received;
  FakeServer server([&](int fd, const FakeRequest&) {
    FakeServer::send_all(fd, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n");
    if (received.get_future().wait_for(std::chrono::seconds(20)) != std::future_status::ready) return;
    FakeServer::send_all(fd, "1\r\nb\r\n0\r\n\r\n");
  });
  const auto client = HttpClient::create(parse_http_url(server.url()).value(), {}).value();
  std::string body;
  std::optional<HttpOutcome> end;
  client->start(
      {.target = "/", .body = "{}"},
      [&](int, std::string_view part) {
        if (body.empty()) received.set_value();
        body += part;
      },
      [&](const HttpOutcome& outcome) { end = outcome; });
  while (!end) client->poll(0.1);
  CHECK(end->error == "");
  CHECK(body == "ab");
}

TEST_CASE("http client: malformed and unfinished responses are errors", "[http_client]") {
  const std::string ok_head = "HTTP/1.1 200 OK\r\n", chunked = ok_head + "Transfer-Encoding: chunked\r\n\r\n";
  for (const std::string& bad :
       {std::string("SSH-2.0-x\r\n\r\n"), std::string("HTTP/2 200 OK\r\n\r\n"), std::string("HTTP/1.1 abc OK\r\n\r\n"),
        ok_head + "no colon\r\n\r\n", ok_head + ": x\r\n\r\n", ok_head + "Content-Length: -1\r\n\r\n",
        ok_head + "Content-Length: 1x\r\n\r\n", ok_head + "Content-Length: 99999999999999999999\r\n\r\n",
        ok_head + "Content-Length: 1099511627776\r\n\r\n", chunked + "xyz\r\n", chunked + "\r\n", chunked + "-1\r\n",
        chunked + "ffffffffffffffff\r\n", chunked + "1\r\nab\r\n", ok_head + std::string(70000, 'x'), std::string(),
        ok_head + "Content-Length: 5\r\n\r\nabc", chunked + "3\r\nabc\r\n"})
    for (size_t step : {size_t{1}, size_t{1} << 20}) {
      if (step == 1 && bad.size() > 10000) continue;
      INFO("in pieces of " << step << " bytes: " << bad.substr(0, 100));
      CHECK(receive(bad, step).outcome.error != "");
    }
}

TEST_CASE("http client: server-sent events parse the same however they are cut", "[http_client]") {
  std::string bytes =
      ": ping\n\ndata: one\n\ndata:two\r\n\r\nevent: x\ndata: a\ndata: b\n\ndata\rid: 3\rdata:  "
      "c\r\r"
      "data: unfinished";
  for (size_t step : {1, 2, 5, 1000}) {
    SseParser parser;
    std::vector<std::string> events;
    for (size_t i = 0; i < bytes.size(); i += step)
      CHECK(parser.feed(std::string_view(bytes).substr(i, step),
                        [&](const std::string& data) { events.push_back(data); }));
    CHECK(events == std::vector<std::string>{"one", "two", "a\nb", " c"});
  }
  SseParser parser;
  CHECK_FALSE(parser.feed("data: " + std::string(17 << 20, 'x'), [](const std::string&) {}));
}

TEST_CASE("http client: calls against a server return bodies, errors and timeouts", "[http_client]") {
  std::mutex mutex;
  std::string last_head, last_body;
  FakeServer server([&](int fd, const FakeRequest& request) {
    {
      std::lock_guard lock(mutex);
      last_head = request.head;
      last_body = request.body;
    }
    if (request.target == "/base/ok") FakeServer::send_json(fd, "{\"a\":1}");
    if (request.target == "/base/none") FakeServer::send_json(fd, "{}", "404 Not Found");
    if (request.target == "/base/cut") FakeServer::send_all(fd, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc");
    char none;
    if (request.target == "/base/slow") (void)recv(fd, &none, 1, 0);  // until the client leaves
  });
  auto url = parse_http_url(server.url() + "/base");
  REQUIRE(url);
  auto client = HttpClient::create(url.value(), {{"Authorization", "Bearer k"}});
  REQUIRE(client);
  auto body = client.value()->fetch({.method = "GET", .target = "/ok", .body = ""});
  REQUIRE(body);
  CHECK(body.value() == "{\"a\":1}");
  {
    std::lock_guard lock(mutex);
    CHECK(last_head.find("GET /base/ok HTTP/1.1\r\n") == 0);
    CHECK(last_head.find("Authorization: Bearer k") != std::string::npos);
    CHECK(last_head.find("Host: 127.0.0.1:" + std::to_string(server.port)) != std::string::npos);
  }
  std::string big(3 << 20, 'x');  // larger than a socket's buffer
  CHECK(client.value()->fetch({.target = "/ok", .body = big}));
  {
    std::lock_guard lock(mutex);
    CHECK(last_body == big);
  }
  auto none = client.value()->fetch({.target = "/none", .body = "{}"});
  REQUIRE_FALSE(none);
  CHECK(none.error().code == ErrorCode::not_found);
  CHECK(none.error().message.find("/base/none: 404 Not Found") != std::string::npos);
  auto cut = client.value()->fetch({.target = "/cut", .body = "{}"});
  REQUIRE_FALSE(cut);
  CHECK(cut.error().message.find("in the middle") != std::string::npos);
  auto slow = client.value()->fetch({.target = "/slow", .body = "{}", .timeout_s = 0.05});
  REQUIRE_FALSE(slow);
  CHECK(slow.error().message.find("the answer was not complete in time (50 ms)") != std::string::npos);
  CHECK(client.value()->in_flight() == 0);
}

TEST_CASE("a server's terminal escapes become printable", "[bench]") {
  CHECK(printable("a\x1b[2Jb\x07\xc2\x9b"
                  "c\n\x7f\xff"
                  "d\xc3\xa9") ==
        "a?[2Jb??c??\xef\xbf\xbd"
        "d\xc3\xa9");
}

}  // namespace xpyd::testing::http_client_test
