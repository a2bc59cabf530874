// The endpoints as clients see them, over real sockets.
#include "server/api.h"

#include <nlohmann/json.hpp>
#include <set>

#include "tests/catch.h"
#include "tests/server/server_fixture.h"

using namespace xpyd;
using namespace xpyd::testing;
using nlohmann::json;

namespace {

json parsed(const std::string& text) {
  json out = json::parse(text, nullptr, false);
  INFO(text);
  REQUIRE_FALSE(out.is_discarded());
  return out;
}

// Events of a stream without the closing [DONE], which must be there.
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

void check_error(const Reply& reply, int status, const std::string& type, const json& param,
                 const json& code) {
  INFO(reply.body);
  CHECK(reply.status == status);
  json error = parsed(reply.body)["error"];
  CHECK(error["message"].is_string());
  CHECK_FALSE(error["message"] == "");
  CHECK(error["type"] == type);
  CHECK(error["param"] == param);
  CHECK(error["code"] == code);
  CHECK(error.size() == 4);
}

}  // namespace

// ---- whole answers
// --------------------------------------------------------------------------------

TEST_CASE("api: a completion has OpenAI's fields", "[server][api]") {
  TestServer server;
  Reply reply = server.post("/v1/completions", R"({"model":"tiny","prompt":"abc","max_tokens":7})");
  REQUIRE(reply.status == 200);
  CHECK(reply.header("content-type") == "application/json");
  json body = parsed(reply.body);
  CHECK(body["id"].get<std::string>().starts_with("cmpl-"));
  CHECK(reply.header("x-request-id") == body["id"]);
  CHECK(body["object"] == "text_completion");
  CHECK(body["created"].get<int64_t>() > 1700000000);
  CHECK(body["model"] == "tiny");
  CHECK(body["choices"] == json::parse(R"([{"index":0,"text":"hello h","logprobs":null,
                                            "finish_reason":"length","stop_reason":null}])"));
  CHECK(body["usage"] == json::parse(R"({"prompt_tokens":3,"completion_tokens":7,"total_tokens":10,
                                         "prompt_tokens_details":{"cached_tokens":0}})"));
  std::vector<Request> seen = server.service.seen();
  REQUIRE(seen.size() == 1);
  CHECK(seen[0].prompt == std::vector<int32_t>{'a', 'b', 'c'});
  CHECK(seen[0].prompt_is_text_prefix);
  CHECK(seen[0].deadline_s > seen[0].arrival_s);
}

TEST_CASE("api: a chat completion has OpenAI's fields", "[server][api]") {
  TestServer server;
  Reply reply = server.post("/v1/chat/completions", R"({"model":"tiny","messages":[
      {"role":"developer","content":"be brief"},
      {"role":"user","content":[{"type":"text","text":"hi"},{"type":"text","text":"!"}]},
      {"role":"assistant","content":null}],"max_tokens":9,"max_completion_tokens":5})");
  REQUIRE(reply.status == 200);
  json body = parsed(reply.body);
  CHECK(body["id"].get<std::string>().starts_with("chatcmpl-"));
  CHECK(body["object"] == "chat.completion");
  CHECK(body["choices"] ==
        json::parse(R"([{"index":0,"message":{"role":"assistant","content":"hello"},
                            "logprobs":null,"finish_reason":"length","stop_reason":null}])"));
  Request seen = server.service.seen().at(0);
  CHECK(byte_tokenizer().decode(seen.prompt) ==
        "developer: be brief\nuser: hi!\nassistant: \nassistant: ");
  CHECK(seen.max_tokens == 5);  // max_completion_tokens wins
  CHECK_FALSE(seen.prompt_is_text_prefix);
}

