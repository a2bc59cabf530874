// The routes: what each (method, path) means. HTTP request in; JSON answer or event stream out.
//
// Thread safety: the I/O thread owns it; large bodies are parsed and tokenized on threads of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "base/status.h"
#include "disagg/service.h"
#include "server/access.h"
#include "server/api_parse.h"
#include "server/body_threads.h"
#include "server/http.h"
#include "server/metrics.h"

namespace xpyd::server {

struct ServerOptions : HttpListenOptions, ServedModel {
  std::string model_root;                  // in /v1/models; clients load a tokenizer from there
  std::string version;                     // in /version
  double request_timeout_s = 600;          // of a request as a whole; 0: none
  std::vector<std::string> api_keys;       // empty: open
  std::vector<std::string> allowed_hosts;  // see access.h
  bool insecure = false;                   // without a key also on addresses that others can reach
  std::string metrics_prefix = "vllm";
  int max_sessions = 1024;  // conversations kept, and their bytes: of all keys
  size_t session_bytes = size_t{64} << 20;
  uint64_t seed = 0;                         // of the seeds of requests that bring none
  bool dev_endpoints = false;                // POST /reset_prefix_cache, GET /server_info, for clients on this machine
  std::function<void()> reset_prefix_cache;  // any thread; empty: that route answers 501
  // POST /retire_instance {"name": "P0", "role": "decode"}: that instance leaves when it is empty,
  // and comes back in that role ("": not at all). Any thread.
  std::function<Status(const std::string& name, const std::string& role)> retire_instance;
  std::string server_info;                      // the option table, for GET /server_info
  LogLevel log_level = LogLevel::info;          // the least that is logged
  std::function<void(const std::string&)> log;  // one line without its end; empty: stderr
};

std::string error_body(const ApiError& error);
// What the page draws: instances, blocks by state, queues, transfers.
std::string stats_body(const ServedModel& model, const ServiceStats& stats);

class Generation;

class Api final : public HttpHandler {
 public:
  Api(const ServerOptions& options, Service& service, const Tokenizer* tokenizer, const ChatTemplate* chat_template,
      Clock& clock, HttpPost post);
  ~Api() override;

  std::optional<HttpResponse> on_header(const HttpRequest& request) override;
  bool is_probe(const HttpRequest& request) override;
  void handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) override;
  HttpResponse refuse(int status, const std::string& why) override;
  void tick() override;
  void begin_drain() { draining_ = true; }

  // For the test that walks all routes.
  struct Route {
    const char* path;
    const char* methods;  // "GET", "POST" or "GET POST"; GET answers HEAD too
    bool open;            // needs no key
    bool dev;             // only with dev_endpoints, only for clients on this machine
  };
  static std::vector<Route> routes();

 private:
  friend class Generation;
  struct Incoming;
  struct Row;
  static std::span<const Row> table();

  const Row* find_row(const HttpRequest& request) const;  // null: no such path
  std::optional<HttpResponse> turn_away(const HttpRequest& request, const Row* row);
  static HttpResponse error_response(const ApiError& error);
  std::string model_card(const std::string& name) const;
  // `why` is appended to the log line of a refusal.
  void answer(const Incoming& in, HttpResponse response, const std::string& why = "");
  void finish(const HttpRequest& request, const Row* row, HttpResponse& response, const std::string& why);
  void fail(const Incoming& in, const ApiError& error);
  // Runs `work`, which may take long for a large body, off the I/O thread if so; then, on the I/O
  // thread, answers with its error, or runs what it has left in `then`.
  using Then = std::function<void()>;
  void on_body(const std::shared_ptr<Incoming>& in, std::function<std::optional<ApiError>(Then& then)> work);

  std::string trouble() const { return draining_ ? "draining" : service_.trouble(); }
  void health(const Incoming& in);
  void ready(const Incoming& in);
  void generate(const std::shared_ptr<Incoming>& in, bool chat);
  void convert(const std::shared_ptr<Incoming>& in, decltype(tokenize)& text_or_ids);
  std::optional<ApiError> retire_instance(std::string_view body);

  void log_line(LogLevel level, const std::string& line);

  ServerOptions options_;
  Service& service_;
  Clock& clock_;
  HttpPost post_;
  const ServedModel& model_ = options_;
  std::vector<std::shared_ptr<Sessions>> sessions_;  // of each key; one without keys
  Metrics metrics_;
  Random random_, id_random_;
  int64_t created_unix_s_;
  bool draining_ = false;
  uint64_t last_request_id_ = 0;
  std::unordered_map<Generation*, std::shared_ptr<Generation>> live_;  // not yet answered
  double log_window_s_ = 0;                                            // start of the second in which lines are counted
  int log_lines_ = 0, log_dropped_ = 0;

  BodyThreads body_threads_;  // last: joined before the rest goes
};

// The frontend as a whole: listener and routes in front of a Service.
//
// Thread safety: run() on one thread; the others from any (not from a signal handler).
class HttpServer {
 public:
  // Binds the port (an address in use is an error that names it) and checks the options. Without a tokenizer only
  // prompts of token ids are served, without a template no chat. Everything passed by reference or pointer must live
  // until the service has ended its last request; events that come after the server has gone are dropped.
  static Result<std::unique_ptr<HttpServer>> listen(const ServerOptions& options, Service& service,
                                                    const Tokenizer* tokenizer, const ChatTemplate* chat_template,
                                                    Clock& clock);
  void run();  // until stop(), or the end of a drain

  // 503 for new requests; run() returns when what runs is answered.
  void begin_drain();
  void stop();  // drops every connection; run() returns
  int port() const { return listener_->port(); }
  bool is_loopback() const { return listener_->is_loopback(); }

 private:
  HttpServer() = default;
  std::unique_ptr<Api> api_;
  std::unique_ptr<HttpListener> listener_;  // goes first: its connections call back into the api
};

}  // namespace xpyd::server
