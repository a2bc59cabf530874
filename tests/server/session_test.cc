// Tests conversations that the server keeps (session_id) over real sockets, and the session store alone.
#include "server/openai/sessions.h"
#include "tests/server/api_fixture.h"

namespace xpyd::testing::session_test {

std::string prompt_of(const TestServer& server, size_t request) {
  return byte_tokenizer().decode(server.service.seen().at(request).prompt);
}
std::string last_prompt(const TestServer& server) { return prompt_of(server, server.service.seen().size() - 1); }

// One client of one session. It sends back the generation of its last answer.
struct Talker {
  TestServer& server;
  std::string name = R"("session_id":"s")", generation = "new", headers = "";
  std::string body(const std::string& fields) const {
    return "{" + name + R"(,"session_generation":")" + generation + "\"," + fields + "}";
  }
  // A turn that must be answered.
  json turn(const std::string& fields = R"("prompt":"x","max_tokens":1)", const std::string& path = "/v1/completions") {
    const Reply reply = server.post(path, body(fields), headers);
    INFO(reply.body);
    REQUIRE(reply.status == 200);
    const json answer = reply.body.starts_with("data: ") ? chunks(reply)[0] : parsed(reply.body);
    generation = answer["session_generation"];
    CHECK(generation != "");
    return answer;
  }
  // A turn that may be refused.
  Reply post(const std::string& fields = R"("prompt":"x","max_tokens":1)") const {
    return server.post("/v1/completions", body(fields), headers);
  }
};

void refused(const Reply& reply, int status, const std::string& param, const json& code) {
  check_error(reply, status, status == 503 ? "overloaded_error" : "invalid_request_error", param, code);
}
void expired(const Reply& reply) { refused(reply, 410, "session_id", "session_expired"); }

Status full(const Request&) { return Error{ErrorCode::unavailable, "the server is shutting down"}; }

TEST_CASE("session: a completion continues after the prompt and output so far", "[server][session]") {
  TestServer server;
  Talker s{server};
  s.turn(R"("prompt":"one ","max_tokens":5)");
  json second = s.turn(R"("prompt":" two ","max_tokens":2)");
  json third = s.turn(R"("prompt":[33],"max_tokens":1,"echo":true)");
  CHECK(prompt_of(server, 1) == "one hello two ");
  CHECK(prompt_of(server, 2) == "one hello two he!");
  CHECK_SAME(third["choices"][0]["text"], "!h");  // echo covers this turn's prompt only
  CHECK_SAME(second["usage"]["prompt_tokens"], 14);
  // All turns of a session share one salt, and no other session has it.
  std::vector<Request> seen = server.service.seen();
  CHECK(seen[0].cache_salt != 0);
  CHECK(seen[0].cache_salt == seen[2].cache_salt);
  Talker{server, R"("session_id":"t")"}.turn(R"("prompt":"x")");
  Talker{server, R"("session_id":"s","cache_salt":"tenant")"}.turn(R"("prompt":"x")");
  CHECK(prompt_of(server, 3) == "x");
  CHECK(prompt_of(server, 4) == "x");  // another tenant's "s" is another session
  CHECK(server.service.seen()[3].cache_salt != seen[0].cache_salt);
  CHECK(server.service.seen()[4].cache_salt != seen[0].cache_salt);
}

TEST_CASE("session: a chat's earlier messages and replies precede the new ones", "[server][session]") {
  TestServer server;
  Talker talker{server};
  auto turn = [&](const std::string& content, bool stream) {
    talker.turn(R"("messages":[{"role":"user","content":")" + content + R"("}],"max_tokens":4,"stream":)" +
                    (stream ? "true" : "false"),
                "/v1/chat/completions");
  };
  turn("hi", false);
  turn("and", true);
  turn("end", false);
  CHECK(prompt_of(server, 2) == "user: hi\nassistant: hell\nuser: and\nassistant: hell\nuser: end\nassistant: ");
  // A session of one endpoint cannot continue on the other: one keeps tokens, the other messages.
  refused(talker.post(), 400, "session_id", nullptr);
}

TEST_CASE("session: a later turn that finds no KV of its history is an eviction of that KV",
          "[server][session][metrics]") {
  TestServer server([](ServerOptions& o) { o.kv_token_bytes = 100; });
  int cached = 0;
  server.service.script = [&](const Request&, int) {
    TokenEvent token = FakeService::token('x', "x", FinishReason::length);
    token.cached_tokens = cached;
    return std::vector{token};
  };
  const auto number = [&](const std::string& name) {
    const std::string page = server.get("/metrics").body;
    const std::string key = "\nvllm:" + name + "{model_name=\"tiny\",engine=\"all\"} ";
    const size_t at = page.find(key);
    REQUIRE(at != page.npos);
    return std::stol(page.substr(at + key.size()));
  };
  Talker s{server};
  s.turn(R"("prompt":"one","max_tokens":1)");  // a first turn has no history
  cached = 3;
  s.turn(R"("prompt":"2","max_tokens":1)");
  CHECK(number("session_evictions_total") == 0);
  cached = 0;
  s.turn(R"("prompt":"3","max_tokens":1)");
  CHECK(number("session_evictions_total") == 1);
  CHECK(number("session_evicted_kv_bytes_total") == 100 * 6);  // prompts and outputs of two turns
  CHECK(number("sessions") == 1);
  CHECK(number("session_bytes") > 0);
}