TEST_CASE("api: max_tokens by default, and within the context", "[server][api]") {
  TestServer server;  // max_model_len 256
  auto max_tokens = [&](const std::string& path, const std::string& body) {
    size_t before = server.service.seen().size();
    Reply reply = server.post(path, body);
    INFO(reply.body);
    if (reply.status != 200) return -reply.status;
    return server.service.seen().at(before).max_tokens;
  };
  std::string p250(250, 'x'), p255(255, 'x'), p256(256, 'x');
  CHECK(max_tokens("/v1/completions", R"({"prompt":"a"})") == 16);
  CHECK(max_tokens("/v1/completions", R"({"prompt":"a","max_tokens":null})") == 16);
  CHECK(max_tokens("/v1/completions", R"({"prompt":")" + p250 + "\"}") == 6);
  CHECK(max_tokens("/v1/completions", R"({"prompt":")" + p250 + R"(","max_tokens":6})") == 6);
  CHECK(max_tokens("/v1/completions", R"({"prompt":")" + p250 + R"(","max_tokens":7})") == -400);
  CHECK(max_tokens("/v1/completions", R"({"prompt":")" + p255 + "\"}") == 1);
  CHECK(max_tokens("/v1/completions", R"({"prompt":")" + p256 + "\"}") == -400);
  // "user: x\nassistant: " is 20 tokens.
  CHECK(max_tokens("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}]})") ==
        237);
  CHECK(max_tokens("/v1/completions", R"({"prompt":"a","max_tokens":0})") == -400);
  CHECK(max_tokens("/v1/chat/completions",
                   R"({"messages":[{"role":"user","content":"x"}],"max_completion_tokens":0})") ==
        -400);
}

TEST_CASE("api: lists of prompts, token ids and n choices share one index", "[server][api]") {
  TestServer server;
  server.service.script = [](const Request& r, int c) {
    std::string text = std::string(1, static_cast<char>(r.prompt[0])) + std::to_string(c);
    return std::vector{FakeService::token('x', text, FinishReason::stop)};
  };
  for (std::string prompt : {R"(["a","b"])", R"([[97],[98]])"}) {
    json body =
        parsed(server.post("/v1/completions", R"({"prompt":)" + prompt + R"(,"n":3})").body);
    REQUIRE(body["choices"].size() == 6);
    std::string texts;
    for (int i = 0; i < 6; ++i) {
      CHECK(body["choices"][i]["index"] == i);
      texts += body["choices"][i]["text"].get<std::string>() + " ";
    }
    CHECK(texts == "a0 a1 a2 b0 b1 b2 ");
    CHECK(body["usage"]["prompt_tokens"] == 2);
    CHECK(body["usage"]["completion_tokens"] == 6);
  }
  json one = parsed(server.post("/v1/completions", R"({"prompt":[104,105]})").body);
  CHECK(one["choices"][0]["text"] == "h0");
  std::set<int> indices;
  for (const json& chunk :
       chunks(server.post("/v1/completions", R"({"prompt":["a","b"],"n":3,"stream":true})")))
    indices.insert(chunk["choices"][0]["index"].get<int>());
  CHECK(indices == std::set<int>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("api: every sampling field reaches the request", "[server][api]") {
  TestServer server;
  Reply reply = server.post("/v1/completions", R"({"prompt":"abc","max_tokens":20,"temperature":0.5,
    "top_k":7,"top_p":0.25,"min_p":0.125,"repetition_penalty":1.5,"presence_penalty":-2,
    "frequency_penalty":2,"seed":-3,"stop":["x","yz"],"stop_token_ids":[256,1],"ignore_eos":true,
    "min_tokens":4,"n":2,"best_of":2,"priority":-9,"session_id":"s","include_stop_str_in_output":true,
    "skip_special_tokens":false,"logprobs":3,"cache_salt":"pepper","user":"u","request_id":"r",
    "suffix":"","logit_bias":{},"response_format":{"type":"text"},"use_beam_search":false})");
  REQUIRE(reply.status == 200);
  Request r = server.service.seen().at(0);
  CHECK(r.sampling.temperature == 0.5f);
  CHECK(r.sampling.top_k == 7);
  CHECK(r.sampling.top_p == 0.25f);
  CHECK(r.sampling.min_p == 0.125f);
  CHECK(r.sampling.repetition_penalty == 1.5f);
  CHECK(r.sampling.presence_penalty == -2);
  CHECK(r.sampling.frequency_penalty == 2);
  CHECK(r.sampling.seed == static_cast<uint64_t>(-3));
  CHECK(r.sampling.top_logprobs == 3);
  CHECK(r.stop == std::vector<std::string>{"x", "yz"});
  CHECK(r.stop_token_ids == std::vector<int32_t>{256, 1});
  CHECK(r.ignore_eos);
  CHECK(r.min_tokens == 4);
  CHECK(r.n == 2);
  CHECK(r.priority == -9);
  CHECK(r.session_id == "s");
  CHECK(r.include_stop_text);
  CHECK_FALSE(r.skip_special_tokens);
  CHECK(r.cache_salt != 0);
  // Defaults; null is the default too.
  server.post("/v1/completions", R"({"prompt":"a","top_k":-1,"stop":null,"seed":null,"n":null,
    "temperature":null,"stream":null,"logprobs":null,"cache_salt":null})");
  Request d = server.service.seen().at(1);
  CHECK(d.sampling.temperature == 1);
  CHECK(d.sampling.top_k == 0);
  CHECK(d.sampling.top_logprobs == -1);
  CHECK(d.stop.empty());
  CHECK(d.cache_salt == 0);
  CHECK_FALSE(d.ignore_eos);
}

