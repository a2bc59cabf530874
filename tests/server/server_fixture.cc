#include "tests/server/server_fixture.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "base/json/json.h"

namespace xpyd::testing {
namespace {

std::string utf8(unsigned c) {
  if (c < 0x80) return std::string(1, static_cast<char>(c));
  return {static_cast<char>(0xc0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
}

std::string byte_tokenizer_json() {
  JsonText vocab;
  vocab.open('{');
  unsigned next = 0x100;
  for (unsigned b = 0; b < 256; ++b) {
    bool self = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    vocab.key(utf8(self ? b : next++)).value(b);
  }
  vocab.close('}');
  return R"({"added_tokens":[{"id":256,"content":"<|end|>","special":true}],)"
         R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":false},)"
         R"("decoder":{"type":"ByteLevel"},"model":{"type":"BPE","merges":[],"vocab":)" +
         vocab.take() + "}}";
}

}  // namespace

const Tokenizer& byte_tokenizer() {
  static const auto tokenizer = [] {
    auto made = Tokenizer::parse(byte_tokenizer_json(), "tokenizer of the test");
    XPYD_CHECK(made.ok(), made.error().message);
    return std::move(made).value();
  }();
  return *tokenizer;
}

const ChatTemplate& line_template() {
  static const auto chat = ChatTemplate::parse(
                               "{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
                               "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
                               [] { return int64_t{0}; })
                               .value();
  return *chat;
}

// ---- FakeService

struct FakeService::Running {
  std::shared_ptr<const Request> request;
  std::shared_ptr<EventSink> sink;
  std::vector<std::vector<TokenEvent>> events;  // [choice]
  std::vector<size_t> at;
  std::atomic<bool> aborted = false;
  bool done = false;
  double queued_s = 0, scheduled_s = 0;
};

FakeService::FakeService() : thread_([this] { loop(); }) {}

FakeService::~FakeService() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

TokenEvent FakeService::token(int32_t id, const std::string& text, FinishReason finish) {
  TokenEvent event;
  event.token = id;
  event.text = text;
  event.finish = finish;
  return event;
}

std::vector<TokenEvent> FakeService::hello(const Request& request, int) {
  std::vector<TokenEvent> events;
  for (int i = 0; i < request.max_tokens; ++i) {
    char letter = "hello "[i % 6];
    bool last = i + 1 == request.max_tokens;
    events.push_back(token(letter, std::string(1, letter), last ? FinishReason::length : FinishReason::none));
    if (request.sampling.top_logprobs < 0) continue;
    TokenEvent& event = events.back();
    event.has_logprobs = true;
    event.sampled.chosen = {letter, -0.25f};
    for (int t = 0; t < request.sampling.top_logprobs; ++t)
      event.sampled.top.push_back({t == 0 ? letter : 0xc0 + t, -0.25f - static_cast<float>(t)});
  }
  return events;
}

void FakeService::hold(bool held) {
  std::lock_guard lock(mutex_);
  held_ = held;
  changed_.notify_all();
}

std::vector<Request> FakeService::seen() const {
  std::lock_guard lock(mutex_);
  return seen_;
}
std::vector<uint64_t> FakeService::aborted() const {
  std::lock_guard lock(mutex_);
  return aborted_;
}
int FakeService::in_flight() const {
  std::lock_guard lock(mutex_);
  return static_cast<int>(running_.size());
}

bool FakeService::wait(std::function<bool(const FakeService&)> done) const {
  for (int i = 0; i < 6000; ++i) {
    if (done(*this)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

Status FakeService::submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) {
  if (admit) {
    Status taken = admit(*request);
    if (!taken.ok()) return taken;
  }
  auto running = std::make_shared<Running>();
  for (int c = 0; c < request->n; ++c) running->events.push_back(script ? script(*request, c) : hello(*request, c));
  running->at.resize(static_cast<size_t>(request->n));
  running->sink = std::move(sink);
  running->queued_s = RealClock().now();
  if (running->events[0][0].finish == FinishReason::refused) {  // a conductor refuses inside submit()
    TokenEvent refusal = running->events[0][0];
    refusal.request_id = request->id;
    running->sink->on_event(std::move(refusal));
    return ok();
  }
  std::lock_guard lock(mutex_);
  seen_.push_back(*request);
  running->request = std::move(request);
  running_.push_back(std::move(running));
  changed_.notify_all();
  return ok();
}

void FakeService::abort(uint64_t request_id) {
  std::lock_guard lock(mutex_);
  aborted_.push_back(request_id);
  for (auto& running : running_)
    if (running->request->id == request_id) running->aborted = true;
  changed_.notify_all();
}

ServiceStats FakeService::stats() const {
  ServiceStats stats;
  for (const char* name : {"P0", "D0"}) {
    InstanceStats instance;
    instance.name = name;
    instance.running = in_flight();
    instance.kv.capacity = 100;
    instance.kv.free = 60;
    instance.kv.active = 30;
    instance.kv.cached = 8;
    instance.kv.in_transfer = 2;
    instance.kv.block_tokens = 16;
    instance.kv.prefix_query_tokens = 1000;
    instance.kv.prefix_hit_tokens = 250;
    instance.transfer_bytes = 4096;
    instance.transfer_seconds = 0.5;
    stats.instances.push_back(instance);
  }
  return stats;
}

void FakeService::step(Running& running) {
  RealClock clock;
  if (running.scheduled_s == 0) running.scheduled_s = clock.now();
  bool left = false;
  for (size_t c = 0; c < running.events.size(); ++c) {
    auto& events = running.events[c];
    if (running.at[c] == events.size()) continue;
    TokenEvent event;
    if (running.aborted) {
      event.finish = FinishReason::abort;
      running.at[c] = events.size();
    } else {
      event = events[running.at[c]++];
    }
    left = left || running.at[c] < events.size();
    event.request_id = running.request->id;
    event.choice = static_cast<int>(c);
    event.queued_s = running.queued_s;
    event.scheduled_s = running.scheduled_s;
    event.time_s = clock.now();
    running.sink->on_event(std::move(event));
  }
  running.done = !left;
}

void FakeService::loop() {
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    std::vector<std::shared_ptr<Running>> turn;
    for (auto& running : running_)
      if (!held_ || running->aborted) turn.push_back(running);
    if (turn.empty()) {
      changed_.wait(lock);
      continue;
    }
    lock.unlock();
    for (auto& running : turn) step(*running);
    if (step_delay_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(step_delay_s));
    turn.clear();
    lock.lock();
    std::erase_if(running_, [](auto& running) { return running->done; });
  }
}

// ---- Client

namespace {
sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}
}  // namespace

int free_port() {
  sockaddr_in address = loopback(0);
  socklen_t bytes = sizeof address;
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  XPYD_CHECK(::bind(fd, reinterpret_cast<sockaddr*>(&address), bytes) == 0);
  XPYD_CHECK(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) == 0);
  ::close(fd);
  return ntohs(address.sin_port);
}

bool Client::connects(int port) {
  const sockaddr_in address = loopback(port);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool connected = ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  ::close(fd);
  return connected;
}

Client::Client(int port, int receive_buffer_bytes) {
  fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  XPYD_CHECK(fd_ >= 0, std::strerror(errno));
  if (receive_buffer_bytes > 0) ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer_bytes, sizeof(int));
  timeval limit{30, 0};
  ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  const sockaddr_in address = loopback(port);
  int failed = ::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address);
  XPYD_CHECK(failed == 0, std::strerror(errno));
}

