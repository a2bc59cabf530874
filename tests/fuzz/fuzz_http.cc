// Feeds bytes as they may come from the network to an HttpServer over a socket, or as a body to Api. No input may
// crash, hang, or leave a request without exactly one answer. The first byte chooses which, and how the input is cut.
//
// The requests of tests/server/http_test.cc are useful seeds. `make check STAGE=fuzz` runs it for a minute.

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/json/json.h"
#include "base/utf8.h"
#include "server/http/http.h"
#include "server/openai/api.h"

namespace xpyd::testing {
namespace {

// Answers every request at once with two tokens, one of which is an incomplete UTF-8 sequence.
class EchoService final : public Service {
 public:
  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) override {
    XPYD_CHECK(!request->prompt.empty() && request->max_tokens >= 1);
    XPYD_CHECK(request->n >= 1 && request->n <= 8);
    XPYD_CHECK(static_cast<int>(request->prompt.size()) + request->max_tokens <= 512);
    for (int32_t id : request->prompt) XPYD_CHECK(id >= 0 && id < 512);
    if (request->prompt[0] == 1) return Error{ErrorCode::unavailable, "full"};
    for (int choice = 0; choice < request->n; ++choice)
      for (int i = 0; i < 2; ++i) {
        TokenEvent event;
        event.request_id = request->id;
        event.choice = choice;
        event.token = i;
        event.text = i == 0 ? "\xe2\x82\xac" : "";
        event.has_logprobs = request->sampling.top_logprobs >= 0;
        for (int t = 0; t < request->sampling.top_logprobs; ++t) event.sampled.top.push_back({t, -1.0f});
        if (i == 1) event.finish = request->prompt[0] == 2 ? FinishReason::error : FinishReason::stop;
        sink->on_event(std::move(event));
      }
    return ok();
  }
  void abort(uint64_t) override {}
  ServiceStats stats() const override { return {}; }
  std::string trouble() const override { return ""; }
};

class CountingExchange final : public HttpExchange {
 public:
  ~CountingExchange() override {}
  void respond(HttpResponse response) override {
    XPYD_CHECK(!streaming_ && ++answers == 1);
    XPYD_CHECK(response.status >= 200 && response.status < 600);
    XPYD_CHECK(is_utf8(response.body));
  }
  void begin_stream(HttpResponse) override {
    XPYD_CHECK(!streaming_ && answers == 0);
    streaming_ = true;
  }
  void write(std::string bytes) override {
    XPYD_CHECK(streaming_ && answers == 0 && is_utf8(bytes));
    XPYD_CHECK(bytes.starts_with("data: ") && bytes.ends_with("\n\n"));
  }
  void end_stream() override { XPYD_CHECK(streaming_ && ++answers == 1); }
  void on_gone(std::function<void()>) override {}
  int answers = 0;

 private:
  bool streaming_ = false;
};

std::string tokenizer_json() {
  JsonText vocab;
  vocab.open('{');
  for (int i = 0; i < 256; ++i) {
    char byte[16];
    std::snprintf(byte, sizeof byte, "<0x%02X>", unsigned(i));
    vocab.key(byte).value(96 + i);
  }
  for (int i = 0; i < 95; ++i) {
    char c = static_cast<char>(' ' + i);
    vocab.key(std::string_view(&c, 1)).value(i + 1);
  }
  vocab.close('}');
  return R"({"decoder":{"type":"ByteFallback"},"model":{"type":"BPE","byte_fallback":true,"merges":[],)"
         R"("vocab":)" +
         vocab.take() + "}}";
}

struct Fixture {
  std::unique_ptr<const Tokenizer> tokenizer;
  std::unique_ptr<const ChatTemplate> chat =
      ChatTemplate::parse("{% for m in messages %}{{ m.content }}{% endfor %}", [] { return int64_t{0}; }).value();
  RealClock clock;
  EchoService service;
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> posted;
  std::unique_ptr<Api> api;
  std::unique_ptr<HttpServer> server;
  std::thread thread;
  Fixture() {
    auto made = Tokenizer::parse(tokenizer_json(), "tokenizer");
    XPYD_CHECK(made.ok(), made.error().message);
    tokenizer = std::move(made).value();
    ServerOptions options;
    options.port = 0;
    options.name = "m";
    options.max_model_len = 512;
    options.allowed_hosts = {"*"};
    options.log = [](const std::string& line) { XPYD_CHECK(line.size() < 1000); };
    api = std::make_unique<Api>(options, service, tokenizer.get(), chat.get(), clock, [this](std::function<void()> f) {
      std::lock_guard lock(mutex);
      posted.push_back(std::move(f));
      wake.notify_one();
    });
    server = HttpServer::listen(options, service, tokenizer.get(), chat.get(), clock).value();
    thread = std::thread([this] { server->run(); });
  }
  // Runs the posted work until there is an answer. A session's turn is parsed on another thread.
  void run_posted(const int& answers) {
    std::unique_lock lock(mutex);
    while (wake.wait_for(lock, std::chrono::seconds(answers > 0 ? 0 : 10), [this] { return !posted.empty(); })) {
      auto f = std::move(posted.front());
      posted.pop_front();
      lock.unlock();
      f();
      lock.lock();
    }
  }
};

void serve(Fixture& fixture, HttpRequest request) {
  // Larger bodies are parsed on another thread, whose timing a fuzzer could not repeat.
  if (request.body.size() > 16u << 10) return;
  if (fixture.api->on_header(request)) return;
  auto exchange = std::make_shared<CountingExchange>();
  fixture.api->handle(std::move(request), exchange);
  fixture.run_posted(exchange->answers);
  XPYD_CHECK(exchange->answers == 1);
}

// Sends the input in pieces of `step` bytes, then reads until the server closes.
void send(int port, std::string_view input, size_t step) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  // A closed connection keeps its port for a minute, so the ports of one address are used up.
  static uint32_t sent = 0;
  sockaddr_in own{};
  own.sin_family = AF_INET;
  own.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1 + sent++ / 10'000);
  XPYD_CHECK(bind(fd, reinterpret_cast<const sockaddr*>(&own), sizeof own) == 0);
  const timeval limit{20, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  XPYD_CHECK(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  for (; !input.empty(); input.remove_prefix(std::min(step, input.size())))
    if (::send(fd, input.data(), std::min(step, input.size()), MSG_NOSIGNAL) < 0) break;
  shutdown(fd, SHUT_WR);
  char answer[4096];
  ssize_t n;
  while ((n = recv(fd, answer, sizeof answer, 0)) > 0) continue;
  XPYD_CHECK(n == 0 || errno != EAGAIN, "the server hangs");
  close(fd);
}

}  // namespace
}  // namespace xpyd::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* fixture = new xpyd::testing::Fixture();
  if (size == 0) return 0;
  size_t step = data[0] % 4 == 0 ? size : data[0];
  std::string_view input(reinterpret_cast<const char*>(data + 1), size - 1);
  // Every other input is a plain JSON body, so the fuzzer need not discover Content-Length.
  if (data[0] & 1) {
    for (const char* path : {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}) {
      xpyd::testing::HttpRequest request;
      request.method = "POST";
      request.path = path;
      request.headers.emplace_back("content-type", "application/json");
      request.body = std::string(input);
      serve(*fixture, std::move(request));
    }
    return 0;
  }
  xpyd::testing::send(fixture->server->port(), input, step);
  return 0;
}
