// What clients may send, and what is refused with which words.
#include <set>

#include "server/api.h"
#include "tests/server/api_fixture.h"

namespace xpyd::testing::api_input_test {

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
      for (__int128 value : {__int128{field.min} - 1, __int128{field.min}, max, max + 1, __int128{-1},
                             __int128{1} << 31, __int128{1} << 63}) {
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
  for (int i = 0; i < 65; ++i) many_stops += std::string(i ? "," : "") + "\"x\"";
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
      {"speculative", "{\"tokens\":2}"},               // of a server that drafts nothing
      {"speculative", "{\"tokens\":65}"},
      {"speculative", "{\"k\":0}"},
      {"speculative", "4"},
      {"cache_salt", "\"\""},
      {"cache_salt", "\"" + std::string(1025, 'x') + "\""},
      {"session_id", "\"" + std::string(257, 'x') + "\""},
      {"session_id", "5"},
      {"session_id", "\"\""},
      {"session_end", "true"},  // of which session?
      {"model", "5"},
      {"suffix", "\"x\""},
      {"logit_bias", "{\"257\":1}"},
      {"logit_bias", "{\"-1\":1}"},
      {"logit_bias", "{\"05\":1}"},
      {"logit_bias", "{\"x\":1}"},
      {"logit_bias", "{\"5\":101}"},
      {"logit_bias", "{\"5\":\"1\"}"},
      {"logit_bias", "[1]"},
      {"allowed_token_ids", "[]"},
      {"allowed_token_ids", "[257]"},
      {"allowed_token_ids", "5"},
      {"allowed_token_ids", "[97],\"bad_words\":[\"a\"]"},  // nothing is left
      {"allowed_token_ids", "[7],\"min_tokens\":1,\"stop_token_ids\":[7]"},
      {"bad_words", "\"a\""},
      {"bad_words", "[\"\"]"},
      {"bad_words", "[5]"},
      {"bad_words", "[\"" + std::string(257, 'x') + "\"]"},
      {"use_beam_search", "true"},
      {"prompt_embeds", "\"x\""},
      {"guided_json", "{}"},
      {"regex", "\"a+\""},
      {"prompt_logprobs", "21"},
      {"response_format", "{\"type\":\"json_object\"}"},
      {"detokenize", "false"},
      {"best_of", "2"},
  };
  for (const auto& c : cases) {
    INFO(c.field << " = " << c.value);
    Reply reply = server.post("/v1/completions", R"({"prompt":"a",")" + c.field + "\":" + c.value + "}");
    check_error(reply, 400, "invalid_request_error", c.field, nullptr);
  }
  for (std::string prompt : {"null", "5", "{}", "[]", "[[]]", "[1,\"a\"]", "[\"a\",1]", "[[1],\"a\"]", "[-1]", "[257]",
                             "[1.5]", "[9223372036854775808]", "[true]", "\"\"", "[[1,[2]]]"}) {
    INFO(prompt);
    check_error(server.post("/v1/completions", R"({"prompt":)" + prompt + "}"), 400, "invalid_request_error", "prompt",
                nullptr);
  }
  for (std::string messages :
       {"null", "[]", "{}", "[1]", R"([{"role":"user","content":5}])", R"([{"content":"x"}])",
        R"([{"role":"wizard","content":"x"}])", R"([{"role":"user","content":[{"type":"image_url"}]}])",
        R"([{"role":"user","content":["x"]}])", R"([{"role":"assistant","content":"","tool_calls":[{}]}])"}) {
    INFO(messages);
    check_error(server.post("/v1/chat/completions", R"({"messages":)" + messages + "}"), 400, "invalid_request_error",
                "messages", nullptr);
  }
  for (std::string extra : {R"("tools":[{}])", R"("tool_choice":"required")", R"("tools":[{}],"tool_choice":"auto")",
                            R"("chat_template":"{{ 1 }}")", R"("chat_template_kwargs":[1])", R"("top_logprobs":2)",
                            R"("continue_final_message":true)", R"("response_format":{"type":"json_schema"})"}) {
    INFO(extra);
    CHECK(server.post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],)" + extra + "}").status ==
          400);
  }
  for (const std::string extra :
       {R"("tools":[],"tool_choice":"none")", R"("tools":[],"tool_choice":"auto")", R"("tool_choice":"auto")",
        R"("tools":null,"tool_choice":null)", R"("tools":[{}],"tool_choice":"none")"}) {
    INFO(extra);
    CHECK(server.post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],)" + extra + "}").status ==
          200);
  }
  std::string stops = "[\"s0\"";
  for (int i = 1; i < 64; ++i) stops += ",\"s" + std::to_string(i) + "\"";
  CHECK(server.post("/v1/completions", R"({"prompt":"a","stop":)" + stops + "]}").status == 200);
  std::string prompts = "[\"a\"";
  for (int i = 1; i < kMaxChoicesPerCall; ++i) prompts += ",\"a\"";
  CHECK(server.post("/v1/completions", R"({"max_tokens":1,"prompt":)" + prompts + "]}").status == 200);
  CHECK(server.post("/v1/completions", R"({"prompt":)" + prompts + ",\"a\"]}").status == 400);
  CHECK(server.post("/v1/completions", R"({"n":2,"prompt":)" + prompts + "]}").status == 400);
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
    Reply chat = server.post("/v1/chat/completions",
                             R"({"messages":[{"role":"user","content":")" + std::string(size, 'x') + "\"}]}");
    check_error(chat, 400, "invalid_request_error", "messages", "context_length_exceeded");
  }
  Reply ids = server.post("/v1/completions", R"({"prompt":[1],"max_tokens":256})");
  check_error(ids, 400, "invalid_request_error", "max_tokens", "context_length_exceeded");
  CHECK(ids.reason.starts_with("Bad Request: This model's maximum context length is 256"));
  CHECK(server.service.seen().empty());
}

TEST_CASE("api: objectives in headers are milliseconds, and what is none is refused", "[server][api]") {
  TestServer server;
  for (const std::string name : {"x-slo-ttft-ms", "x-slo-tbt-ms"})
    for (const std::string value :
         {"abc", "-1", "0", "nan", "inf", "1e999", "5 ms", "1,000", "0x", "1e10", "--1", "5;6"})
      for (const char* path : {"/v1/completions", "/v1/chat/completions"}) {
        INFO(path << " " << name << ": " << value);
        const Reply reply = server.post(path, R"({"prompt":"a","messages":[{"role":"user","content":"a"}]})",
                                        name + ": " + value + "\r\n");
        check_error(reply, 400, "invalid_request_error", name, nullptr);
        CHECK(reply.body.find("expected milliseconds above 0") != std::string::npos);
      }
  CHECK(server.service.seen().empty());
  CHECK(server.post("/v1/completions", R"({"prompt":"a"})", "X-SLO-TTFT-ms: 1500\r\nx-slo-tbt-ms: 2.5\r\n").status ==
        200);
  REQUIRE(server.service.seen().size() == 1);
  CHECK(server.service.seen()[0].slo_ttft_s == 1.5);
  CHECK(server.service.seen()[0].slo_tbt_s == 0.0025);
}

TEST_CASE("api: unknown fields are accepted and named in the log", "[server][api]") {
  TestServer server;
  CHECK(
      server.post("/v1/completions", R"({"prompt":"SECRETPROMPT","shiny":1,"new\nfield":2})", "X-Request-Id: abc-1\r\n")
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

}  // namespace xpyd::testing::api_input_test