Client::~Client() { close(); }
void Client::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}
void Client::half_close() { ::shutdown(fd_, SHUT_WR); }

// A server may close while the client still sends (413). That does not fail the test.
void Client::send(const std::string& bytes) {
  size_t at = 0;
  while (at < bytes.size()) {
    ssize_t n = TEMP_FAILURE_RETRY(::send(fd_, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL));
    if (n <= 0) return;
    at += static_cast<size_t>(n);
  }
}

bool Client::fill() {
  char chunk[16384];
  ssize_t n = TEMP_FAILURE_RETRY(
      ::recv(fd_, chunk, sizeof chunk, 0));  // a stop signal interrupts a recv that has a time limit
  if (n <= 0) return false;
  buffer_.append(chunk, static_cast<size_t>(n));
  return true;
}

std::string Client::read_some() {
  if (buffer_.empty()) fill();
  return std::exchange(buffer_, "");
}

bool Client::at_end() { return buffer_.empty() && !fill() && errno != EAGAIN; }

bool Client::quiet() {
  pollfd one{fd_, POLLIN, 0};
  return buffer_.empty() && TEMP_FAILURE_RETRY(::poll(&one, 1, 50)) == 0;
}

Reply Client::read(bool head_request) {
  Reply reply;
  size_t end;
  while ((end = buffer_.find("\r\n\r\n")) == buffer_.npos)
    if (!fill()) return reply;
  reply.head = buffer_.substr(0, end + 2);
  buffer_.erase(0, end + 4);
  reply.status = std::atoi(reply.head.substr(9, 3).c_str());
  reply.reason = reply.head.substr(13, reply.head.find("\r\n") - 13);
  if (reply.status < 200) {
    ++continues;
    return read(head_request);
  }
  if (head_request) {
    reply.complete = true;
    return reply;
  }
  if (reply.header("transfer-encoding") == "chunked") {
    reply.chunked = true;
    for (;;) {
      size_t line;
      while ((line = buffer_.find("\r\n")) == buffer_.npos)
        if (!fill()) return reply;
      size_t size = std::strtoul(buffer_.c_str(), nullptr, 16);
      while (buffer_.size() < line + 2 + size + 2)
        if (!fill()) return reply;
      reply.body += buffer_.substr(line + 2, size);
      buffer_.erase(0, line + 2 + size + 2);
      if (size == 0) break;
    }
    reply.complete = true;
    return reply;
  }
  std::string length = reply.header("content-length");
  if (length.empty()) {  // no length: the body ends with the connection
    while (fill()) {
    }
    reply.body = std::exchange(buffer_, "");
    reply.complete = true;
    return reply;
  }
  size_t size = std::strtoul(length.c_str(), nullptr, 10);
  while (buffer_.size() < size)
    if (!fill()) break;
  reply.complete = buffer_.size() >= size;
  reply.body = buffer_.substr(0, size);
  buffer_.erase(0, size);
  return reply;
}

