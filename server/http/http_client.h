// A small HTTP/1.1 client for load tests. It holds thousands of streamed answers on one thread and time-stamps each
// byte on arrival. Each request has its own connection, so connection set-up is part of the measurement.
//
// Thread safety: each object belongs to one thread. Callbacks of an HttpClient run inside poll() and may call start().
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/http/http.h"

namespace xpyd::server {

struct HttpUrl {
  std::string host;  // name or address, IPv6 without brackets
  int port = 80;
  std::string prefix;             // path before every target: "" or "/base", without a final slash
  std::string authority() const;  // value of the Host header
};

// Parses "http://host:port/base".
Result<HttpUrl> parse_http_url(const std::string& text);

struct HttpCall {
  std::string method = "POST", target;  // the URL's prefix is put before the target
  std::string body;                     // JSON; "" sends none
  double timeout_s = 60;                // of the whole call
};

struct HttpOutcome {
  int status = 0;  // 0: no response
  std::string reason;
  std::string error;        // "" if the response arrived completely, whatever its status
  std::string retry_after;  // the header's value
};

class HttpClient {
 public:
  using OnBody = std::function<void(int status, std::string_view bytes)>;  // decoded bytes
  using OnDone = std::function<void(const HttpOutcome& outcome)>;

  // Resolves the name now. `headers` are sent with every request.
  static Result<std::unique_ptr<HttpClient>> create(const HttpUrl& url, HttpHeaders headers);
  ~HttpClient();  // drops calls in flight, without callbacks

  // Calls on_done exactly once, unless the client is destroyed or abort_all() is called first.
  void start(const HttpCall& call, OnBody on_body, OnDone on_done);
  // Waits for the network, at most `seconds` and at most 0.1 s, and runs callbacks that are due.
  void poll(double seconds);
  int in_flight() const;
  void abort_all();

  // Runs one call and waits for it. Returns the body of a 2xx answer; otherwise an error that names the call and the
  // reason.
  Result<std::string> fetch(const HttpCall& call);

 private:
  struct Impl;
  struct Connection;
  explicit HttpClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Splits a text/event-stream into events and passes on the data of each, lines joined by "\n".
class SseParser {
 public:
  // False: an event has more than 16 MiB.
  bool feed(std::string_view bytes, const std::function<void(const std::string&)>& event);

 private:
  std::string line_, data_;
  bool has_data_ = false, after_cr_ = false;
};

}  // namespace xpyd::server
