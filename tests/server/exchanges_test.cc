// HTTP exchanges as rows {request, status, words of the answer}, against a few servers: what clients may send, what is
// refused with which words, which origins and keys may ask, and the small endpoints.
#include <sys/stat.h>

#include <fstream>
#include <set>

#include "server/openai/api.h"
#include "tests/server/api_fixture.h"

namespace xpyd::testing::exchanges_test {

struct Exchange {
  std::string request;
  int status;
  std::string words = "";  // all must be in the answer's head or body: "one|another|!one that must be absent"
};

std::string get(const std::string& path, const std::string& headers = "") {
  return request_text("GET", path, "", headers);
}
std::string post(const std::string& path, const std::string& body, const std::string& headers = "") {
  return request_text("POST", path, body, headers);
}
// A completion of {"prompt":"a"} with more fields. chat() does the same for a chat.
std::string ask(const std::string& more = "", const std::string& headers = "") {
  return post("/v1/completions", R"({"prompt":"a")" + (more.empty() ? "" : "," + more) + "}", headers);
}
std::string chat(const std::string& more) {
  return post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],)" + more + "}");
}
std::string raw(const std::string& first, const std::string& headers = "") {
  return first + " HTTP/1.1\r\nHost: a\r\n" + headers + "\r\n";
}
// The end of an error's body that names a field, or null, and a code.
std::string at(const std::string& param, const std::string& code = "") {
  const auto text = [](const std::string& s) { return s.empty() ? std::string("null") : '"' + s + '"'; };
  return ",\"param\":" + text(param) + ",\"code\":" + text(code) + "}}";
}
std::string quoted(size_t n) { return '"' + std::string(n, 'x') + '"'; }
std::string many(const std::string& item, int n) {
  std::string list = "[" + item;
  for (int i = 1; i < n; ++i) list += "," + item;
  return list + "]";
}