std::string Reply::header(const std::string& lower_name) const {
  std::string lower = head;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  size_t at = lower.find("\r\n" + lower_name + ": ");
  if (at == lower.npos) return "";
  at += lower_name.size() + 4;
  return head.substr(at, head.find("\r\n", at) - at);
}

std::vector<std::string> Reply::events() const {
  std::vector<std::string> out;
  for (size_t at = 0; at < body.size();) {
    size_t end = body.find("\n\n", at);
    if (end == body.npos) break;
    std::string event = body.substr(at, end - at);
    out.push_back(event.starts_with("data: ") ? event.substr(6) : "not a data line: " + event);
    at = end + 2;
  }
  return out;
}

// ---- TestServer

std::string request_text(const std::string& method, const std::string& path, const std::string& body,
                         const std::string& headers) {
  std::string text = method + " " + path + " HTTP/1.1\r\nHost: localhost\r\n" + headers;
  if (method == "POST") {
    if (headers.find("Content-Type") == headers.npos) text += "Content-Type: application/json\r\n";
    text += "Content-Length: " + std::to_string(body.size()) + "\r\n";
  }
  return text + "\r\n" + body;
}

TestServer::TestServer(std::function<void(ServerOptions&)> change, bool with_tokenizer, const ChatTemplate& chat) {
  ServerOptions options;
  options.port = 0;
  options.name = "tiny";
  options.model_root = "models/tiny";
  options.max_model_len = 256;
  options.allowed_hosts = {"*"};
  options.vocab_size = 300;  // larger than the tokenizer's, as in padded models
  options.log = [this](const std::string& line) {
    std::lock_guard lock(mutex_);
    log_.push_back(line);
  };
  if (change) change(options);
  auto made = HttpServer::listen(options, service, with_tokenizer ? &byte_tokenizer() : nullptr,
                                 with_tokenizer ? &chat : nullptr, clock);
  XPYD_CHECK(made.ok(), made.ok() ? "" : made.error().message);
  server = std::move(made).value();
  thread_ = std::thread([this] { server->run(); });
}

TestServer::~TestServer() {
  if (server) server->stop();
  join();
}

void TestServer::join() {
  if (thread_.joinable()) thread_.join();
}

Reply TestServer::get(const std::string& path, const std::string& headers) {
  Client client(port());
  client.send(request_text("GET", path, "", headers));
  return client.read();
}

Reply TestServer::post(const std::string& path, const std::string& body, const std::string& headers) {
  Client client(port());
  client.send(request_text("POST", path, body, headers));
  return client.read();
}

std::vector<std::string> TestServer::log() const {
  std::lock_guard lock(mutex_);
  return log_;
}

}  // namespace xpyd::testing
