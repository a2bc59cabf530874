// Whole answers of the endpoints as clients see them over real sockets: event streams, and what happens when the
// cluster refuses or fails. exchanges_test.cc tests which requests are refused, and with which words.
#include "server/openai/api.h"

#include <set>

#include "tests/server/api_fixture.h"

namespace xpyd::testing::api_test {

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
                                            "finish_reason":"length"}])"));
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
                            "logprobs":null,"finish_reason":"length"}])"));
  Request seen = server.service.seen().at(0);
  CHECK(byte_tokenizer().decode(seen.prompt) == "system: be brief\nuser: hi!\nassistant: \nassistant: ");
  CHECK(seen.max_tokens == 5);  // it overrides max_tokens
  CHECK_FALSE(seen.prompt_is_text_prefix);
}

TEST_CASE("api: the choices of several prompts and of n share one index", "[server][api]") {
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
    "n":2,"priority":-9,"include_stop_str_in_output":true,
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
  CHECK(r.n == 2);
  CHECK(r.priority == -9);
  CHECK(r.include_stop_text);
  CHECK_FALSE(r.skip_special_tokens);
  CHECK(r.cache_salt != 0);
}

TEST_CASE("api: equal cache salts map to one value, and requests without a seed get different seeds", "[server][api]") {
  TestServer server;
  for (std::string salt : {"a", "a", "b"})
    server.post("/v1/completions", R"({"prompt":"a","cache_salt":")" + salt + "\"}");
  auto seen = server.service.seen();
  CHECK(seen[0].cache_salt == seen[1].cache_salt);
  CHECK(seen[0].cache_salt != seen[2].cache_salt);
  CHECK(seen[0].sampling.seed != seen[1].sampling.seed);
  CHECK(seen[0].id != seen[1].id);
}

TEST_CASE("siphash agrees with its authors' test vectors", "[server][api]") {
  SipKey key{0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
  std::string text;
  for (int i = 0; i < 15; ++i) text += static_cast<char>(i);
  CHECK(siphash(key, "") == 0x726fdb47dd0e0e31u);
  CHECK(siphash(key, text) == 0xa129ca6149be45e5u);
}

TEST_CASE("api: echo, token ids, usage and logprobs are the same in whole answers and in streams", "[server][api]") {
  TestServer server;
  const std::string usage = R"({"prompt":["ab","c"],"max_tokens":2,"stream":true,"stream_options":)";
  check_answers(
      server, "/v1/completions",
      {{R"({"prompt":["é: ","b"],"max_tokens":2,"echo":true})",
        {{"/choices/0/text", R"("é: he")"}, {"/choices/1/text", R"("bhe")"}}},
       {R"({"prompt":[97,98],"max_tokens":2,"echo":true})", {{"/choices/0/text", R"("abhe")"}}},
       {R"({"prompt":"ab","max_tokens":2,"echo":true,"stream":true})",
        {{"/0/choices/0/text", R"("abh")"}, {"/1/choices/0/text", R"("e")"}, {"/1/object", R"("text_completion")"}}},
       {R"({"prompt":"ab","max_tokens":2,"return_token_ids":true})",
        {{"/choices/0/token_ids", "[104,101]"}, {"/choices/0/prompt_token_ids", "[97,98]"}}},
       {R"({"prompt":"a","max_tokens":2,"logprobs":2})",
        {{"/choices/0/logprobs/tokens", R"(["h","e"])"},
         {"/choices/0/logprobs/token_logprobs", "[-0.25,-0.25]"},
         {"/choices/0/logprobs/top_logprobs/0", R"({"h":-0.25,"bytes:\\xc1":-1.25})"},
         {"/choices/0/logprobs/text_offset", "[0,1]"}}},
       {R"({"prompt":"a","max_tokens":1,"logprobs":0})", {{"/choices/0/logprobs/top_logprobs/0", R"({"h":-0.25})"}}},
       {R"({"prompt":"a","max_tokens":3,"logprobs":1,"stream":true})",
        {{"/2/choices/0/logprobs",
          R"({"tokens":["l"],"token_logprobs":[-0.25],"top_logprobs":[{"l":-0.25}],"text_offset":[2]})"}}},
       {usage + R"({"include_usage":true}})",
        {{"/0/usage", "null"},
         {"/3/usage", "null"},
         {"/4/choices", "[]"},
         {"/4/usage/prompt_tokens", "3"},
         {"/4/usage/completion_tokens", "4"}}}});
  const std::string messages = R"({"messages":[{"role":"user","content":"x"}],"max_tokens":2,"logprobs":true)";
  check_answers(server, "/v1/chat/completions",
                {{messages + R"(,"top_logprobs":2})",
                  {{"/choices/0/logprobs/content/0",
                    R"({"token":"h","logprob":-0.25,"bytes":[104],"top_logprobs":[{"token":"h","logprob":-0.25,
                        "bytes":[104]},{"token":"bytes:\\xc1","logprob":-1.25,"bytes":[193]}]})"}}},
                 {messages + "}", {{"/choices/0/logprobs/content/1/top_logprobs", "[]"}}}});
}