TEST_CASE("api: salts and seeds", "[server][api]") {
  TestServer server;
  for (std::string salt : {"a", "a", "b"})
    server.post("/v1/completions", R"({"prompt":"a","cache_salt":")" + salt + "\"}");
  auto seen = server.service.seen();
  CHECK(seen[0].cache_salt == seen[1].cache_salt);
  CHECK(seen[0].cache_salt != seen[2].cache_salt);
  CHECK(seen[0].sampling.seed != seen[1].sampling.seed);  // requests without a seed differ
  CHECK(seen[0].id != seen[1].id);
}

TEST_CASE("siphash agrees with its authors' test vectors", "[server][api]") {
  SipKey key{0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
  std::string text;
  for (int i = 0; i < 15; ++i) text += static_cast<char>(i);
  CHECK(siphash(key, "") == 0x726fdb47dd0e0e31u);
  CHECK(siphash(key, text) == 0xa129ca6149be45e5u);
}

TEST_CASE("api: echo, finish and stop reasons, token ids", "[server][api]") {
  TestServer server;
  json echo = parsed(
      server.post("/v1/completions", R"({"prompt":["é: ","b"],"max_tokens":2,"echo":true})").body);
  CHECK(echo["choices"][0]["text"] == "é: he");
  CHECK(echo["choices"][1]["text"] == "bhe");
  json ids = parsed(
      server.post("/v1/completions", R"({"prompt":[97,98],"max_tokens":2,"echo":true})").body);
  CHECK(ids["choices"][0]["text"] == "abhe");
  auto echoed = chunks(server.post("/v1/completions",
                                   R"({"prompt":"ab","max_tokens":2,"echo":true,"stream":true})"));
  CHECK(echoed[0]["choices"][0]["text"] == "abh");
  CHECK(echoed[1]["choices"][0]["text"] == "e");

  json with_ids = parsed(
      server.post("/v1/completions", R"({"prompt":"ab","max_tokens":2,"return_token_ids":true})")
          .body);
  CHECK(with_ids["choices"][0]["token_ids"] == json::parse("[104,101]"));
  CHECK(with_ids["choices"][0]["prompt_token_ids"] == json::parse("[97,98]"));
}

TEST_CASE("api: how a choice ended", "[server][api]") {
  TestServer server;
  struct {
    TokenEvent last;
    json finish, reason;
  } cases[] = {
      {FakeService::token('x', "x", FinishReason::length), "length", nullptr},
      {FakeService::token(256, "", FinishReason::stop), "stop", nullptr},  // EOS
      {FakeService::token('x', "", FinishReason::stop), "stop", "end"},
      {FakeService::token('x', "", FinishReason::stop), "stop", 120},
      {FakeService::token(-1, "", FinishReason::abort), "abort", nullptr},
  };
  cases[2].last.stop_text = "end";
  cases[3].last.stop_token = 120;
  size_t which = 0;
  server.service.script = [&](const Request&, int) {
    return std::vector{FakeService::token('a', "a"), cases[which].last};
  };
  for (which = 0; which < std::size(cases); ++which) {
    json choice = parsed(server.post("/v1/completions", R"({"prompt":"a"})").body)["choices"][0];
    CHECK(choice["finish_reason"] == cases[which].finish);
    CHECK(choice["stop_reason"] == cases[which].reason);
    auto events = chunks(server.post("/v1/completions", R"({"prompt":"a","stream":true})"));
    REQUIRE(events.size() == 2);
    CHECK(events[0]["choices"][0]["finish_reason"] == nullptr);
    CHECK(events[1]["choices"][0]["finish_reason"] == cases[which].finish);
    CHECK(events[1]["choices"][0]["stop_reason"] == cases[which].reason);
  }
}

TEST_CASE("api: logprobs in both formats", "[server][api]") {
  TestServer server;
  json completion =
      parsed(server.post("/v1/completions", R"({"prompt":"a","max_tokens":2,"logprobs":2})").body);
  json logprobs = completion["choices"][0]["logprobs"];
  CHECK(logprobs["tokens"] == json::parse(R"(["h","e"])"));
  CHECK(logprobs["token_logprobs"] == json::parse("[-0.25,-0.25]"));
  CHECK(logprobs["top_logprobs"][0] == json::parse(R"({"h":-0.25,"bytes:\\xc1":-1.25})"));
  CHECK(logprobs["text_offset"] == json::parse("[0,1]"));
  json none =
      parsed(server.post("/v1/completions", R"({"prompt":"a","max_tokens":1,"logprobs":0})").body);
  CHECK(none["choices"][0]["logprobs"]["top_logprobs"][0] == json::parse(R"({"h":-0.25})"));

  std::string messages =
      R"({"messages":[{"role":"user","content":"x"}],"max_tokens":2,"logprobs":true)";
  json chat = parsed(server.post("/v1/chat/completions", messages + R"(,"top_logprobs":2})").body);
  CHECK(chat["choices"][0]["logprobs"]["content"][0] == json::parse(R"({"token":"h","logprob":-0.25,
      "bytes":[104],"top_logprobs":[{"token":"h","logprob":-0.25,"bytes":[104]},
      {"token":"bytes:\\xc1","logprob":-1.25,"bytes":[193]}]})"));
  json plain = parsed(server.post("/v1/chat/completions", messages + "}").body);
  CHECK(plain["choices"][0]["logprobs"]["content"][1]["top_logprobs"] == json::array());

  auto events = chunks(server.post("/v1/completions",
                                   R"({"prompt":"a","max_tokens":3,"logprobs":1,"stream":true})"));
  CHECK(events[2]["choices"][0]["logprobs"] == json::parse(R"({"tokens":["l"],
      "token_logprobs":[-0.25],"top_logprobs":[{"l":-0.25}],"text_offset":[2]})"));
}

// ---- streams
// --------------------------------------------------------------------------------------

TEST_CASE("api: a completion stream has one event per token", "[server][api]") {
  TestServer server;
  Reply reply = server.post("/v1/completions", R"({"prompt":"a","max_tokens":5,"stream":true})");
  auto events = chunks(reply);
  REQUIRE(events.size() == 5);  // no usage chunk unless asked
  std::string text;
  for (const json& event : events) {
    CHECK(event["object"] == "text_completion");
    CHECK(event["id"] == events[0]["id"]);
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
      "/v1/chat/completions",
      R"({"messages":[{"role":"user","content":"x"}],"max_tokens":3,"n":2,"stream":true})"));
  REQUIRE(events.size() == 6);
  std::string text[2];
  for (const json& event : events) {
    CHECK(event["object"] == "chat.completion.chunk");
    const json& choice = event["choices"][0];
    REQUIRE(choice.contains("delta"));
    auto& so_far = text[choice["index"].get<int>()];
    CHECK(choice["delta"].contains("role") == so_far.empty());
    so_far += choice["delta"]["content"].get<std::string>();
  }
  CHECK(text[0] == "hel");
  CHECK(text[1] == "hel");
}