TEST_CASE("session: a refused first turn evicts no session", "[server][session]") {
  TestServer server([](ServerOptions& o) { o.max_sessions = 1; });
  Talker s{server}, other{server, R"("session_id":"other")"};
  s.turn(R"("prompt":"a","max_tokens":1)");
  CHECK(other.post(R"("prompt":[999])").status == 400);
  server.service.admit = full;
  CHECK(other.post().status == 503);
  server.service.admit = {};
  s.turn(R"("prompt":"b","max_tokens":1)");
  CHECK(last_prompt(server) == "ahb");
  other.turn();
  expired(s.post());
}

TEST_CASE("session: a matched stop token is kept only where the client sees it", "[server][session]") {
  TestServer server;
  auto reply = [&](const std::string& fields, const std::function<void(TokenEvent&)>& how) {
    server.service.script = [how](const Request&, int) {
      TokenEvent end = FakeService::token('x', "", FinishReason::stop);
      how(end);
      return std::vector{FakeService::token('o', "o"), end};
    };
    Talker s{server};
    s.turn(R"("prompt":"a",)" + fields);
    server.service.script = {};
    s.turn(R"("prompt":"b","max_tokens":1,"session_end":true)");
    return last_prompt(server);
  };
  const std::string stop = R"("stop_token_ids":[120])";
  CHECK(reply(stop, [](TokenEvent& end) { end.stop_token = 'x'; }) == "aob");
  CHECK(reply(stop + R"(,"include_stop_str_in_output":true)", [](TokenEvent& end) {
          end.stop_token = 'x';
          end.text = "x";
        }) == "aoxb");
  // The tokens of a stop string stay, because the last token may hold more than the string.
  CHECK(reply(R"("stop":"x")", [](TokenEvent& end) { end.stop_text = "x"; }) == "aoxb");
}

TEST_CASE("session: beyond --max-sessions the oldest session is dropped and answers session_expired",
          "[server][session]") {
  TestServer server([](ServerOptions& o) { o.max_sessions = 2; });
  Talker a{server, R"("session_id":"a")"}, b{server, R"("session_id":"b")"}, c{server, R"("session_id":"c")"},
      d{server, R"("session_id":"d")"};
  const std::string x = R"("prompt":"x","max_tokens":1)";
  for (Talker* talker : {&a, &b, &a, &c}) talker->turn(x);
  expired(b.post());
  a.turn(x);
  c.turn(x);
  server.service.hold(true);
  std::vector<std::unique_ptr<Client>> busy;
  for (const Talker* talker : {&a, &c}) {
    busy.push_back(std::make_unique<Client>(server.port()));
    busy.back()->send(request_text("POST", "/v1/completions", talker->body(R"("prompt":"y")")));
  }
  REQUIRE(server.service.wait([](const FakeService& s) { return s.in_flight() == 2; }));
  refused(d.post(), 503, "session_id", "sessions_full");
  server.service.hold(false);
  for (auto& client : busy) CHECK(client->read().status == 200);
}

TEST_CASE("session: a session's name is the decoded JSON text, and a salt is apart from it", "[server][session]") {
  TestServer server;
  Talker plain{server, R"("session_id":"a\u0000b")"}, other{server, R"("session_id":"a\u0000c")"};
  plain.turn(R"("prompt":"1","max_tokens":1)");
  other.turn(R"("prompt":"2","max_tokens":1)");
  CHECK(last_prompt(server) == "2");  // a NUL is an ordinary character and ends no name
  plain.name = R"("session\u005fid":"\u0061\u0000b")";
  plain.turn(R"("prompt":"3","max_tokens":1)");
  CHECK(last_prompt(server) == "1h3");
  // A client's salt never equals the salt of a session.
  CHECK(server.post("/v1/completions", R"({"prompt":"x","cache_salt":"session s\u0000"})").status == 200);
  CHECK(server.service.seen().back().cache_salt != server.service.seen().front().cache_salt);
  CHECK(session_key("a", "b") != session_key("ab", ""));
  CHECK(session_key("1", "1:a") != session_key("11:a", ""));
  for (const char* half : {R"("\ud83d")", R"("\ude00a")"})  // half a surrogate pair is not text
    CHECK(Talker{server, std::string(R"("session_id":)") + half}.post().status == 400);
}

