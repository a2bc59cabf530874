// A stream on which nothing comes: what its client hears meanwhile. Time stands still unless the test moves it.
#include "base/clock.h"
#include "server/api.h"
#include "tests/catch.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing::api_quiet_test {
namespace {

// Keeps what it is told to send.
class Sent final : public HttpExchange {
 public:
  void respond(HttpResponse response) override { answers.push_back(std::move(response)); }
  void begin_stream(HttpResponse head) override { answers.push_back(std::move(head)); }
  void write(std::string bytes) override { stream += bytes; }
  void end_stream() override { ended = true; }
  void on_gone(std::function<void()>) override {}

  std::vector<HttpResponse> answers;
  std::string stream;
  bool ended = false;
};

// Says what the test says.
class Silent final : public Service {
 public:
  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> its_sink) override {
    sink = std::move(its_sink);
    if (refuses) say(-1, FinishReason::refused);
    (void)request;
    return ok();
  }
  void abort(uint64_t) override {}
  ServiceStats stats() const override { return {}; }
  std::string trouble() const override { return ""; }
  void say(int32_t token, FinishReason finish) {
    TokenEvent event;
    event.token = token;
    event.text = token < 0 ? "" : "x";
    event.finish = finish;
    event.error = token < 0 ? "too late" : "";
    sink->on_event(std::move(event));
  }
  std::shared_ptr<EventSink> sink;
  bool refuses = false;
};

struct Bed {
  explicit Bed(double timeout_s = 0) {
    ServerOptions options;
    options.max_model_len = 100;
    options.vocab_size = 100;
    options.request_timeout_s = timeout_s;
    options.log = [](const std::string&) {};
    api = std::make_unique<Api>(options, service, nullptr, nullptr, clock,
                                [this](std::function<void()> work) { posted.push_back(std::move(work)); });
  }
  std::shared_ptr<Sent> ask(const std::string& body) {
    auto sent = std::make_shared<Sent>();
    HttpRequest request{.method = "POST", .path = "/v1/completions"};
    request.body = body;
    api->handle(std::move(request), sent);
    run();
    return sent;
  }
  void run() {
    for (size_t i = 0; i < posted.size(); ++i) std::exchange(posted[i], nullptr)();
    posted.clear();
  }
  void pass(double seconds) {
    clock.seconds += seconds;
    api->tick();
    run();
  }
  VirtualClock clock;
  Silent service;
  std::vector<std::function<void()>> posted;
  std::unique_ptr<Api> api;
};

constexpr const char* kStream = R"({"prompt":[1],"stream":true,"max_tokens":5})";
constexpr const char* kComment = ": waiting\n\n";

}  // namespace

TEST_CASE("api: a stream's head goes out at once, and a comment each 10 s while nothing comes", "[server][api]") {
  Bed bed;
  auto sent = bed.ask(kStream);
  REQUIRE(sent->answers.size() == 1);
  CHECK(sent->answers[0].status == 200);
  CHECK(sent->answers[0].content_type == "text/event-stream; charset=utf-8");
  CHECK(sent->stream == "");
  bed.pass(9.9);
  CHECK(sent->stream == "");
  bed.pass(0.1);
  CHECK(sent->stream == kComment);
  bed.pass(9.5);
  CHECK(sent->stream == kComment);
  bed.pass(0.5);
  CHECK(sent->stream == std::string(kComment) + kComment);
  bed.pass(6);
  bed.service.say(7, FinishReason::none);  // what comes is a sign of life, too
  bed.run();
  const std::string so_far = sent->stream;
  CHECK(so_far.size() > 2 * std::string(kComment).size());
  bed.pass(6);
  CHECK(sent->stream == so_far);
  bed.pass(4);
  CHECK(sent->stream == so_far + kComment);
  bed.service.say(7, FinishReason::stop);
  bed.run();
  CHECK(sent->ended);
  const std::string all = sent->stream;
  bed.pass(100);
  CHECK(sent->stream == all);
  CHECK(sent->answers.size() == 1);
}

TEST_CASE("api: an answer that is no stream hears nothing before its end", "[server][api]") {
  Bed bed;
  auto sent = bed.ask(R"({"prompt":[1],"max_tokens":5})");
  bed.pass(50);
  CHECK(sent->answers.empty());
  CHECK(sent->stream == "");
  bed.service.say(7, FinishReason::stop);
  bed.run();
  CHECK(sent->answers.size() == 1);
}

TEST_CASE("api: what the cluster refuses at once is a status, of a stream too", "[server][api]") {
  Bed bed;
  bed.service.refuses = true;
  auto sent = bed.ask(kStream);
  REQUIRE(sent->answers.size() == 1);
  CHECK(sent->answers[0].status == 429);
  CHECK(sent->stream == "");
}

TEST_CASE("api: a stream that ends late says so in an event", "[server][api]") {
  Bed bed(60);
  auto sent = bed.ask(kStream);
  for (int i = 0; i < 7; ++i) bed.pass(9.5);
  CHECK(sent->answers.size() == 1);
  CHECK(sent->ended);
  CHECK(sent->stream.find("request_timeout") != std::string::npos);
  CHECK(sent->stream.ends_with("data: [DONE]\n\n"));
}

}  // namespace xpyd::testing::api_quiet_test