TEST_CASE("api: nothing is sent before the first token", "[server][api]") {
  TestServer server;
  server.service.hold(true);
  Client client(server.port());
  client.send(request_text("POST", "/v1/chat/completions",
                           R"({"messages":[{"role":"user","content":"x"}],"stream":true})"));
  REQUIRE(server.service.wait([](auto& s) { return s.in_flight() == 1; }));
  // The server has worked on since, without a byte for this client.
  CHECK(server.get("/health").status == 200);
  CHECK(client.quiet());
  server.service.hold(false);
  CHECK(client.read_some().find("\"role\":\"assistant\",\"content\":\"h\"") != std::string::npos);
}

TEST_CASE("api: usage in streams, when asked for", "[server][api]") {
  TestServer server;
  std::string start = R"({"prompt":["ab","c"],"max_tokens":2,"stream":true,"stream_options":)";
  auto events = chunks(server.post("/v1/completions", start + R"({"include_usage":true}})"));
  REQUIRE(events.size() == 5);
  for (int i = 0; i < 4; ++i) CHECK(events[i]["usage"] == nullptr);
  CHECK(events[0].contains("usage"));
  CHECK(events[4]["choices"] == json::array());
  CHECK(events[4]["usage"]["prompt_tokens"] == 3);
  CHECK(events[4]["usage"]["completion_tokens"] == 4);
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
  CHECK(events[0]["choices"][0]["text"] == "a\nb\r\n\x01\"\\");
  CHECK(events[1]["choices"][0]["text"] == "\xe2\x82\xac \xf0\x9f\x98\x80");
  CHECK(events[2]["choices"][0]["text"] == "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
}

// ---- failures
// -------------------------------------------------------------------------------------

TEST_CASE("api: routes, methods and types", "[server][api]") {
  TestServer server;
  check_error(server.get("/nothing"), 404, "not_found_error", nullptr, nullptr);
  check_error(server.get("/%2e%2e/etc/passwd"), 404, "not_found_error", nullptr, nullptr);
  check_error(server.get("/server_info"), 404, "not_found_error", nullptr, nullptr);
  check_error(server.get("/v1/models/other"), 404, "not_found_error", "model", "model_not_found");
  check_error(server.post("/v1/completions", R"({"model":"gpt","prompt":"a"})"), 404,
              "not_found_error", "model", "model_not_found");
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
  TestServer server([](ServerOptions& o) { o.api_key = "secret"; });
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
    for (const char* wrong :
         {"Bearer secreT", "Bearer secre", "Bearer secrets", "Bearer ", "Basic secret", "secret"})
      CHECK((ask("Authorization: " + std::string(wrong) + "\r\n") == 401) == !route.open);
    CHECK(ask("Authorization: Bearer secret\r\n") != 401);
    if (route.open) open.insert(path);
  }
  CHECK(open == std::set<std::string>{"/", "/health", "/health/ready", "/ping", "/ready"});
  check_error(server.get("/v1/models"), 401, "authentication_error", nullptr, "invalid_api_key");
}

