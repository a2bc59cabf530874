// HTTP exchanges as rows {request, status, words of the answer}, against a few servers: what clients may send, what is
// refused with which words, which origins and keys may ask, and the small endpoints.
#include <sys/stat.h>

#include <fstream>
#include <set>

#include "server/openai/api.h"
#include "tests/server/api_fixture.h"

namespace xpyd::testing::exchanges_test {
namespace {

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

}  // namespace

TEST_CASE("api: every integer field is accepted up to its edges and refused beyond them", "[server][api]") {
  TestServer server;
  const auto text = [](__int128 v) {
    unsigned __int128 rest = v < 0 ? -static_cast<unsigned __int128>(v) : static_cast<unsigned __int128>(v);
    std::string digits;
    do digits.insert(digits.begin(), static_cast<char>('0' + static_cast<int>(rest % 10)));
    while (rest /= 10);
    return (v < 0 ? "-" : "") + digits;
  };
  for (const IntegerField& field : integer_fields())
    for (bool of_chat : {false, true}) {
      if (of_chat ? !field.chat : !field.completions) continue;
      const std::string name = field.name;
      // A max_tokens over the context reports the tokens that are left. Every other error names the field.
      const auto send = [&](const std::string& value, bool good) {
        std::string more = '"' + name + "\":" + value;
        if (name == "top_logprobs") more += R"(,"logprobs":true)";
        if (name == "best_of") more = R"("n":)" + value + "," + more;  // n and best_of must agree
        const std::string named = ",\"param\":\"" + (name == "best_of" ? "" : name + "\"");
        check(server, {{of_chat ? chat(more) : ask(more), good ? 200 : 400, good ? "" : named}});
      };
      __int128 max = field.max;
      if (name.starts_with("max_")) max = of_chat ? 237 : 255;  // the rest of the context
      if (name == "min_tokens") max = of_chat ? 237 : 16;       // the default of max_tokens
      for (__int128 value : {__int128{field.min} - 1, __int128{field.min}, max, max + 1, __int128{-1},
                             __int128{1} << 31, __int128{1} << 63})
        send(text(value), value >= field.min && value <= max);
      for (const char* wrong : {"\"1\"", "1.5", "1.0", "1e300", "true", "[]", "{}"}) send(wrong, false);
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
      {"stream_options", {"{\"include_usage\":true}"}},                          // without stream
      {"speculative", {"{\"tokens\":2}", "{\"tokens\":65}", "{\"k\":0}", "4"}},  // this server drafts nothing
      {"cache_salt", {"\"\"", quoted(1025)}},
      {"model", {"5"}},
      {"suffix", {"\"x\""}},
      {"logit_bias", {"{\"257\":1}", "{\"-1\":1}", "{\"05\":1}", "{\"x\":1}", "{\"5\":101}", "{\"5\":\"1\"}", "[1]"}},
      {"allowed_token_ids",
       {"[]", "[257]", "5", "[97],\"bad_words\":[\"a\"]", "[7],\"min_tokens\":1,\"stop_token_ids\":[7]"}},  // none left
      {"bad_words", {"\"a\"", "[\"\"]", "[5]", "[" + quoted(257) + "]"}},
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
        R"([{"role":"user","content":["x"]}])", R"([{"role":"assistant","content":"","tool_calls":[{}]}])"})
    rows.push_back(
        {post("/v1/chat/completions", R"({"messages":)" + std::string(messages) + "}"), 400, at("messages")});
  for (const char* extra : {R"("tools":[{}])", R"("tool_choice":"required")", R"("chat_template":"{{ 1 }}")",
                            R"("top_logprobs":2)", R"("response_format":{"type":"json_schema"})"})
    rows.push_back({chat(extra), 400});
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

TEST_CASE("api: a body that is not valid JSON is a 400", "[server][api]") {
  TestServer server;
  std::string deep_object;
  for (int i = 0; i < 1000; ++i) deep_object += "{\"a\":";
  for (const std::string& body :
       {std::string(""), std::string(R"({"prompt":"a)"), std::string(R"({"prompt":"a",})"),
        std::string(R"({"prompt":"a"} x)"), std::string(R"({"prompt":"a" /* b */})"), std::string("{'prompt':'a'}"),
        std::string(R"({"prompt":"a","temperature":NaN})"), std::string(100000, '['), deep_object,
        std::string(R"({"prompt":"a","prompt":"b"})"), std::string("{\"prompt\":\"\xff\"}"),
        std::string("{\"prompt\":\"\xc0\xaf\"}"), std::string("{\"prompt\":\"\xed\xa0\x80\"}"),  // overlong, surrogate
        std::string(R"({"prompt":"\ud800"})"), std::string(R"({"prompt":"\udc00 a"})"),
        std::string("{\"prompt\":\"a\nb\"}"), std::string("{\"prompt\":\"a\0\"}", 15),
        std::string(R"({"prompt":"a","temperature":1e999})")})
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
  check(server, {{of_prompt(250, R"(,"max_tokens":7)"), 400},
                 {of_prompt(256), 400},
                 {ask(R"("max_tokens":0)"), 400},
                 {chat(R"("max_completion_tokens":0)"), 400}});
}

TEST_CASE("api: SLO headers are milliseconds, and other values are refused", "[server][api]") {
  TestServer server;
  for (const std::string name : {"x-slo-ttft-ms", "x-slo-tbt-ms"})
    for (const std::string value :
         {"abc", "-1", "0", "nan", "inf", "1e999", "5 ms", "1,000", "0x", "1e10", "--1", "5;6"})
      for (const char* path : {"/v1/completions", "/v1/chat/completions"})
        check(
            server,
            {{post(path, R"({"prompt":"a","messages":[{"role":"user","content":"a"}]})", name + ": " + value + "\r\n"),
              400, "expected milliseconds above 0|" + at(name)}});
  CHECK(server.service.seen().empty());
  check(server, {{ask("", "X-SLO-TTFT-ms: 1500\r\nx-slo-tbt-ms: 2.5\r\n"), 200}});
  CHECK(server.service.seen().at(0).slo_ttft_s == 1.5);
  CHECK(server.service.seen().at(0).slo_tbt_s == 0.0025);
}

TEST_CASE("api: log lines have a time, a level and the unknown fields, and no text of a prompt", "[server][api]") {
  const auto lines = [](LogLevel level) {
    TestServer server([&](ServerOptions& o) { o.log_level = level; });
    check(server,
          {{post("/v1/completions", R"({"prompt":"SECRETPROMPT","shiny":1,"new\nfield":2})", "X-Request-Id: abc-1\r\n"),
            200, "abc-1"},
           {post("/v1/completions", R"({"prompt":1})"), 400},
           {get("/v1/models"), 200},
           // An id that could forge a log line or a header is replaced.
           {post("/v1/completions", R"({"prompt":1})", "X-Request-Id: a b=c\r\n"), 400, "!a b=c"}});
    server.server->stop();
    server.join();
    return server.log();
  };
  const auto info = lines(LogLevel::info);
  REQUIRE(info.size() == 3);
  // The form is 2026-11-22T14:46:09.123Z info request id=…
  CHECK((info[0].substr(10, 1) == "T" && info[0].substr(19, 1) == "."));
  CHECK(info[0].substr(23).starts_with("Z info request id="));
  INFO(info[0]);
  for (const char* part :
       {" ignored=new?field,shiny", " client_id=abc-1", " status=200 ", " prompt_tokens=12 ", " finish=length "})
    CHECK(info[0].find(part) != std::string::npos);
  CHECK(info[0].find("SECRET") == std::string::npos);
  CHECK(info[0].find('\n') == std::string::npos);
  CHECK(info[1].substr(23).starts_with("Z warning refused route=/v1/completions status=400"));
  CHECK(lines(LogLevel::warning).size() == 2);
  CHECK(lines(LogLevel::error).empty());
  CHECK(lines(LogLevel::debug).size() == 4);
}

TEST_CASE("api: unknown routes, methods and content encodings are refused", "[server][api]") {
  TestServer server;
  check(server, {{get("/nothing"), 404, "\"not_found_error\"|" + at("")},
                 {get("/%2e%2e/etc/passwd"), 404, at("")},
                 {get("/server_info"), 404, at("")},
                 {get("/v1/models/other"), 404, at("model", "model_not_found")},
                 {ask(R"("model":"gpt")"), 404, at("model", "model_not_found")},
                 {ask("", "Content-Encoding: identity\r\n"), 200},
                 {ask("", "Content-Encoding: Identity\r\n"), 200},
                 {ask("", "Content-Encoding: gzip\r\n"), 415, "gzip"},
                 {ask("", "Content-Encoding: br\r\n"), 415, "br"},
                 {ask("", "Content-Encoding: gzip, identity\r\n"), 415, "gzip, identity"}});
  for (const auto& route : Api::routes()) {
    if (route.dev) continue;
    std::string path = route.path;
    if (path == "/v1/models/") path += "tiny";
    const bool gets = std::string(route.methods).find("GET") != std::string::npos;
    const bool posts = std::string(route.methods).find("POST") != std::string::npos;
    check(server, {{raw("DELETE " + path), 405}});
    if (gets) check(server, {{get(path), 200}});
    if (gets && !posts) check(server, {{post(path, "{}"), 405, "Allow: GET, HEAD\r\n"}});
    if (posts && !gets)
      check(server, {{get(path), 405, "Allow: POST\r\n"},
                     {post(path, "{}", "Content-Type: text/plain\r\n"), 415},
                     {post(path, ""), 400},
                     {post(path, "[]"), 400}});
  }
}

TEST_CASE("api: models, version, health, ready, stats, page and tokens answer", "[server][api]") {
  TestServer server([](ServerOptions& o) {
    o.names = {"tiny", "small", "org/tiny"};
    o.other_names = {"models/tiny"};
  });
  const json models = parsed(server.get("/v1/models").body), card = models["data"][0];
  REQUIRE(models["data"].size() == 3);
  for (const auto& [key, value] :
       {std::pair("id", "\"tiny\""), {"root", "\"models/tiny\""}, {"max_model_len", "256"}, {"object", "\"model\""}})
    CHECK_SAME(card[key], parsed(value));
  CHECK_SAME(parsed(server.get("/v1/models/tiny").body), card);
  CHECK_SAME(parsed(server.get("/v1/models/").body), models);
  check(server, {{get("/v1/models"), 200, R"("object":"list"|"id":"org/tiny")"},
                 {get("/v1/models/org/tiny"), 200, R"("id":"org/tiny"|"root":"models/tiny")"},
                 {get("/version"), 200, R"("version":"1.2.3")"},
                 {get("/health"), 200, R"({"status":"ok"})"},
                 {post("/ping", ""), 200},
                 {get("/ready"), 200, R"("status":"ready")"},
                 {get("/"), 200,  // the page loads nothing from other hosts
                  "Content-Type: text/html; charset=utf-8|Content-Security-Policy: default-src 'none'|\n<!doctype "
                  "html>|!http://|!https://"},
                 // The folder and each served name are accepted as the model. Answers carry the first served name.
                 {ask(R"("model":"tiny")"), 200, R"("model":"tiny")"},
                 {ask(R"("model":"small")"), 200, R"("model":"tiny")"},
                 {ask(R"("model":"org/tiny")"), 200, R"("model":"tiny")"},
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
  for (const char* path : {"/health", "/ready"}) CHECK(server.get(path).status == 503);
}

TEST_CASE("api: /stats reports the free blocks of a pool that processes share once", "[server][api]") {
  ServiceStats stats = FakeService().stats();
  const ServedModel model{.name = "tiny"};
  CHECK_FALSE(parsed(stats_body(model, stats)).contains("pool"));
  stats.process_pool = {.blocks = 100, .free = 50, .bytes = 6400, .block_bytes = 64};
  stats.instances[0].kv = {};
  stats.instances[0].kv.capacity = 80, stats.instances[0].kv.free = 50, stats.instances[0].kv.active = 30;
  const json body = parsed(stats_body(model, stats)), blocks = body["instances"][0]["blocks"];
  CHECK_SAME(body["pool"], parsed(R"({"blocks":100,"free":50})"));
  CHECK((blocks["capacity"] == 100 && blocks["free"] == 0 && blocks["active"] == 30));
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
  TestServer server([](ServerOptions& o) { o.api_keys = {"secret", "another"}; });
  std::set<std::string> open;
  for (const auto& route : Api::routes()) {
    const bool posts = std::string(route.methods).find("POST") != std::string::npos;
    const auto status = [&](const std::string& key) {
      const std::string header = key.empty() ? "" : "Authorization: " + key + "\r\n";
      return (posts ? server.post(route.path, "{}", header) : server.get(route.path, header)).status;
    };
    INFO(route.path);
    for (const char* wrong :
         {"", "Bearer secreT", "Bearer secre", "Bearer secrets", "Bearer ", "Basic secret", "secret"})
      CHECK((status(wrong) == 401) == !route.open);
    for (const char* good : {"Bearer secret", "bearer secret", "BEARER another"}) CHECK(status(good) != 401);
    if (route.open) open.insert(route.path);
  }
  CHECK(open == std::set<std::string>{"/", "/health", "/health/ready", "/ping", "/ready"});
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

TEST_CASE("api: only pages of a listed origin may read answers", "[server][access]") {
  const std::string listed = "Origin: https://app.example.com\r\n", other = "Origin: https://evil.example\r\n";
  const std::string key = "Authorization: Bearer secret\r\n",
                    allows = "Access-Control-Allow-Origin: https://app.example.com";
  const auto preflight = [](const std::string& origin) {
    return raw("OPTIONS /v1/completions", origin +
                                              "Access-Control-Request-Method: POST\r\n"
                                              "Access-Control-Request-Headers: authorization, content-type\r\n");
  };
  TestServer none;
  check(none, {{preflight(listed), 403}, {ask("", listed), 403}});
  for (const std::string allowed : {"https://app.example.com", "HTTPS://App.Example.com", "*"}) {
    INFO(allowed);
    TestServer server([&](ServerOptions& o) {
      o.allowed_origins = {"https://first.example", allowed};
      o.api_keys = {"secret"};
    });
    // A browser sends no key with a preflight. The page may then read why it is refused, also that a key is missing.
    check(server,
          {{preflight(listed), 200,
            allows + "|Access-Control-Allow-Methods: GET, POST\r\n|Access-Control-Allow-Headers: authorization, "
                     "content-type\r\n|Vary: Origin\r\n"},
           {ask(R"("max_tokens":2)", listed + key), 200, allows},
           {ask(R"("max_tokens":2,"stream":true)", listed + key), 200, allows},
           {post("/v1/completions", "{}", listed + key), 400, allows},
           {ask(R"("max_tokens":2)", listed), 401, allows},
           {ask(R"("max_tokens":2)", key), 200, "!Access-Control-Allow-Origin"}});
    CHECK(server.get("/v1/completions", listed).status >= 400);
    if (allowed != "*")
      check(server, {{ask("", other + key), 403, "!Access-Control-Allow-Origin"},
                     {preflight(other), 401, "!Access-Control-Allow-Origin"}});
  }
}

TEST_CASE("issue: a form of another site cannot retire an instance, and --allowed-hosts ignores case",
          "[server][access]") {
  std::atomic<int> retired{0}, resets{0};
  TestServer server([&](ServerOptions& o) {
    o.dev_endpoints = true;
    o.allowed_hosts = {"LocalHost"};
    o.server_info = "--port 1";
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
                 {get("/server_info"), 200, R"("options":"--port 1")"},
                 {post("/reset_prefix_cache", ""), 200}});
  CHECK((retired == 1 && resets == 1));
}

TEST_CASE("issue: a foreign host name that points at loopback is refused", "[server][access]") {
  TestServer server([](ServerOptions& o) {
    o.allowed_hosts = {"llm.example"};
    o.dev_endpoints = true;
    o.server_info = "x";
  });
  const auto of = [](const std::string& host, const std::string& path = "/health") {
    return "GET " + path + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n";
  };
  for (const auto& route : Api::routes())
    check(server, {{of("evil.example", route.path), 403}, {of("evil.example:8000", route.path), 403}});
  for (const char* host : {"localhost.evil.example", "127.0.0.1.evil.example", "llm.example.evil"})
    check(server, {{of(host), 403}});
  for (const char* host : {"127.0.0.1", "127.0.0.1:8000", "localhost", "LocalHost:80", "[::1]:80", "10.1.2.3",
                           "llm.example", "LLM.example:443"})
    check(server, {{of(host), 200}});
}

TEST_CASE("access: keys come from a private file, and a key that no header can carry is refused", "[server][access]") {
  TempDir dir;
  const std::string path = dir.path + "/keys";
  const auto write = [&](const std::string& text, mode_t mode) {
    std::ofstream(path) << text;
    chmod(path.c_str(), mode);
    return read_api_keys(path);
  };
  CHECK(write("# people\nabc\n\n  \nd-e_f\r\n", 0600).value() == std::vector<std::string>{"abc", "d-e_f"});
  CHECK(write("abc\n", 0440));  // as Kubernetes mounts a secret for a group
  for (mode_t mode : {0660, 0604, 0644}) {
    const auto keys = write("abc\n", mode);
    REQUIRE_FALSE(keys);
    CHECK(keys.error().message.find("expected mode 0600 or 0640") != std::string::npos);
  }
  for (const char* bad : {"", "# none\n", "two words\n", "\x01\n"}) CHECK_FALSE(write(bad, 0600));
  CHECK_FALSE(read_api_keys(dir.path + "/missing"));
  CHECK(is_api_key("sk-1234"));
  for (const char* bad : {"a\nb", "a b", "\xc3\xbc"}) CHECK(!is_api_key(bad));
}

TEST_CASE("access: listening beyond loopback requires a key or --insecure", "[server][access]") {
  FakeService service;
  RealClock clock;
  ServerOptions options;
  options.host = "0.0.0.0", options.port = 0, options.max_model_len = 16;
  const auto listen = [&] { return HttpServer::listen(options, service, nullptr, nullptr, clock); };
  REQUIRE_FALSE(listen());
  CHECK(listen().error().message.find("--insecure") != std::string::npos);
  options.api_keys = {"k"};
  CHECK(listen());
  options.api_keys = {}, options.insecure = true;
  CHECK(listen());
}

}  // namespace xpyd::testing::exchanges_test
