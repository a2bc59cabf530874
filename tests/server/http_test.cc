// Tests HTTP itself over real sockets.
#include "server/http/http.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <atomic>
#include <ctime>
#include <filesystem>
#include <future>

#include "base/os.h"
#include "server/openai/api.h"
#include "tests/catch.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing::http_test {

const std::string kGet = "GET /health HTTP/1.1\r\nHost: a\r\n\r\n";

// Sends `text` in pieces of `step` bytes and returns the status of the answer.
int answer(const TestServer& server, const std::string& text, size_t step = 1 << 20) {
  Client client(server.port());
  for (size_t at = 0; at < text.size(); at += step) client.send(text.substr(at, step));
  return client.read().status;
}

// A POST to /v1/completions with more headers and a body as it goes over the wire.
std::string post_text(const std::string& headers, const std::string& body) {
  return "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + headers + "\r\n" + body;
}

using Clients = std::vector<std::unique_ptr<Client>>;

// Opens connections that send `sent` and, if `answered`, read the answer.
Clients connections(const TestServer& server, size_t n, const std::string& sent = "", bool answered = false) {
  Clients clients;
  for (size_t i = 0; i < n; ++i) {
    clients.push_back(std::make_unique<Client>(server.port()));
    clients.back()->send(sent);
    if (answered) REQUIRE(clients.back()->read().status == 200);
  }
  return clients;
}

// While this lives, the process may open one more descriptor.
struct OneDescriptor {
  OneDescriptor() {
    getrlimit(RLIMIT_NOFILE, &before);
    const rlimit low{256, before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &low);
    for (int fd; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) taken.emplace_back(fd);
    XPYD_CHECK(!taken.empty(), "256 descriptors are open");
    taken.pop_back();
  }
  ~OneDescriptor() { setrlimit(RLIMIT_NOFILE, &before); }
  rlimit before{};
  std::vector<Fd> taken;
};

TEST_CASE("http: requests parse the same in pieces of any size", "[server][http]") {
  TestServer server;
  const std::string body = R"({"prompt":"a"})";  // 14 bytes
  const std::pair<std::string, int> cases[] = {
      {kGet, 200},
      {"GET /health?b=c HTTP/1.1\r\nhost:a\r\n\r\n", 200},
      {"GET /a HTTP/1.1\r\nHost: a\r\n\r\n", 404},
      {post_text("Content-Length: 14\r\n", body), 200},
      {post_text("Content-Length: 0\r\n", ""), 400},
      {post_text("Transfer-Encoding: chunked\r\n", "0\r\n\r\n"), 400},
      {post_text("Transfer-Encoding: Chunked\r\n", "e\r\n" + body + "\r\n0\r\n\r\n"), 200},
      {post_text("Transfer-Encoding: chunked\r\n", "3\r\n{\"p\r\nb;ext=1\r\nrompt\":\"a\"}\r\n0\r\nTrailer: x\r\n\r\n"),
       200},
  };
  for (const auto& [text, expected] : cases)
    for (size_t step : {size_t{1}, size_t{2}, size_t{7}, size_t{1} << 20}) {
      INFO("step " << step << ": " << text);
      CHECK(answer(server, text, step) == expected);
    }
}