TEST_CASE("api: every integer field at its edges", "[server][api]") {
  TestServer server;
  auto status = [&](bool chat, const std::string& field, const std::string& value) {
    std::string body = chat ? R"({"messages":[{"role":"user","content":"x"}])" : R"({"prompt":"a")";
    if (field == "top_logprobs") body += R"(,"logprobs":true)";
    if (field == "best_of") body += R"(,"n":)" + value;  // they must agree
    body += ",\"" + field + "\":" + value + "}";
    Reply reply = server.post(chat ? "/v1/chat/completions" : "/v1/completions", body);
    if (reply.status != 200) {
      INFO(body << reply.body);
      CHECK(reply.status == 400);
      // max_tokens over the context is refused as such; everything else names the field.
      json param = parsed(reply.body)["error"]["param"];
      CHECK((param == field || (field == "best_of" && param == "n")));
    }
    return reply.status == 200;
  };
  auto text = [](__int128 v) {
    bool negative = v < 0;
    unsigned __int128 rest = negative ? -static_cast<unsigned __int128>(v) : v;
    std::string digits;
    do digits.insert(digits.begin(), static_cast<char>('0' + static_cast<int>(rest % 10)));
    while (rest /= 10);
    return (negative ? "-" : "") + digits;
  };
  for (const IntegerField& field : integer_fields())
    for (bool chat : {false, true}) {
      if (chat ? !field.chat : !field.completions) continue;
      std::string name = field.name;
      __int128 max = field.max;
      if (name.starts_with("max_")) max = chat ? 237 : 255;  // the context's rest
      if (name == "min_tokens") max = chat ? 237 : 16;       // max_tokens by default
      for (__int128 value : {__int128{field.min} - 1, __int128{field.min}, max, max + 1,
                             __int128{-1}, __int128{1} << 31, __int128{1} << 63}) {
        INFO((chat ? "chat " : "completions ") << name << " = " << text(value));
        CHECK(status(chat, name, text(value)) == (value >= field.min && value <= max));
      }
      for (const char* wrong : {"\"1\"", "1.5", "1.0", "1e300", "true", "[]", "{}"}) {
        INFO(name << " = " << wrong);
        CHECK_FALSE(status(chat, name, wrong));
      }
    }
}

