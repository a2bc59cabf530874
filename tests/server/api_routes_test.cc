// Routes, methods, the key, and the small endpoints.
#include <set>

#include "server/api.h"
#include "tests/server/api_fixture.h"

namespace xpyd::testing::api_routes_test {

TEST_CASE("api: routes, methods and types", "[server][api]") {
  TestServer server;
  check_error(server.get("/nothing"), 404, "not_found_error", nullptr, nullptr);
  check_error(server.get("/%2e%2e/etc/passwd"), 404, "not_found_error", nullptr, nullptr);
  check_error(server.get("/server_info"), 404, "not_found_error", nullptr, nullptr);
  check_error(server.get("/v1/models/other"), 404, "not_found_error", "model", "model_not_found");
  check_error(server.post("/v1/completions", R"({"model":"gpt","prompt":"a"})"), 404, "not_found_error", "model",
              "model_not_found");
  for (const auto& route : Api::routes()) {
    if (route.dev) continue;
    std::string path = route.path;
    if (path == "/v1/models/") path += "tiny";
    INFO(path);
    bool get = std::string(route.methods).find("GET") != std::string::npos;
    bool post = std::string(route.methods).find("POST") != std::string::npos;
    Reply wrong = post && !get ? server.get(path) : server.post(path, "{}");
    if (!(get && post)) {
      CHECK(wrong.status == 405);
      CHECK(wrong.header("allow") == (post ? "POST" : "GET, HEAD"));
    }
    if (get) CHECK(server.get(path).status == 200);
    if (post && !get) {
      CHECK(server.post(path, "{}", "Content-Type: text/plain\r\n").status == 415);
      CHECK(server.post(path, "").status == 400);
      CHECK(server.post(path, "[]").status == 400);
    }
    Client client(server.port());
    client.send("DELETE " + path + " HTTP/1.1\r\nHost: a\r\n\r\n");
    CHECK(client.read().status == 405);
  }
}

TEST_CASE("api: a key guards every route but the probes and the page", "[server][api]") {
  TestServer server([](ServerOptions& o) { o.api_keys = {"secret"}; });
  std::set<std::string> open;
  for (const auto& route : Api::routes()) {
    std::string path = route.path;
    bool post = std::string(route.methods).find("POST") != std::string::npos;
    auto ask = [&](const std::string& header) {
      return post ? server.post(path, "{}", header).status : server.get(path, header).status;
    };
    INFO(path);
    bool refused = ask("") == 401;
    CHECK(refused == !route.open);
    for (const char* wrong : {"Bearer secreT", "Bearer secre", "Bearer secrets", "Bearer ", "Basic secret", "secret"})
      CHECK((ask("Authorization: " + std::string(wrong) + "\r\n") == 401) == !route.open);
    for (const char* scheme : {"Bearer", "bearer", "BEARER"})
      CHECK(ask(std::string("Authorization: ") + scheme + " secret\r\n") != 401);
    if (route.open) open.insert(path);
  }
  CHECK(open == std::set<std::string>{"/", "/health", "/health/ready", "/ping", "/ready"});
  check_error(server.get("/v1/models"), 401, "authentication_error", nullptr, "invalid_api_key");
}

TEST_CASE("api: a body in another encoding is refused, and the encoding is named", "[server][api]") {
  TestServer server;
  const auto post = [&](const std::string& encoding) {
    return server.post("/v1/completions", R"({"prompt":"a"})", "Content-Encoding: " + encoding + "\r\n");
  };
  CHECK(post("identity").status == 200);
  CHECK(post("Identity").status == 200);
  for (const std::string encoding : {"gzip", "br", "gzip, identity"}) {
    const Reply reply = post(encoding);
    CHECK(reply.status == 415);
    CHECK(reply.body.find(encoding) != std::string::npos);
  }
  CHECK(server.service.seen().size() == 2);
}

TEST_CASE("api: pages of a listed origin may read answers, and of no other", "[server][api]") {
  const std::string listed = "Origin: https://app.example.com\r\n", other = "Origin: https://evil.example\r\n";
  const std::string asks =
      "Access-Control-Request-Method: POST\r\n"
      "Access-Control-Request-Headers: authorization, content-type\r\n";
  const auto preflight = [&](TestServer& server, const std::string& headers) {
    Client client(server.port());
    client.send("OPTIONS /v1/completions HTTP/1.1\r\nHost: a\r\n" + headers + "\r\n");
    return client.read();
  };
  const std::string call = R"({"prompt":"a","max_tokens":2)";
  TestServer none;
  CHECK(preflight(none, listed + asks).status >= 400);
  CHECK(none.post("/v1/completions", call + "}", listed).status == 403);
  for (const std::string allowed : {"https://app.example.com", "HTTPS://App.Example.com", "*"}) {
    INFO(allowed);
    TestServer server([&](ServerOptions& o) {
      o.allowed_origins = {"https://first.example", allowed};
      o.api_keys = {"secret"};
    });
    // A browser sends no key with this question.
    const Reply asked = preflight(server, listed + asks);
    CHECK(asked.status == 200);
    CHECK(asked.header("access-control-allow-origin") == "https://app.example.com");
    CHECK(asked.header("access-control-allow-methods") == "GET, POST");
    CHECK(asked.header("access-control-allow-headers") == "authorization, content-type");
    CHECK(asked.header("vary") == "Origin");
    CHECK(preflight(server, listed).status >= 400);  // no preflight
    const std::string key = "Authorization: Bearer secret\r\n";
    const auto origin = [&](const std::string& body, const std::string& headers) {
      return server.post("/v1/completions", body, headers).header("access-control-allow-origin");
    };
    CHECK(origin(call + "}", listed + key) == "https://app.example.com");
    CHECK(origin(call + R"(,"stream":true})", listed + key) == "https://app.example.com");
    CHECK(origin("{}", listed + key) == "https://app.example.com");  // a page may read why
    CHECK(origin(call + "}", listed) == "https://app.example.com");  // … also that it needs a key
    CHECK(server.post("/v1/completions", call + "}", listed).status == 401);
    CHECK(origin(call + "}", key) == "");
    if (allowed == "*") continue;
    CHECK(server.post("/v1/completions", call + "}", other + key).status == 403);
    CHECK(origin(call + "}", other + key) == "");
    CHECK(preflight(server, other + asks).status >= 400);
  }
}

TEST_CASE("api: models, version, health, ready, stats, page", "[server][api]") {
  TestServer server;
  json models = parsed(server.get("/v1/models").body);
  CHECK_SAME(models["object"], "list");
  json card = models["data"][0];
  CHECK_SAME(card["id"], "tiny");
  CHECK_SAME(card["root"], "models/tiny");
  CHECK_SAME(card["max_model_len"], 256);
  CHECK_SAME(card["object"], "model");
  CHECK_SAME(parsed(server.get("/v1/models/tiny").body), card);
  CHECK_SAME(parsed(server.get("/v1/models/").body), models);
  CHECK_SAME(parsed(server.get("/version").body)["version"], "1.2.3");
  CHECK_SAME(parsed(server.get("/health").body)["status"], "ok");
  CHECK(server.post("/ping", "").status == 200);
  CHECK_SAME(parsed(server.get("/ready").body)["status"], "ready");
  json stats = parsed(server.get("/stats").body);
  REQUIRE(stats["instances"].size() == 2);
  json blocks = stats["instances"][0]["blocks"];
  CHECK(blocks["free"].get<int>() + blocks["active"].get<int>() + blocks["cached"].get<int>() +
            blocks["in_transfer"].get<int>() ==
        blocks["capacity"].get<int>());
  Reply page = server.get("/");
  CHECK(page.header("content-type") == "text/html; charset=utf-8");
  CHECK(page.header("content-security-policy").starts_with("default-src 'none'"));
  CHECK(page.body.find("<!doctype html>") == 0);
  CHECK(page.body.find("http://") == std::string::npos);  // nothing from elsewhere
  CHECK(page.body.find("https://") == std::string::npos);
  server.service.alive = false;
  CHECK(server.get("/health").status == 503);
  CHECK(server.get("/ready").status == 503);
}

TEST_CASE("api: what nobody holds of a pool that processes share is told once in /stats", "[server][api]") {
  ServiceStats stats = FakeService().stats();
  const ServedModel model{.name = "tiny"};
  CHECK_FALSE(parsed(stats_body(model, stats)).contains("pool"));
  stats.process_pool = {.blocks = 100, .free = 50, .bytes = 6400, .block_bytes = 64};
  stats.instances[0].kv = {};
  stats.instances[0].kv.capacity = 80, stats.instances[0].kv.free = 50;
  stats.instances[0].kv.active = 30;
  const json body = parsed(stats_body(model, stats));
  CHECK_SAME(body["pool"], parsed(R"({"blocks":100,"free":50})"));
  const json blocks = body["instances"][0]["blocks"];
  CHECK_SAME(blocks["capacity"], 100);
  CHECK_SAME(blocks["free"], 0);
  CHECK_SAME(blocks["active"], 30);
}

TEST_CASE("api: tokenize and detokenize", "[server][api]") {
  TestServer server;
  json body = parsed(server
                         .post("/tokenize", R"({"prompt":"h\u00e9","add_special_tokens":false,
                                                  "return_token_strs":true})")
                         .body);
  CHECK_SAME(body["tokens"], parsed("[104,195,169]"));
  CHECK_SAME(body["count"], 3);
  CHECK_SAME(body["max_model_len"], 256);
  CHECK_SAME(body["token_strs"][0], "h");
  CHECK_SAME(parsed(server.post("/detokenize", R"({"tokens":[104,195,169]})").body)["prompt"], "h\u00e9");
  json chat = parsed(server.post("/tokenize", R"({"messages":[{"role":"user","content":"x"}]})").body);
  CHECK_SAME(chat["count"], 19);
  std::string long_text(30000,
                        'x');  // tokenized off the I/O thread, and refused as too long to fit
  CHECK(server.post("/tokenize", R"({"prompt":")" + long_text + "\"}").status == 400);
  CHECK(server.post("/detokenize", R"({"tokens":[257]})").status == 400);
  CHECK(server.post("/detokenize", R"({"tokens":"x"})").status == 400);
  CHECK(server.post("/tokenize", R"({"prompt":5})").status == 400);
  std::string ids = "[104";
  for (int i = 0; i < 20000; ++i) ids += ",104";
  CHECK_SAME(parsed(server.post("/detokenize", R"({"tokens":)" + ids + "]}").body)["prompt"], std::string(20001, 'h'));
}