TEST_CASE("http: a request that two servers could read differently is refused", "[server][http]") {
  TestServer server;
  const std::string valid = R"({"prompt":"a"})";  // 14 bytes; what is not refused is answered with 200
  auto post = [&](const std::string& headers, const std::string& body = "") {
    return post_text(headers, body.empty() ? valid : body);
  };
  const std::pair<int, std::vector<std::string>> cases[] = {
      {400,
       {post("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
        post("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", "0\r\n\r\n"),
        post("Content-Length: 14\r\nContent-Length: 14\r\n"),
        post("Content-Length: 14\r\nContent-Length: 15\r\n"),
        post("Content-Length: 14, 14\r\n"),
        post("Content-Length: -1\r\n"),
        post("Content-Length: +14\r\n"),
        post("Content-Length: 0xe\r\n"),
        post("Content-Length: 14 14\r\n"),
        post("Content-Length:\r\n"),
        post("Content-Length: 99999999999999999999999\r\n"),
        post("Content-Length : 14\r\n"),
        post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
        post("Transfer-Encoding:\r\nContent-Length: 14\r\n"),
        post("Content-Length: 14\r\nTransfer-Encoding: \t\r\n"),
        post("Transfer-Encoding:\r\nTransfer-Encoding: chunked\r\n", "e\r\n" + valid + "\r\n0\r\n\r\n"),
        "GET / HTTP/1.1\nHost: a\n\n",
        "GET / HTTP/1.1\r\nHost: a\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\rb\r\n\r\n",
        std::string("GET / HTTP/1.1\r\nHost: a\r\nX: \0b\r\n\r\n", 34),
        "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET /\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "\x16\x03\x01\x02",
        post("Transfer-Encoding: chunked\r\n", "zz\r\n"),
        post("Transfer-Encoding: chunked\r\n", "-1\r\n"),
        post("Transfer-Encoding: chunked\r\n", "3\r\nabcXYZ\r\n"),
        post("Transfer-Encoding: chunked\r\n", "1;" + std::string(200000, 'x')),
        post("Transfer-Encoding: chunked\r\n", "fffffffffffffffff\r\n")}},
      {501,
       {post("Transfer-Encoding: gzip, chunked\r\n"), post("Transfer-Encoding: chunked, identity\r\n"),
        post("Transfer-Encoding: xchunked\r\n")}},
      {505, {"GET /health HTTP/1.0\r\nHost: a\r\n\r\n"}},
  };
  for (const auto& [expected, texts] : cases)
    for (const std::string& text : texts)
      for (size_t step : {size_t{1}, size_t{1} << 20}) {
        // Byte by byte, a header that ends in bare LFs never ends. Its connection closes at the deadline.
        const bool bare_lf = text.find("a\n") != text.npos;
        if (step == 1 && (bare_lf || text.size() > 10000)) continue;
        INFO("step " << step << ": " << text.substr(0, 200));
        CHECK(answer(server, text, step) == expected);
      }
  CHECK(server.service.seen().empty());
}

TEST_CASE("http: headers and bodies beyond their limits are refused", "[server][http]") {
  TestServer server([](ServerOptions& o) { o.max_body_bytes = 20; });
  const size_t most = HttpListenOptions().max_header_bytes;
  auto sized = [](size_t bytes) {
    std::string text = "GET /health HTTP/1.1\r\nHost: a\r\nX: ";
    return text + std::string(bytes - text.size() - 4, 'x') + "\r\n\r\n";
  };
  CHECK(answer(server, sized(most)) == 200);
  CHECK(answer(server, sized(most + 100)) == 431);
  CHECK(answer(server, "GET / HTTP/1.1\r\nX: " + std::string(64 << 10, 'x'), 1000) == 431);
  CHECK(answer(server, "GET /" + std::string(64 << 10, 'x')) == 431);

  auto body = [](size_t n) {
    return post_text("Content-Length: " + std::to_string(n) + "\r\n",
                     "{\"prompt\":\"" + std::string(n - 13, 'x') + "\"}");
  };
  CHECK(answer(server, body(20)) == 200);
  CHECK(answer(server, body(21)) == 413);
  const std::string chunked = "Transfer-Encoding: chunked\r\n";
  CHECK(answer(server, post_text(chunked, "b\r\n{\"prompt\":\"\r\n9\r\nabcdefg\"}\r\n0\r\n\r\n"), 1) == 200);
  CHECK(answer(server, post_text(chunked, "b\r\n{\"prompt\":\"\r\na\r\nabcdefgh\"}\r\n0\r\n\r\n"), 1) == 413);
  CHECK(answer(server, post_text(chunked, "7fffffffffffffff\r\n"), 1) == 413);

  // A client that keeps sending must receive the answer all the same. Then the connection closes.
  Client client(server.port());
  client.send(request_text("POST", "/v1/completions", std::string(4 << 20, 'x')));
  const Reply refused = client.read();
  CHECK(refused.status == 413);
  CHECK(refused.header("connection") == "close");
  CHECK(refused.body.starts_with(R"({"error":{"message":)"));
  CHECK(client.at_end());
}

TEST_CASE("http: keep-alive, pipelining, HEAD and Connection: close work", "[server][http]") {
  TestServer server;
  Client client(server.port());
  std::string many;
  for (int i = 0; i < 3000; ++i) many += kGet;
  client.send(many);
  for (int i = 0; i < 3000; ++i) REQUIRE(client.read().status == 200);

  client.send("HEAD /health HTTP/1.1\r\nHost: a\r\n\r\n" + kGet);
  Reply head = client.read(true);
  CHECK(head.status == 200);
  CHECK(head.header("content-length") != "0");
  CHECK(client.read().body == "{\"status\":\"ready\"}");

  client.send("GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" + kGet);
  Reply last = client.read();
  CHECK(last.status == 200);
  CHECK(last.header("connection") == "close");
  CHECK(client.at_end());
}

TEST_CASE("http: a pipelined request waits for a stream", "[server][http]") {
  TestServer server;
  Client client(server.port());
  client.send(request_text("POST", "/v1/completions", R"({"prompt":"a","max_tokens":40,"stream":true})") + kGet);
  const Reply stream = client.read();
  CHECK(stream.chunked);
  CHECK(stream.events().size() == 41);
  CHECK(client.read().body == "{\"status\":\"ready\"}");
}

TEST_CASE("http: Expect: 100-continue gets a 100, or the refusal instead", "[server][http]") {
  TestServer server([](ServerOptions& o) { o.max_body_bytes = 1000; });
  std::string body = R"({"prompt":"a","max_tokens":1})";
  std::string head =
      "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
      "Expect: 100-continue\r\nContent-Length: ";
  Client client(server.port());
  client.send(head + std::to_string(body.size()) + "\r\n\r\n");
  CHECK(client.read_some().starts_with("HTTP/1.1 100 Continue\r\n\r\n"));
  client.send(body);
  CHECK(client.read().status == 200);
  Client large(server.port());  // the refusal comes instead of the 100
  large.send(head + "1001\r\n\r\n");
  Reply refused = large.read();
  CHECK(refused.status == 413);
  CHECK(large.continues == 0);
}

TEST_CASE("http: partial, trickling, idle and silent connections all end at their deadlines", "[server][http]") {
  TestServer server([](ServerOptions& o) { o.receive_timeout_s = 0.7, o.idle_timeout_s = 0.4; });
  Client idle(server.port());
  idle.send(kGet);
  CHECK(idle.read().status == 200);
  const Clients silent = connections(server, 500);
  const auto answers = [&](auto&) { return server.post("/v1/completions", R"({"prompt":"a"})").status == 200; };
  CHECK(server.service.wait(answers));  // more than once if this thread stands still for as long as a deadline
  const std::string head = "GET /health HTTP/1.1\r\nX: ", body = post_text("Content-Length: 100000\r\n", "{");
  Client halves[] = {Client(server.port()), Client(server.port())};
  Client trickling[] = {Client(server.port()), Client(server.port())};
  for (Client* clients : {halves, trickling}) clients[0].send(head), clients[1].send(body);
  std::atomic<bool> stop{false};
  std::thread trickle([&] {
    while (!stop) {
      for (Client& client : trickling) client.send("x");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  for (Client& client : trickling) CHECK(client.at_end());
  stop = true;
  trickle.join();
  for (Client& client : halves) CHECK(client.at_end());
  for (auto& client : silent) REQUIRE(client->at_end());
  CHECK(idle.at_end());
}

TEST_CASE("http: without a file descriptor the server waits for one and does not spin", "[server][http]") {
  TestServer server;
  std::unique_ptr<Client> client;
  double busy_s = 0;
  {
    OneDescriptor last;
    client = std::make_unique<Client>(server.port());  // takes it, so the server's side has none
    const std::clock_t before = std::clock();          // CPU time of this process
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    busy_s = double(std::clock() - before) / CLOCKS_PER_SEC;
  }
  CHECK(busy_s < 0.05);
  client->send(kGet);
  CHECK(client->read().status == 200);
}

TEST_CASE("http: beyond --max-connections a new connection waits for a place", "[server][limits]") {
  TestServer server([](ServerOptions& o) { o.max_connections = 2; });
  Clients kept = connections(server, 2, kGet, true);
  Client late(server.port());
  late.send(kGet);
  CHECK(late.quiet());
  kept.pop_back();
  CHECK(late.read().status == 200);
  kept[0]->send(kGet);
  CHECK(kept[0]->read().status == 200);
}

TEST_CASE("http: a client that goes away, or does not read, aborts its request", "[server][http]") {
  const auto aborts = [](const TestServer& server, size_t n) {
    return server.service.wait([&](auto& s) { return s.aborted().size() == n && s.in_flight() == 0; });
  };
  for (const char* when : {"whole answer", "first event", "middle", "half-closed"}) {
    INFO(when);
    TestServer server;
    const bool stream = *when == 'f' || *when == 'm', middle = *when == 'm';
    server.service.hold(!middle);
    server.service.step_delay_s = middle ? 0.01 : 0;
    Client client(server.port());
    client.send(request_text("POST", "/v1/completions",
                             std::string(R"({"max_tokens":200,)") +
                                 (stream ? R"("prompt":"a","stream":true})" : R"("prompt":["a","b"],"n":2})")));
    if (!stream) REQUIRE(server.service.wait([](auto& s) { return s.in_flight() == 2; }));
    for (std::string seen; stream && seen.find(middle ? "data: " : "HTTP/1.1 200 OK\r\n") == seen.npos;) {
      const std::string more = client.read_some();
      REQUIRE_FALSE(more.empty());
      seen += more;
    }
    *when == 'h' ? client.half_close() : client.close();
    CHECK(aborts(server, stream ? 1 : 2));
    if (middle) CHECK(server.get("/metrics").body.find("finished_reason=\"abort\"} 1\n") != std::string::npos);
  }
  SECTION("when its stream has filled the bounded buffer") {
    TestServer server([](ServerOptions& o) { o.max_stream_buffer_bytes = 100000; });
    server.service.script = [](const Request&, int) {
      std::vector<TokenEvent> events(400, FakeService::token('x', std::string(100000, 'x')));
      events.back().finish = FinishReason::length;
      return events;
    };
    Client client(server.port(), 4096);
    client.send(request_text("POST", "/v1/completions", R"({"prompt":"a","max_tokens":200,"stream":true})"));
    CHECK(server.service.wait([](auto& s) { return s.aborted().size() == 1; }));
    CHECK(server.get("/health").status == 200);
  }
  SECTION("when it takes nothing of its answer for too long") {
    TestServer server([](ServerOptions& o) { o.write_timeout_s = 0.2; });
    server.service.script = [](const Request&, int) {
      return std::vector{FakeService::token('x', std::string(32 << 20, 'x'), FinishReason::length)};
    };
    const auto descriptors = [] {
      return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
    };
    const auto before = descriptors();
    Client client(server.port(), 4096);
    client.send(request_text("POST", "/v1/completions", R"({"prompt":"a"})"));
    while (client.quiet()) continue;
    // The server begins to send, gives up with most of the answer unsent, and closes its side of the connection.
    CHECK(server.service.wait([&](auto&) { return descriptors() <= before + 1; }));
    CHECK_FALSE(client.read().complete);
  }
}

TEST_CASE("issue: a small body does not wait behind large bodies", "[server][limits]") {
  // Rendering asks the clock for the time and blocks there until the test lets it go on. This stands for a parse that
  // takes for ever.
  static std::promise<void> gate;
  static std::shared_future<void> go_on = gate.get_future().share();
  static std::atomic<int> stopped{0};
  static std::atomic<bool> only_large{false};
  auto chat = ChatTemplate::parse("{{ messages[-1].content }}", [] {
    if (only_large) {
      ++stopped;
      go_on.wait();
    }
    return int64_t{0};
  });
  TestServer server([](ServerOptions& o) { o.max_model_len = 1 << 20; }, true, *chat.value());
  only_large = true;
  auto message = [](size_t bytes) {
    return request_text(
        "POST", "/v1/chat/completions",
        R"({"max_tokens":1,"messages":[{"role":"user","content":")" + std::string(bytes, 'x') + R"("}]})");
  };
  const Clients large = connections(server, 14, message(300000));
  while (stopped == 0) std::this_thread::yield();
  only_large = false;
  for (auto& small : connections(server, 3)) {
    small->send(message(100));
    CHECK(small->read().status == 200);
  }
  gate.set_value();
  for (auto& client : large) CHECK(client->read().status == 200);
}

TEST_CASE("http: a drain refuses new work, answers probes with 503, finishes running requests and ends",
          "[server][http]") {
  TestServer server([](ServerOptions& o) { o.receive_timeout_s = 600; });
  server.service.hold(true);
  const int port = server.port();
  const Clients idle = connections(server, 1, kGet, true);
  const std::string call = request_text("POST", "/v1/completions", R"({"prompt":"a","max_tokens":20,"stream":true})");
  Client streaming(port), half(port), half_body(port), silent(port);
  half.send(call.substr(0, 30));
  half_body.send(call.substr(0, call.size() - 1));
  CHECK(server.get("/health").status == 200);
  streaming.send(call);
  REQUIRE(server.service.wait([](auto& s) { return s.in_flight() == 1; }));
  server.server->begin_drain();
  CHECK(idle[0]->at_end());
  for (Client* incomplete : {&half, &half_body, &silent}) CHECK(incomplete->at_end());
  Client newcomer(port);
  newcomer.send(call);
  const Reply refused = newcomer.read();
  CHECK(refused.status == 503);
  CHECK(refused.header("connection") == "close");
  CHECK(refused.header("retry-after") == "1");
  CHECK(newcomer.at_end());
  const Reply health = server.get("/health");
  CHECK(health.status == 503);
  CHECK(health.body.find("\"reason\":\"draining\"") != std::string::npos);
  server.service.hold(false);
  const Reply whole = streaming.read();
  CHECK(whole.complete);
  CHECK(whole.events().size() == 21);
  CHECK(streaming.at_end());
  for (Client* client : {&newcomer, &streaming}) client->close();
  server.join();  // run() has returned by itself
  CHECK(server.service.seen().size() == 1);
  ServerOptions options;
  options.port = port, options.max_model_len = 16;
  CHECK(HttpServer::listen(options, server.service, nullptr, nullptr, server.clock).ok());
}

TEST_CASE("http: stop drops every connection", "[server][http]") {
  TestServer server;
  server.service.hold(true);
  Client client(server.port());
  client.send(request_text("POST", "/v1/completions", R"({"prompt":"a"})"));
  REQUIRE(server.service.wait([](auto& s) { return s.in_flight() == 1; }));
  server.server->stop();
  server.join();
  server.server.reset();
  CHECK(client.at_end());
  CHECK(server.service.aborted().size() == 1);
}

}  // namespace xpyd::testing::http_test
