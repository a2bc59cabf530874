// The endpoints' whole answers as clients see them, over real sockets.
#include "server/api.h"

#include <set>

#include "tests/server/api_fixture.h"

namespace xpyd::testing::api_test {

// ---- whole answers
// --------------------------------------------------------------------------------

TEST_CASE("api: a completion has OpenAI's fields", "[server][api]") {
  TestServer server;
  Reply reply = server.post("/v1/completions", R"({"model":"tiny","prompt":"abc","max_tokens":7})");
  REQUIRE(reply.status == 200);
  CHECK(reply.header("content-type") == "application/json");
  json body = parsed(reply.body);
  CHECK(body["id"].get<std::string>().starts_with("cmpl-"));
  CHECK_SAME(reply.header("x-request-id"), body["id"]);
  CHECK_SAME(body["object"], "text_completion");
  CHECK(body["created"].get<int64_t>() > 1700000000);
  CHECK_SAME(body["model"], "tiny");
  CHECK_SAME(body["choices"], parsed(R"([{"index":0,"text":"hello h","logprobs":null,
                                            "finish_reason":"length","stop_reason":null}])"));
  CHECK_SAME(body["usage"], parsed(R"({"prompt_tokens":3,"completion_tokens":7,"total_tokens":10,
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
  CHECK_SAME(body["object"], "chat.completion");
  CHECK_SAME(body["choices"], parsed(R"([{"index":0,"message":{"role":"assistant","content":"hello"},
                            "logprobs":null,"finish_reason":"length","stop_reason":null}])"));
  Request seen = server.service.seen().at(0);
  CHECK(byte_tokenizer().decode(seen.prompt) == "system: be brief\nuser: hi!\nassistant: \nassistant: ");
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
  CHECK(max_tokens("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}]})") == 237);
  CHECK(max_tokens("/v1/completions", R"({"prompt":"a","max_tokens":0})") == -400);
  CHECK(max_tokens("/v1/chat/completions",
                   R"({"messages":[{"role":"user","content":"x"}],"max_completion_tokens":0})") == -400);
}

TEST_CASE("api: lists of prompts, token ids and n choices share one index", "[server][api]") {
  TestServer server;
  server.service.script = [](const Request& r, int c) {
    std::string text = std::string(1, static_cast<char>(r.prompt[0])) + std::to_string(c);
    return std::vector{FakeService::token('x', text, FinishReason::stop)};
  };
  for (std::string prompt : {R"(["a","b"])", R"([[97],[98]])"}) {
    json body = parsed(server.post("/v1/completions", R"({"prompt":)" + prompt + R"(,"n":3})").body);
    REQUIRE(body["choices"].size() == 6);
    std::string texts;
    for (int i = 0; i < 6; ++i) {
      CHECK_SAME(body["choices"][i]["index"], i);
      texts += body["choices"][i]["text"].get<std::string>() + " ";
    }
    CHECK(texts == "a0 a1 a2 b0 b1 b2 ");
    CHECK_SAME(body["usage"]["prompt_tokens"], 2);
    CHECK_SAME(body["usage"]["completion_tokens"], 6);
  }
  json one = parsed(server.post("/v1/completions", R"({"prompt":[104,105]})").body);
  CHECK_SAME(one["choices"][0]["text"], "h0");
  std::set<int> indices;
  for (const json& chunk : chunks(server.post("/v1/completions", R"({"prompt":["a","b"],"n":3,"stream":true})")))
    indices.insert(chunk["choices"][0]["index"].get<int>());
  CHECK(indices == std::set<int>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("api: every sampling field reaches the request", "[server][api]") {
  TestServer server;
  Reply reply = server.post("/v1/completions", R"({"prompt":"abc","max_tokens":20,"temperature":0.5,
    "top_k":7,"top_p":0.25,"min_p":0.125,"repetition_penalty":1.5,"presence_penalty":-2,
    "frequency_penalty":2,"seed":-3,"stop":["x","yz"],"stop_token_ids":[256,1],"ignore_eos":true,
    "min_tokens":4,"n":2,"best_of":2,"priority":-9,"include_stop_str_in_output":true,
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
  json echo = parsed(server.post("/v1/completions", R"({"prompt":["é: ","b"],"max_tokens":2,"echo":true})").body);
  CHECK_SAME(echo["choices"][0]["text"], "é: he");
  CHECK_SAME(echo["choices"][1]["text"], "bhe");
  json ids = parsed(server.post("/v1/completions", R"({"prompt":[97,98],"max_tokens":2,"echo":true})").body);
  CHECK_SAME(ids["choices"][0]["text"], "abhe");
  auto echoed = chunks(server.post("/v1/completions", R"({"prompt":"ab","max_tokens":2,"echo":true,"stream":true})"));
  CHECK_SAME(echoed[0]["choices"][0]["text"], "abh");
  CHECK_SAME(echoed[1]["choices"][0]["text"], "e");

  json with_ids = parsed(
      server.post("/v1/completions", R"({"prompt":"ab","max_tokens":2,"return_token_ids":true})").body);
  CHECK_SAME(with_ids["choices"][0]["token_ids"], parsed("[104,101]"));
  CHECK_SAME(with_ids["choices"][0]["prompt_token_ids"], parsed("[97,98]"));
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
    CHECK_SAME(choice["finish_reason"], cases[which].finish);
    CHECK_SAME(choice["stop_reason"], cases[which].reason);
    auto events = chunks(server.post("/v1/completions", R"({"prompt":"a","stream":true})"));
    REQUIRE(events.size() == 2);
    CHECK_SAME(events[0]["choices"][0]["finish_reason"], nullptr);
    CHECK_SAME(events[1]["choices"][0]["finish_reason"], cases[which].finish);
    CHECK_SAME(events[1]["choices"][0]["stop_reason"], cases[which].reason);
  }
}

TEST_CASE("api: logprobs in both formats", "[server][api]") {
  TestServer server;
  json completion = parsed(server.post("/v1/completions", R"({"prompt":"a","max_tokens":2,"logprobs":2})").body);
  json logprobs = completion["choices"][0]["logprobs"];
  CHECK_SAME(logprobs["tokens"], parsed(R"(["h","e"])"));
  CHECK_SAME(logprobs["token_logprobs"], parsed("[-0.25,-0.25]"));
  CHECK_SAME(logprobs["top_logprobs"][0], parsed(R"({"h":-0.25,"bytes:\\xc1":-1.25})"));
  CHECK_SAME(logprobs["text_offset"], parsed("[0,1]"));
  json none = parsed(server.post("/v1/completions", R"({"prompt":"a","max_tokens":1,"logprobs":0})").body);
  CHECK_SAME(none["choices"][0]["logprobs"]["top_logprobs"][0], parsed(R"({"h":-0.25})"));

  std::string messages = R"({"messages":[{"role":"user","content":"x"}],"max_tokens":2,"logprobs":true)";
  json chat = parsed(server.post("/v1/chat/completions", messages + R"(,"top_logprobs":2})").body);
  CHECK_SAME(chat["choices"][0]["logprobs"]["content"][0], parsed(R"({"token":"h","logprob":-0.25,
      "bytes":[104],"top_logprobs":[{"token":"h","logprob":-0.25,"bytes":[104]},
      {"token":"bytes:\\xc1","logprob":-1.25,"bytes":[193]}]})"));
  json plain = parsed(server.post("/v1/chat/completions", messages + "}").body);
  CHECK_SAME(plain["choices"][0]["logprobs"]["content"][1]["top_logprobs"], json::array());

  auto events = chunks(server.post("/v1/completions", R"({"prompt":"a","max_tokens":3,"logprobs":1,"stream":true})"));
  CHECK_SAME(events[2]["choices"][0]["logprobs"], parsed(R"({"tokens":["l"],
      "token_logprobs":[-0.25],"top_logprobs":[{"l":-0.25}],"text_offset":[2]})"));
}

}  // namespace xpyd::testing::api_test