TEST_CASE("api: values that are refused, and what is named", "[server][api]") {
  TestServer server;
  std::string many_stops = "[";
  for (int i = 0; i < 17; ++i) many_stops += std::string(i ? "," : "") + "\"x\"";
  many_stops += "]";
  struct {
    std::string field, value;
  } const cases[] = {
      {"temperature", "-1"},
      {"temperature", "101"},
      {"temperature", "\"1\""},
      {"top_p", "0"},
      {"top_p", "1.01"},
      {"top_p", "-0.5"},
      {"min_p", "2"},
      {"repetition_penalty", "0"},
      {"repetition_penalty", "-1"},
      {"presence_penalty", "2.5"},
      {"frequency_penalty", "-2.5"},
      {"stop", "\"\""},
      {"stop", "[\"\"]"},
      {"stop", "[1]"},
      {"stop", "1"},
      {"stop", many_stops},
      {"stop", "\"" + std::string(257, 'x') + "\""},
      {"stop_token_ids", "1"},
      {"stop_token_ids", "[-1]"},
      {"stop_token_ids", "[257]"},
      {"stop_token_ids", "[1.5]"},
      {"stop_token_ids", "[4294967296]"},
      {"stream", "1"},
      {"stream", "\"true\""},
      {"ignore_eos", "0"},
      {"echo", "[]"},
      {"stream_options", "{\"include_usage\":true}"},  // without stream
      {"cache_salt", "\"\""},
      {"cache_salt", "\"" + std::string(1025, 'x') + "\""},
      {"session_id", "\"" + std::string(257, 'x') + "\""},
      {"session_id", "5"},
      {"model", "5"},
      {"suffix", "\"x\""},
      {"logit_bias", "{\"5\":1}"},
      {"use_beam_search", "true"},
      {"prompt_embeds", "\"x\""},
      {"guided_json", "{}"},
      {"prompt_logprobs", "1"},
      {"response_format", "{\"type\":\"json_object\"}"},
      {"detokenize", "false"},
      {"best_of", "2"},
  };
  for (const auto& c : cases) {
    INFO(c.field << " = " << c.value);
    Reply reply =
        server.post("/v1/completions", R"({"prompt":"a",")" + c.field + "\":" + c.value + "}");
    check_error(reply, 400, "invalid_request_error", c.field, nullptr);
  }
  for (std::string prompt :
       {"null", "5", "{}", "[]", "[[]]", "[1,\"a\"]", "[\"a\",1]", "[[1],\"a\"]", "[-1]", "[257]",
        "[1.5]", "[9223372036854775808]", "[true]", "\"\"", "[[1,[2]]]"}) {
    INFO(prompt);
    check_error(server.post("/v1/completions", R"({"prompt":)" + prompt + "}"), 400,
                "invalid_request_error", "prompt", nullptr);
  }
  for (std::string messages : {"null", "[]", "{}", "[1]", R"([{"role":"user","content":5}])",
                               R"([{"content":"x"}])", R"([{"role":"wizard","content":"x"}])",
                               R"([{"role":"user","content":[{"type":"image_url"}]}])",
                               R"([{"role":"user","content":["x"]}])",
                               R"([{"role":"assistant","content":"","tool_calls":[{}]}])"}) {
    INFO(messages);
    check_error(server.post("/v1/chat/completions", R"({"messages":)" + messages + "}"), 400,
                "invalid_request_error", "messages", nullptr);
  }
  for (std::string extra :
       {R"("tools":[{}])", R"("tool_choice":"auto")", R"("chat_template":"{{ 1 }}")",
        R"("chat_template_kwargs":{"a":1})", R"("top_logprobs":2)",
        R"("continue_final_message":true)", R"("response_format":{"type":"json_schema"})"}) {
    INFO(extra);
    CHECK(server
              .post("/v1/chat/completions",
                    R"({"messages":[{"role":"user","content":"x"}],)" + extra + "}")
              .status == 400);
  }
  CHECK(server
            .post("/v1/chat/completions",
                  R"({"messages":[{"role":"user","content":"x"}],"tools":[],"tool_choice":"none"})")
            .status == 200);
  std::string prompts = "[\"a\"";
  for (int i = 1; i < kMaxChoicesPerCall; ++i) prompts += ",\"a\"";
  CHECK(server.post("/v1/completions", R"({"max_tokens":1,"prompt":)" + prompts + "]}").status ==
        200);
  CHECK(server.post("/v1/completions", R"({"prompt":)" + prompts + ",\"a\"]}").status == 400);
  CHECK(server.post("/v1/completions", R"({"n":2,"prompt":)" + prompts + "]}").status == 400);
  CHECK(server.post("/v1/completions", R"({"prompt":"a","echo":true,"logprobs":1})").status == 400);
}