TEST_CASE("session: bad session_ids, and fields that a session excludes, are refused", "[server][session]") {
  TestServer server;
  const std::string s = R"("session_id":"s")", begun = s + R"(,"session_generation":"new")";
  for (const auto& [fields, param] : {std::pair(std::string(R"("session_id":"")"), "session_id"),
                                      {R"("session_id":7)", "session_id"},
                                      {R"("session_id":{"a":1})", "session_id"},
                                      {R"("session_id":")" + std::string(257, 'x') + '"', "session_id"},
                                      {s + R"(,"n":2)", "n"},
                                      {s + R"(,"session_end":1)", "session_end"},
                                      {R"("session_end":true)", "session_end"},
                                      {R"("session_generation":"new")", "session_generation"},
                                      {s, "session_generation"},
                                      {begun + R"(,"prompt_logprobs":1)", "prompt_logprobs"}}) {
    INFO(fields);
    refused(server.post("/v1/completions", R"({"prompt":"a",)" + fields + "}"), 400, param, nullptr);
  }
  refused(Talker{server}.post(R"("prompt":["a","b"])"), 400, "prompt", nullptr);
  CHECK(server.service.seen().empty());
  Talker{server, R"("session_id":")" + std::string(256, 'x') + '"'}.turn();
  CHECK(server.post("/v1/completions", R"({"session_id":null,"prompt":"a"})").status == 200);
  // An overflow names session_id, and the session is still there.
  const std::string text(200, 'x');  // max_model_len is 256
  Talker talker{server, R"("session_id":"long")"};
  talker.turn(R"("prompt":")" + text + R"(","max_tokens":10)");
  const Reply reply = talker.post(R"("prompt":")" + text + '"');
  refused(reply, 400, "prompt", "context_length_exceeded");
  CHECK(reply.body.find("session `long`") != std::string::npos);
  talker.turn();
}

TEST_CASE("sessions: a session that alone exceeds the limit evicts no other", "[server][session]") {
  std::map<std::string, std::string> generations;
  auto sessions = std::make_shared<Sessions>(6, 1000);
  for (const char* key : {"a", "b"}) {
    Sessions::Turn turn;
    REQUIRE(sessions->begin(key, turn, Sessions::kNew) == Sessions::State::taken);
    generations[key] = turn.generation();
    turn.commit({.tokens = {1, 2, 3}, .messages = {}});
  }
  const size_t before = sessions->stats().bytes;
  Sessions::Turn large;
  REQUIRE(sessions->begin("large", large, Sessions::kNew) == Sessions::State::taken);
  const std::string generation = large.generation();
  large.commit({.tokens = std::vector<int32_t>(1000), .messages = {}});
  CHECK(sessions->begin("large", large, generation) == Sessions::State::dropped);
  CHECK(sessions->stats().sessions == 2);
  CHECK(sessions->stats().bytes == before);
  for (const char* key : {"a", "b"}) {
    Sessions::Turn turn;
    REQUIRE(sessions->begin(key, turn, generations[key]) == Sessions::State::taken);
    CHECK(turn.so_far().tokens == std::vector<int32_t>{1, 2, 3});
  }
}

TEST_CASE("sessions: the store stays within its limits under random operations", "[server][session]") {
  Random random(8);
  auto sessions = std::make_shared<Sessions>(6, 4000);
  struct Known {
    std::vector<int32_t> tokens;  // the session must hold these, if it is there
    std::string generation = Sessions::kNew;
  };
  std::map<std::string, Known> model;
  std::vector<std::pair<std::string, Sessions::Turn>> held;
  int dropped = 0, busy = 0;
  for (int round = 0; round < 20000; ++round) {
    const std::string key(1, char('a' + random.below(12)));
    if (held.size() < 5 && random.below(2)) {
      Sessions::Turn turn;
      const Sessions::State state = sessions->begin(key, turn, model[key].generation);
      const bool in_use = std::any_of(held.begin(), held.end(), [&](const auto& h) { return h.first == key; });
      REQUIRE((state == Sessions::State::busy) == in_use);
      REQUIRE(state != Sessions::State::stale);
      busy += state == Sessions::State::busy;
      if (state == Sessions::State::dropped) ++dropped, model.erase(key);
      if (state == Sessions::State::taken) {
        REQUIRE(turn.so_far().tokens == model[key].tokens);
        held.emplace_back(key, std::move(turn));
      }
    } else if (!held.empty()) {
      const size_t i = size_t(random.below(held.size()));
      auto [name, turn] = std::move(held[i]);
      held.erase(held.begin() + ptrdiff_t(i));
      Conversation next = turn.so_far();
      switch (random.below(4)) {
        case 0: turn.release(); break;
        case 1:
          turn.end();
          model.erase(name);
          break;
        default:
          next.tokens.resize(next.tokens.size() + 1 + random.below(60), round);
          model[name] = {next.tokens, turn.generation()};
          turn.commit(std::move(next));
      }
    }
    REQUIRE(sessions->stats().sessions <= 6);
    REQUIRE(sessions->stats().bytes <= 4000);
  }
  held.clear();
  CHECK(dropped > 100);
  CHECK(busy > 100);
}

}  // namespace xpyd::testing::session_test
