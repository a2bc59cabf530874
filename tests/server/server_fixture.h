// A server in front of a scripted cluster, and a client that sends exactly the bytes that it is given.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "disagg/service.h"
#include "server/openai/api.h"

namespace xpyd::testing {

// A byte-level tokenizer without merges: token id = byte, 256 is the special token <|end|>, and vocab_size is 257.
const Tokenizer& byte_tokenizer();
// A template of "role: content\n" per message, then "assistant: ".
const ChatTemplate& line_template();

// Steps all its requests in turn on its own thread, with one event per choice and step.
class FakeService final : public Service {
 public:
  FakeService();
  ~FakeService() override;

  // Set these before the first request.
  std::function<Status(const Request&)> admit;  // if empty, everything is admitted
  // Returns the events of one choice; the last has a finish reason. If empty, the text is `max_tokens` letters of
  // "hello ".
  std::function<std::vector<TokenEvent>(const Request&, int choice)> script;
  // These may be set at any time.
  std::atomic<double> step_delay_s = 0;
  std::atomic<bool> alive = true;

  void hold(bool held);  // while held, only aborts make events
  std::vector<Request> seen() const;
  std::vector<uint64_t> aborted() const;
  int in_flight() const;
  // Waits at most 30 s for `done`.
  bool wait(std::function<bool(const FakeService&)> done) const;

  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) override;
  void abort(uint64_t request_id) override;
  ServiceStats stats() const override;
  std::string trouble() const override { return alive ? "" : "an engine stands still"; }

  static TokenEvent token(int32_t id, const std::string& text, FinishReason finish = FinishReason::none);
  static std::vector<TokenEvent> hello(const Request& request, int choice);

 private:
  struct Running;
  void loop();
  void step(Running& running);
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<std::shared_ptr<Running>> running_;
  std::vector<Request> seen_;
  std::vector<uint64_t> aborted_;
  bool held_ = false, stopped_ = false;
  std::thread thread_;
};

struct Reply {
  int status = 0;  // 0 if the connection ended before a whole header came
  std::string reason, head, body;
  bool complete = false;  // the body came to its declared end
  bool chunked = false;
  std::string header(const std::string& lower_name) const;
  std::vector<std::string> events() const;  // SSE data lines
};

// A blocking TCP client. Every wait ends after 30 s.
int free_port();  // returns a port of loopback that was free a moment ago

class Client {
 public:
  explicit Client(int port, int receive_buffer_bytes = 0);
  static bool connects(int port);  // true if somebody listens there
  ~Client();
  Client(const Client&) = delete;
  void send(const std::string& bytes);
  void half_close();
  void close();
  Reply read(bool head_request = false);  // reads one response; skips 1xx and counts them
  std::string read_some();                // returns "" at the end of the connection
  bool at_end();                          // true when the server has closed and nothing is left
  bool quiet();                           // true when nothing comes for 50 ms
  int continues = 0;

 private:
  bool fill();
  int fd_ = -1;
  std::string buffer_;
};

class TestServer {
 public:
  explicit TestServer(std::function<void(ServerOptions&)> change = {}, bool with_tokenizer = true,
                      const ChatTemplate& chat = line_template());
  ~TestServer();

  RealClock clock;
  FakeService service;
  std::unique_ptr<HttpServer> server;
  int port() const { return server->port(); }
  Reply get(const std::string& path, const std::string& headers = "");
  Reply post(const std::string& path, const std::string& body, const std::string& headers = "");
  std::vector<std::string> log() const;
  void join();  // waits for run() to return

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> log_;
  std::thread thread_;
};

std::string request_text(const std::string& method, const std::string& path, const std::string& body,
                         const std::string& headers = "");

}  // namespace xpyd::testing