TEST_CASE("api: JSON that is no JSON", "[server][api]") {
  TestServer server;
  std::string deep(100000, '['), deep_object;
  for (int i = 0; i < 1000; ++i) deep_object += "{\"a\":";
  struct {
    std::string what, body;
  } const cases[] = {
      {"empty", ""},
      {"cut off", R"({"prompt":"a)"},
      {"trailing comma", R"({"prompt":"a",})"},
      {"trailing text", R"({"prompt":"a"} x)"},
      {"comment", R"({"prompt":"a" /* b */})"},
      {"single quotes", "{'prompt':'a'}"},
      {"NaN", R"({"prompt":"a","temperature":NaN})"},
      {"deep arrays", deep},
      {"deep objects", deep_object},
      {"duplicate key", R"({"prompt":"a","prompt":"b"})"},
      {"invalid UTF-8", "{\"prompt\":\"\xff\"}"},
      {"overlong UTF-8", "{\"prompt\":\"\xc0\xaf\"}"},
      {"surrogate in UTF-8", "{\"prompt\":\"\xed\xa0\x80\"}"},
      {"lone high surrogate", R"({"prompt":"\ud800"})"},
      {"lone low surrogate", R"({"prompt":"\udc00 a"})"},
      {"raw control character", "{\"prompt\":\"a\nb\"}"},
      {"raw NUL", std::string("{\"prompt\":\"a\0\"}", 15)},
      {"number too large", R"({"prompt":"a","temperature":1e999})"},
  };
  for (const auto& c : cases) {
    INFO(c.what);
    Reply reply = server.post("/v1/completions", c.body);
    check_error(reply, 400, "invalid_request_error", nullptr, nullptr);
    CHECK(reply.body.size() < 1000);
  }
  // Escapes and astral characters are fine, as is a \u0000.
  CHECK(server.post("/v1/completions", R"({"prompt":"\ud83d\ude00 \u0000 \u00e9"})").status == 200);
  std::string huge = "[1";
  for (int i = 0; i < 1100000; ++i) huge += ",1";
  CHECK(server.post("/v1/completions", R"({"prompt":)" + huge + "]}").status == 400);
}

TEST_CASE("api: a prompt that cannot fit", "[server][api]") {
  TestServer server;
  for (size_t size : {size_t{256}, size_t{20000}, size_t{8} << 20}) {
    Reply reply = server.post("/v1/completions", R"({"prompt":")" + std::string(size, 'x') + "\"}");
    check_error(reply, 400, "invalid_request_error", "prompt", "context_length_exceeded");
    Reply chat = server.post("/v1/chat/completions", R"({"messages":[{"role":"user","content":")" +
                                                         std::string(size, 'x') + "\"}]}");
    check_error(chat, 400, "invalid_request_error", "messages", "context_length_exceeded");
  }
  Reply ids = server.post("/v1/completions", R"({"prompt":[1],"max_tokens":256})");
  check_error(ids, 400, "invalid_request_error", "max_tokens", "context_length_exceeded");
  CHECK(ids.reason.starts_with("Bad Request: This model's maximum context length is 256"));
  CHECK(server.service.seen().empty());
}

TEST_CASE("api: unknown fields are accepted and named in the log", "[server][api]") {
  TestServer server;
  CHECK(server
            .post("/v1/completions", R"({"prompt":"SECRETPROMPT","shiny":1,"new\nfield":2})",
                  "X-Request-Id: abc-1\r\n")
            .header("x-request-id") == "abc-1");
  // The line is written after the answer.
  REQUIRE(server.service.wait([&](auto&) { return server.log().size() == 1; }));
  std::string line = server.log()[0];
  INFO(line);
  CHECK(line.find("SECRET") == std::string::npos);
  CHECK(line.find(" ignored=new?field,shiny") != std::string::npos);
  CHECK(line.find(" client_id=abc-1") != std::string::npos);
  CHECK(line.find(" status=200 ") != std::string::npos);
  CHECK(line.find(" prompt_tokens=12 ") != std::string::npos);
  CHECK(line.find(" finish=length ") != std::string::npos);
  CHECK(line.find('\n') == std::string::npos);
  // An id that could forge a line or a header is not taken over.
  CHECK(server.post("/v1/completions", R"({"prompt":"a"})", "X-Request-Id: a b=c\r\n")
            .header("x-request-id")
            .starts_with("cmpl-"));
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
  check_error(server.post("/v1/completions", R"({"prompt":"c"})"), 400, "invalid_request_error",
              "prompt", nullptr);
  // The second of three is refused: the first is given back, the third never sent.
  server.service.hold(true);
  CHECK(server.post("/v1/completions", R"({"prompt":["a","b","a"]})").status == 503);
  CHECK(server.service.wait([](auto& s) { return s.in_flight() == 0; }));
  CHECK(server.service.aborted().size() == 1);
  CHECK(server.service.seen().size() == 1);
}