TEST_CASE("api: a choice names its finish reason", "[server][api]") {
  TestServer server;
  const std::pair<TokenEvent, json> cases[] = {
      {FakeService::token('x', "x", FinishReason::length), "length"},
      {FakeService::token('x', "", FinishReason::stop), "stop"},
      {FakeService::token(-1, "", FinishReason::abort), "abort"},
  };
  size_t which = 0;
  server.service.script = [&](const Request&, int) {
    return std::vector{FakeService::token('a', "a"), cases[which].first};
  };
  for (which = 0; which < std::size(cases); ++which) {
    json choice = parsed(server.post("/v1/completions", R"({"prompt":"a"})").body)["choices"][0];
    CHECK_SAME(choice["finish_reason"], cases[which].second);
    auto events = chunks(server.post("/v1/completions", R"({"prompt":"a","stream":true})"));
    REQUIRE(events.size() == 2);
    CHECK_SAME(events[0]["choices"][0]["finish_reason"], nullptr);
    CHECK_SAME(events[1]["choices"][0]["finish_reason"], cases[which].second);
  }
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

TEST_CASE("api: a refusal by the cluster becomes 503 or 400 and aborts the other prompts of the call",
          "[server][api]") {
  TestServer server;
  server.service.admit = [](const Request& r) -> Status {
    if (r.prompt[0] == 'b') return Error{ErrorCode::unavailable, "the server is shutting down"};
    if (r.prompt[0] == 'c') return invalid("needs 9 blocks of 8");
    return ok();
  };
  Reply full = server.post("/v1/completions", R"({"prompt":"b","stream":true})");
  check_error(full, 503, "overloaded_error", nullptr, "unavailable");
  CHECK(full.header("retry-after") == "1");
  CHECK(full.header("x-should-retry") == "");
  CHECK(full.reason == "Service Unavailable");
  check_error(server.post("/v1/completions", R"({"prompt":"c"})"), 400, "invalid_request_error", "prompt", nullptr);
  // The cluster refuses the second of three prompts: the first is aborted, and the third is never sent.
  server.service.hold(true);
  CHECK_SAME(server.post("/v1/completions", R"({"prompt":["a","b","a"]})").status, 503);
  CHECK(server.service.wait([](auto& s) { return s.in_flight() == 0; }));
  CHECK(server.service.aborted().size() == 1);
  CHECK(server.service.seen().size() == 1);
}

TEST_CASE("api: a failure is a status, or an event of a stream whose head is already sent", "[server][api]") {
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
  } else {  // the request failed before the stream's head was sent
    check_error(streamed, 500, "server_error", nullptr, "internal_error");
  }
  how = FinishReason::timeout;
  check_error(server.post("/v1/completions", R"({"prompt":"a"})"), 504, "server_error", nullptr, "request_timeout");
  early = false;
  const Reply late = server.post("/v1/completions", R"({"prompt":"a","stream":true})");
  REQUIRE(late.events().size() >= 2);
  CHECK(parsed(late.events()[late.events().size() - 2])["error"]["code"] == "request_timeout");
  how = FinishReason::error;
  Reply reply = server.post("/v1/completions", R"({"prompt":"a","stream":true,"n":2})");
  CHECK(reply.status == 200);
  CHECK(reply.complete);
  auto events = reply.events();
  REQUIRE(events.size() >= 3);
  CHECK(events.back() == "[DONE]");
  CHECK(parsed(events[events.size() - 2])["error"]["message"] == "transfer failed");
  // The other choice is aborted, too.
  CHECK(server.service.wait([](auto& s) { return s.aborted().size() == 1; }));
}

TEST_CASE("api: a request that the cluster refuses at once gets a status, even if it asks for a stream",
          "[server][api]") {
  TestServer server;
  server.service.script = [](const Request&, int) {
    return std::vector{FakeService::token(-1, "", FinishReason::refused)};
  };
  const Reply reply = server.post("/v1/completions", R"({"prompt":"a","stream":true})");
  CHECK(reply.status == 429);
  CHECK(reply.events().empty());
}

}  // namespace xpyd::testing::api_test