void check(TestServer& server, const std::vector<Exchange>& exchanges) {
  for (const Exchange& e : exchanges) {
    Client client(server.port());
    client.send(e.request);
    const Reply reply = client.read(e.request.starts_with("HEAD"));
    const std::string answer = reply.head + "\n" + reply.body;
    INFO(e.request.substr(0, 300) << "\n" << answer.substr(0, 1000));
    CHECK(reply.status == e.status);
    if (reply.status >= 400) CHECK(reply.body.starts_with(R"({"error":{"message":")"));
    for (size_t begin = 0, end; begin < e.words.size(); begin = end + 1) {
      end = std::min(e.words.find('|', begin), e.words.size());
      std::string word = e.words.substr(begin, end - begin);
      const bool absent = word.starts_with("!");
      INFO(word);
      CHECK((answer.find(word.substr(absent)) == answer.npos) == absent);
    }
  }
}

TEST_CASE("api: every integer field is accepted up to its edges and refused beyond them", "[server][api]") {
  TestServer server;
  const std::string most = "2147483647", over = "2147483648", far = "9223372036854775808";
  const struct {
    std::string name;
    std::vector<std::string> good, bad;
    bool completions = true, chat = true;
  } kFields[] = {{"max_tokens", {"1"}, {"0", "-1", over, far}},
                 {"max_completion_tokens", {"1"}, {"0", "-1", over, far}},
                 {"n", {"1", "8"}, {"0", "9", "-1", over, far}},
                 {"top_k", {"-1", most}, {"-2", over, far}},
                 {"logprobs", {"0", "20"}, {"-1", "21", over, far}, true, false},
                 {"top_logprobs", {"0", "20"}, {"-1", "21", over, far}, false, true},
                 {"prompt_logprobs", {"0", "20"}, {"-1", "21", over, far}},
                 {"seed", {"-9223372036854775808", "9223372036854775807", "-1", over}, {"-9223372036854775809", far}},
                 {"priority", {"-2147483648", most, "-1"}, {"-2147483649", over, far}}};
  for (const auto& field : kFields)
    for (bool of_chat : {false, true}) {
      if (of_chat ? !field.chat : !field.completions) continue;
      const auto send = [&](const std::string& value, bool good) {
        std::string more = '"' + field.name + "\":" + value;
        if (field.name == "top_logprobs") more += R"(,"logprobs":true)";
        const std::string named = ",\"param\":\"" + field.name + "\"";
        check(server, {{of_chat ? chat(more) : ask(more), good ? 200 : 400, good ? "" : named}});
      };
      for (const std::string& value : field.good) send(value, true);
      for (const std::string& value : field.bad) send(value, false);
      for (const char* wrong : {"\"1\"", "1.5", "1.0", "1e300", "true", "[]", "{}"}) send(wrong, false);
      if (!field.name.starts_with("max_")) continue;
      send(of_chat ? "237" : "255", true);  // the rest of the context
      send(of_chat ? "238" : "256", false);
    }
}

TEST_CASE("api: refused values are 400 and name the field", "[server][api]") {
  TestServer server;
  // session_test.cc has the cases of session_id, and api_fields_test.cc the fields that are not supported.
  const std::pair<const char*, std::vector<std::string>> refused[] = {
      {"temperature", {"-1", "101", "\"1\""}},
      {"top_p", {"0", "1.01", "-0.5"}},
      {"min_p", {"2"}},
      {"repetition_penalty", {"0", "-1"}},
      {"presence_penalty", {"2.5"}},
      {"frequency_penalty", {"-2.5"}},
      {"stop", {"\"\"", "[\"\"]", "[1]", "1", many("\"x\"", 65), quoted(257)}},
      {"stop_token_ids", {"1", "[-1]", "[257]", "[1.5]", "[4294967296]"}},
      {"stream", {"1", "\"true\""}},
      {"ignore_eos", {"0"}},
      {"echo", {"[]"}},
      {"stream_options", {"{\"include_usage\":true}"}},  // without stream
      {"cache_salt", {"\"\"", quoted(1025)}},
      {"model", {"5"}},
      {"prompt_logprobs", {"21", "1,\"stream\":true", R"(1,"session_id":"s","session_generation":"new")"}},
      {"max_tokens", {"0", "-1,\"echo\":true"}},
  };
  std::vector<Exchange> rows;
  for (const auto& [field, values] : refused)
    for (const std::string& value : values)
      rows.push_back({ask('"' + std::string(field) + "\":" + value), 400, "\"invalid_request_error\"|" + at(field)});
  for (const char* prompt : {"null", "5", "{}", "[]", "[[]]", "[1,\"a\"]", "[\"a\",1]", "[[1],\"a\"]", "[-1]", "[257]",
                             "[1.5]", "[9223372036854775808]", "[true]", "\"\"", "[[1,[2]]]"})
    rows.push_back({post("/v1/completions", R"({"prompt":)" + std::string(prompt) + "}"), 400, at("prompt")});
  for (const char* messages :
       {"null", "[]", "{}", "[1]", R"([{"role":"user","content":5}])", R"([{"content":"x"}])",
        R"([{"role":"wizard","content":"x"}])", R"([{"role":"user","content":[{"type":"image_url"}]}])",
        R"([{"role":"user","content":["x"]}])", R"([{"role":"tool","content":"x"}])"})
    rows.push_back(
        {post("/v1/chat/completions", R"({"messages":)" + std::string(messages) + "}"), 400, at("messages")});
  rows.push_back({chat(R"("top_logprobs":2)"), 400});
  for (const char* prompt : {"abc", "x"})
    rows.push_back({ask(R"("echo":true,"logprobs":1,"session_id":")" + std::string(prompt) + '"'), 400, at("echo")});
  // The largest number of choices is accepted, and one more is refused.
  const std::string prompts = many("\"a\"", kMaxChoicesPerCall);
  const auto all = [&](const std::string& list, const std::string& more) {
    return post("/v1/completions", R"({"max_tokens":1,"prompt":)" + list + more + "}");
  };
  rows.push_back({ask(R"("stop":)" + many("\"s\"", 64)), 200});
  rows.push_back({all(prompts, ""), 200});
  rows.push_back({all(many("\"a\"", kMaxChoicesPerCall + 1), ""), 400});
  rows.push_back({all(prompts, R"(,"n":2)"), 400});
  check(server, rows);
}

// tests/base/json_test.cc has every kind of bad JSON.
TEST_CASE("api: a body that is not valid JSON is a 400", "[server][api]") {
  TestServer server;
  std::string deep_object;
  for (int i = 0; i < 1000; ++i) deep_object += "{\"a\":";
  for (const std::string& body : {std::string(""), std::string(R"({"prompt":"a)"), std::string(R"({"prompt":"a",})"),
                                  std::string(R"({"prompt":"a"} x)"), std::string(100000, '['), deep_object,
                                  std::string(R"({"prompt":"a","prompt":"b"})"), std::string("{\"prompt\":\"\xff\"}")})
    check(server, {{post("/v1/completions", body), 400, at("")}});
  // Escapes and astral characters are accepted, and so is a \u0000.
  check(server, {{post("/v1/completions", R"({"prompt":"\ud83d\ude00 \u0000 \u00e9"})"), 200},
                 {post("/v1/completions", R"({"prompt":)" + many("1", 1100000) + "}"), 400}});
}

TEST_CASE("api: a prompt that exceeds the context is refused with context_length_exceeded", "[server][api]") {
  TestServer server;
  const std::string code = "context_length_exceeded";
  for (size_t size : {size_t{256}, size_t{20000}, size_t{8} << 20})
    check(server, {{post("/v1/completions", R"({"prompt":)" + quoted(size) + "}"), 400, at("prompt", code)},
                   {post("/v1/chat/completions", R"({"messages":[{"role":"user","content":)" + quoted(size) + "}]}"),
                    400, at("messages", code)}});
  check(server,
        {{post("/v1/completions", R"({"prompt":[1],"max_tokens":256})"), 400,
          "HTTP/1.1 400 Bad Request\r\n|This model's maximum context length is 256|" + at("max_tokens", code)}});
  CHECK(server.service.seen().empty());
}

TEST_CASE("api: max_tokens has a default and stays within the context", "[server][api]") {
  TestServer server;  // max_model_len is 256
  const auto of_prompt = [](size_t n, const std::string& more = "") {
    return post("/v1/completions", R"({"prompt":)" + quoted(n) + more + "}");
  };
  const std::pair<std::string, int> takes[] = {
      {ask(), 16},         {ask(R"("max_tokens":null)"), 16},
      {of_prompt(250), 6}, {of_prompt(250, R"(,"max_tokens":6)"), 6},
      {of_prompt(255), 1}, {chat(R"("n":1)"), 237}};  // "user: x\nassistant: " has 20 tokens
  for (const auto& [request, tokens] : takes) {
    check(server, {{request, 200}});
    CHECK(server.service.seen().back().max_tokens == tokens);
  }
  check(server, {{of_prompt(250, R"(,"max_tokens":7)"), 400}});
}

TEST_CASE("api: log lines have a time, a level and the unknown fields, and no text of a prompt", "[server][api]") {
  const auto lines = [](LogLevel level) {
    TestServer server([&](ServerOptions& o) { o.log_level = level; });
    check(server, {{post("/v1/completions", R"({"prompt":"SECRETPROMPT","shiny":1,"new\nfield":2})"), 200},
                   {post("/v1/completions", R"({"prompt":1})"), 400},
                   {get("/v1/models"), 200}});
    server.server->stop();
    server.join();
    return server.log();
  };
  const auto info = lines(LogLevel::info);
  REQUIRE(info.size() == 2);
  CHECK(info[0].substr(23).starts_with("Z info request id="));
  INFO(info[0]);
  for (const char* part : {" ignored=new?field,shiny", " status=200 ", " prompt_tokens=12 ", " finish=length "})
    CHECK(info[0].find(part) != std::string::npos);
  CHECK(info[0].find("SECRET") == std::string::npos);
  CHECK(info[0].find('\n') == std::string::npos);
  CHECK(info[1].substr(23).starts_with("Z warning refused route=/v1/completions status=400"));
  CHECK(lines(LogLevel::warning).size() == 1);
}

TEST_CASE("api: unknown routes, methods and content encodings are refused", "[server][api]") {
  TestServer server;
  check(server, {{get("/nothing"), 404, "\"not_found_error\"|" + at("")},
                 {get("/%2e%2e/etc/passwd"), 404, at("")},
                 {get("/v1/models/other"), 404, at("")},
                 {ask(R"("model":"gpt")"), 404, at("model", "model_not_found")},
                 {ask("", "Content-Encoding: identity\r\n"), 200},
                 {ask("", "Content-Encoding: Identity\r\n"), 200},
                 {ask("", "Content-Encoding: gzip\r\n"), 415, "gzip"},
                 {ask("", "Content-Encoding: br\r\n"), 415, "br"},
                 {ask("", "Content-Encoding: gzip, identity\r\n"), 415, "gzip, identity"}});
  for (const auto& route : Api::routes()) {
    const std::string path = route.path;
    check(server, {{raw("DELETE " + path), 405}});
    if (route.method == std::string("GET"))
      check(server, {{get(path), 200}, {post(path, "{}"), 405, "Allow: GET, HEAD\r\n"}});
    else
      check(server, {{get(path), 405, "Allow: POST\r\n"}, {post(path, "{}", "Content-Type: text/plain\r\n"), 415}});
    if (route.method == std::string("POST") && path != "/reset_prefix_cache")
      check(server, {{post(path, ""), 400}, {post(path, "[]"), 400}});
  }
}

TEST_CASE("api: models, health, stats, page and tokens answer", "[server][api]") {
  TestServer server([](ServerOptions& o) { o.other_names = {"models/tiny"}; });
  const json models = parsed(server.get("/v1/models").body), card = models["data"][0];
  REQUIRE(models["data"].size() == 1);
  for (const auto& [key, value] :
       {std::pair("id", "\"tiny\""), {"root", "\"models/tiny\""}, {"max_model_len", "256"}, {"object", "\"model\""}})
    CHECK_SAME(card[key], parsed(value));
  check(server, {{get("/v1/models"), 200, R"("object":"list")"},
                 {get("/health"), 200, R"({"status":"ready"})"},
                 {get("/"), 200,  // the page loads nothing from other hosts
                  "Content-Type: text/html; charset=utf-8|Content-Security-Policy: default-src 'none'|\n<!doctype "
                  "html>|!http://|!https://"},
                 // The folder and the served name are accepted as the model. Answers carry the served name.
                 {ask(R"("model":"tiny")"), 200, R"("model":"tiny")"},
                 {ask(R"("model":"models/tiny")"), 200, R"("model":"tiny")"},
                 {ask(R"("model":"tin")"), 404},
                 {post("/tokenize", R"({"prompt":"h\u00e9","add_special_tokens":false,"return_token_strs":true})"), 200,
                  R"("tokens":[104,195,169]|"count":3|"max_model_len":256|"token_strs":["h")"},
                 {post("/detokenize", R"({"tokens":[104,195,169]})"), 200, "{\"prompt\":\"h\u00e9\"}"},
                 {post("/detokenize", R"({"tokens":)" + many("104", 20001) + "}"), 200, std::string(20001, 'h')},
                 {post("/tokenize", R"({"messages":[{"role":"user","content":"x"}]})"), 200, R"("count":19)"},
                 // A long text is tokenized off the I/O thread, and refused because it cannot fit.
                 {post("/tokenize", R"({"prompt":)" + quoted(30000) + "}"), 400},
                 {post("/detokenize", R"({"tokens":[257]})"), 400},
                 {post("/detokenize", R"({"tokens":"x"})"), 400},
                 {post("/tokenize", R"({"prompt":5})"), 400}});
  const json blocks = parsed(server.get("/stats").body)["instances"][1]["blocks"];
  int sum = 0;
  for (const char* state : {"free", "active", "cached", "in_transfer"}) sum += blocks[state].get<int>();
  CHECK(sum == blocks["capacity"].get<int>());
  server.service.alive = false;
  CHECK(server.get("/health").status == 503);
}

TEST_CASE("api: without a tokenizer, token ids are served and text is refused", "[server][api]") {
  TestServer server({}, false);
  check(server, {{post("/v1/completions", R"({"prompt":[1,299],"logprobs":1})"), 200},
                 {post("/v1/completions", R"({"prompt":[300]})"), 400},
                 {ask(), 400},
                 {chat(R"("n":1)"), 400},
                 {post("/tokenize", R"({"prompt":"a"})"), 400},
                 {post("/detokenize", R"({"tokens":[1]})"), 400},
                 {get("/metrics"), 200}});
}

// ---- access

TEST_CASE("api: a key guards every route but the probes and the page", "[server][access]") {
  TestServer server([](ServerOptions& o) { o.api_key = "secret"; });
  std::set<std::string> open;
  for (const auto& route : Api::routes()) {
    const bool posts = route.method == std::string("POST");
    const auto status = [&](const std::string& key) {
      const std::string header = key.empty() ? "" : "Authorization: " + key + "\r\n";
      return (posts ? server.post(route.path, "{}", header) : server.get(route.path, header)).status;
    };
    INFO(route.path);
    for (const char* wrong :
         {"", "Bearer secreT", "Bearer secre", "Bearer secrets", "Bearer ", "Basic secret", "secret"})
      CHECK((status(wrong) == 401) == !route.open);
    for (const char* good : {"Bearer secret", "bearer secret", "BEARER secret"}) CHECK(status(good) != 401);
    if (route.open) open.insert(route.path);
  }
  CHECK(open == std::set<std::string>{"/", "/health"});
  check(server, {{get("/v1/models"), 401, "\"authentication_error\"|" + at("", "invalid_api_key")}});
  // The server does not read the body of a request without the key. A connection whose request has no body is kept.
  Client client(server.port()), kept(server.port());
  client.send(raw("POST /v1/completions", "Content-Type: application/json\r\nContent-Length: 16777216\r\n"));
  const Reply refused = client.read();
  CHECK(refused.status == 401);
  CHECK(refused.header("connection") == "close");
  client.send(std::string(1 << 20, 'x'));
  for (int i = 0; i < 3; ++i) {
    kept.send(get("/v1/models"));
    CHECK(kept.read().status == 401);
  }
}

TEST_CASE("issue: a form of another site cannot retire an instance, and --allowed-hosts ignores case",
          "[server][access]") {
  std::atomic<int> retired{0}, resets{0};
  TestServer server([&](ServerOptions& o) {
    o.allowed_hosts = {"LocalHost"};
    o.reset_prefix_cache = [&] { ++resets; };
    o.retire_instance = [&](const std::string&, const std::string&) {
      ++retired;
      return ok();
    };
  });
  const std::string body = R"({"name":"P0"})";
  for (const auto& [headers, status] : {std::pair("Origin: http://evil\r\nContent-Type: text/plain\r\n", 403),
                                        {"Content-Type: text/plain\r\n", 415},
                                        {"Origin: http://evil\r\n", 403},
                                        {"Origin: null\r\n", 403},
                                        {"Origin: http://localhost:81\r\n", 403},
                                        {"Origin: http://localhost.evil\r\n", 403},
                                        {"Content-Type: application/json-not\r\n", 415}})
    check(server, {{post("/retire_instance", body, headers), status}, {ask("", headers), status}});
  check(server, {{post("/reset_prefix_cache", "", "Origin: http://evil\r\n"), 403},
                 {get("/stats", "Origin: http://evil\r\n"), 403}});
  CHECK(retired + resets == 0);
  CHECK(server.service.seen().empty());
  check(server, {{post("/retire_instance", body, "Origin: http://LOCALHOST\r\n"), 200},
                 {post("/reset_prefix_cache", ""), 200}});
  CHECK((retired == 1 && resets == 1));
}

TEST_CASE("issue: a foreign host name that points at loopback is refused", "[server][access]") {
  TestServer server([](ServerOptions& o) { o.allowed_hosts = {"llm.example"}; });
  const auto of = [](const std::string& host, const std::string& path = "/health") {
    return "GET " + path + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n";
  };
  for (const auto& route : Api::routes())
    check(server, {{of("evil.example", route.path), 403}, {of("evil.example:8000", route.path), 403}});
  for (const char* host : {"localhost.evil.example", "127.0.0.1.evil.example", "llm.example.evil"})
    check(server, {{of(host), 403}});
  for (const char* host : {"[::1]evil", "[::1]:80:80", "[::1", "[]", "[evil]", "localhost:evil", "127.0.0.1%evil:x",
                           "evil/.localhost", "evil@localhost", "a b.localhost"})
    check(server, {{of(host), 400}});
  for (const char* host : {"127.0.0.1", "127.0.0.1:8000", "localhost", "LocalHost:80", "[::1]:80", "10.1.2.3",
                           "llm.example", "LLM.example:443"})
    check(server, {{of(host), 200}});
}

TEST_CASE("access: the key comes from a private file, and a key that no header can carry is refused",
          "[server][access]") {
  TempDir dir;
  const std::string path = dir.path + "/keys";
  const auto write = [&](const std::string& text, mode_t mode) {
    std::ofstream(path) << text;
    chmod(path.c_str(), mode);
    return read_api_key(path);
  };
  CHECK(write("d-e_f \r\n", 0600).value() == "d-e_f");
  CHECK(write("abc\n", 0440));  // as Kubernetes mounts a secret for a group
  for (mode_t mode : {0660, 0604, 0644}) {
    const auto key = write("abc\n", mode);
    REQUIRE_FALSE(key);
    CHECK(key.error().message.find("expected mode 0600 or 0640") != std::string::npos);
  }
  for (const char* bad : {"", "\n", "two words\n", "two\nlines\n", "\x01\n", "\xc3\xbc"}) CHECK_FALSE(write(bad, 0600));
  CHECK_FALSE(read_api_key(dir.path + "/missing"));
}

TEST_CASE("access: listening beyond loopback requires a key", "[server][access]") {
  FakeService service;
  RealClock clock;
  ServerOptions options;
  options.host = "0.0.0.0", options.port = 0, options.max_model_len = 16;
  const auto listen = [&] { return HttpServer::listen(options, service, nullptr, nullptr, clock); };
  REQUIRE_FALSE(listen());
  CHECK(listen().error().message.find("--api-key-file") != std::string::npos);
  options.api_key = "k";
  CHECK(listen());
}

}  // namespace xpyd::testing::exchanges_test