TEST_CASE("api: without a tokenizer, token ids are served and text is refused", "[server][api]") {
  TestServer server({}, false);
  CHECK(server.post("/v1/completions", R"({"prompt":[1,299],"logprobs":1})").status == 200);
  CHECK(server.post("/v1/completions", R"({"prompt":[300]})").status == 400);
  CHECK(server.post("/v1/completions", R"({"prompt":"a"})").status == 400);
  CHECK(server.post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}]})").status == 400);
  CHECK(server.post("/tokenize", R"({"prompt":"a"})").status == 400);
  CHECK(server.post("/detokenize", R"({"tokens":[1]})").status == 400);
  CHECK(server.get("/metrics").status == 200);
}

TEST_CASE("api: dev endpoints", "[server][api]") {
  std::atomic<int> resets{0};
  TestServer server([&](ServerOptions& o) {
    o.dev_endpoints = true;
    o.server_info = "--port 1";
    o.reset_prefix_cache = [&] { ++resets; };
  });
  CHECK_SAME(parsed(server.get("/server_info").body)["options"], "--port 1");
  CHECK(server.post("/reset_prefix_cache", "").status == 200);
  CHECK(resets == 1);
}

TEST_CASE("api: 2,000 requests leave nothing behind", "[server][api]") {
  TestServer server;
  auto resident = [&] {
    std::string text = server.get("/metrics").body;
    return std::stod(text.substr(text.find("\nprocess_resident_memory_bytes ") + 31));
  };
  Client client(server.port());
  std::string call = request_text("POST", "/v1/completions", R"({"prompt":"abc","stream":true})");
  double before = 0;
  for (int i = 0; i < 2000; ++i) {
    if (i == 500) before = resident();
    client.send(call);
    REQUIRE(client.read().complete);
  }
  // Sanitizers hold freed memory back by design; there, theirs is the leak check.
  bool plain = std::string(XPYD_BUILD_MODE) == "release";
  CHECK(resident() - before < (plain ? 4e6 : 500e6));
  CHECK(server.service.in_flight() == 0);
}

}  // namespace xpyd::testing::api_routes_test
