// A small HTTP/1.1 client for load: thousands of streamed answers at once on one thread, each byte stamped when it
// arrives. One connection per request, so a connection's set-up is part of what is measured.
//
// Thread safety: each object belongs to one thread; an HttpClient's callbacks run inside poll() and may call start().
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
  std::string prefix;  // path before every target: "" or "/base", no slash at the end
  bool tls = false;
  std::string authority() const;  // for the Host header
};

// "http://host:port/base", or https.
Result<HttpUrl> parse_http_url(const std::string& text);

struct HttpCall {
  std::string method = "POST", target;  // the target follows the URL's prefix
  std::string body;                     // JSON; "" sends none
  double timeout_s = 60;                // of the whole call
};

struct HttpOutcome {
  int status = 0;  // 0: no response
  std::string reason;
  std::string error;        // "" when the response came whole, whatever its status
  std::string retry_after;  // the header, as it is
};

class HttpClient {
 public:
  using OnBody = std::function<void(int status, std::string_view bytes)>;  // decoded
  using OnDone = std::function<void(const HttpOutcome& outcome)>;

  // Resolves the name now. `headers` go with every request.
  static Result<std::unique_ptr<HttpClient>> create(const HttpUrl& url, HttpHeaders headers);
  ~HttpClient();  // drops what is in flight, without callbacks

  // on_done is called exactly once unless the client is destroyed or abort_all is called first.
  void start(const HttpCall& call, OnBody on_body, OnDone on_done);
  // Waits at most `seconds` (and 0.1) for the network and runs what is due.
  void poll(double seconds);
  int in_flight() const;
  void abort_all();

  // One call, awaited: the body of a 2xx answer; otherwise an error that says which call and why.
  Result<std::string> fetch(const HttpCall& call);

 private:
  struct Impl;
  struct Connection;
  explicit HttpClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Bytes of a text/event-stream -> the data of each event, lines joined by "\n".
class SseParser {
 public:
  // False: an event of more than 16 MiB.
  bool feed(std::string_view bytes, const std::function<void(const std::string&)>& event);

 private:
  std::string line_, data_;
  bool has_data_ = false, after_cr_ = false;
};

}  // namespace xpyd::server