TEST_CASE("api: a failure before the first token is a status, after it an event", "[server][api]") {
  TestServer server;
  bool early = true;
  FinishReason how = FinishReason::error;
  server.service.script = [&](const Request&, int choice) {
    TokenEvent end = FakeService::token(-1, "", how);
    end.error = "transfer failed";
    if (choice == 1) return std::vector<TokenEvent>(100, FakeService::token('x', "x"));
    return early ? std::vector{end} : std::vector{FakeService::token('a', "a"), end};
  };
  for (std::string stream : {"true", "false"}) {
    Reply reply = server.post("/v1/completions", R"({"prompt":"a","stream":)" + stream + "}");
    check_error(reply, 500, "server_error", nullptr, "internal_error");
    CHECK(reply.header("x-should-retry") == "false");
  }
  how = FinishReason::timeout;
  check_error(server.post("/v1/completions", R"({"prompt":"a"})"), 504, "server_error", nullptr,
              "request_timeout");
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
  // The frontend's own limit comes five seconds after the deadline that the cluster should have
  // kept.
  TestServer server([](ServerOptions& o) { o.request_timeout_s = 0.1; });
  server.service.hold(true);
  check_error(server.post("/v1/completions", R"({"prompt":"a"})"), 504, "server_error", nullptr,
              "request_timeout");
  CHECK(server.service.aborted().size() == 1);
}

// ---- the small routes
// -----------------------------------------------------------------------------

TEST_CASE("api: models, version, health, ready, stats, page", "[server][api]") {
  TestServer server;
  json models = parsed(server.get("/v1/models").body);
  CHECK(models["object"] == "list");
  json card = models["data"][0];
  CHECK(card["id"] == "tiny");
  CHECK(card["root"] == "models/tiny");
  CHECK(card["max_model_len"] == 256);
  CHECK(card["object"] == "model");
  CHECK(parsed(server.get("/v1/models/tiny").body) == card);
  CHECK(parsed(server.get("/version").body)["version"] == "1.2.3");
  CHECK(parsed(server.get("/health").body)["status"] == "ok");
  CHECK(server.post("/ping", "").status == 200);
  CHECK(parsed(server.get("/ready").body)["status"] == "ready");
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

TEST_CASE("api: tokenize and detokenize", "[server][api]") {
  TestServer server;
  json body = parsed(server
                         .post("/tokenize", R"({"prompt":"h\u00e9","add_special_tokens":false,
                                                  "return_token_strs":true})")
                         .body);
  CHECK(body["tokens"] == json::parse("[104,195,169]"));
  CHECK(body["count"] == 3);
  CHECK(body["max_model_len"] == 256);
  CHECK(body["token_strs"][0] == "h");
  CHECK(parsed(server.post("/detokenize", R"({"tokens":[104,195,169]})").body)["prompt"] ==
        "h\u00e9");
  json chat =
      parsed(server.post("/tokenize", R"({"messages":[{"role":"user","content":"x"}]})").body);
  CHECK(chat["count"] == 19);
  std::string long_text(30000,
                        'x');  // tokenized off the I/O thread, and refused as too long to fit
  CHECK(server.post("/tokenize", R"({"prompt":")" + long_text + "\"}").status == 400);
  CHECK(server.post("/detokenize", R"({"tokens":[257]})").status == 400);
  CHECK(server.post("/detokenize", R"({"tokens":"x"})").status == 400);
  CHECK(server.post("/tokenize", R"({"prompt":5})").status == 400);
  std::string ids = "[104";
  for (int i = 0; i < 20000; ++i) ids += ",104";
  CHECK(parsed(server.post("/detokenize", R"({"tokens":)" + ids + "]}").body)["prompt"] ==
        std::string(20001, 'h'));
}

TEST_CASE("api: without a tokenizer, token ids are served and text is refused", "[server][api]") {
  TestServer server({}, false);
  CHECK(server.post("/v1/completions", R"({"prompt":[1,299],"logprobs":1})").status == 200);
  CHECK(server.post("/v1/completions", R"({"prompt":[300]})").status == 400);
  CHECK(server.post("/v1/completions", R"({"prompt":"a"})").status == 400);
  CHECK(server.post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}]})")
            .status == 400);
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
  CHECK(parsed(server.get("/server_info").body)["options"] == "--port 1");
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
  CHECK(resident() - before < 4e6);
  CHECK(server.service.in_flight() == 0);
}
