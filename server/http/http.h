// An HTTP/1.1 server over TCP. One I/O thread owns every connection. Requests go to an HttpHandler; answers return
// through an HttpExchange, whole or as a stream. Nothing here knows of tokens.
//
// HttpListenOptions bounds the connections, header bytes, body bytes, bytes waiting for a slow reader, and the time of
// each phase of a connection. A request is checked at the end of its header, before its body is read.
//
// Thread safety: handler and exchanges are used only on the thread that is in run(). begin_drain(), stop() and an
// HttpPost may be called from any thread, but not from a signal handler.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace xpyd::server {

// ---- Messages, as plain values.

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

// The value of the first header with that name (in lower case); "" if there is none.
std::string_view find_header(const HttpHeaders& headers, std::string_view name);

struct HttpRequest {
  std::string method;   // as sent
  std::string path;     // without the query; not percent-decoded, because no route needs it
  HttpHeaders headers;  // names in lower case
  std::string body;
  bool from_loopback = false;  // the client is on this machine
  std::string_view header(std::string_view name) const { return find_header(headers, name); }
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  HttpHeaders headers;  // besides Content-Type, Content-Length, Connection
  std::string body;
  bool close = false;  // close the connection after this answer
};

std::string lower(std::string_view text);  // ASCII only

// ---- Access checks at the end of a request's header, before its body is read.

// Returns why the request's Host, Origin, content type or content encoding is refused, as status and text. Addresses,
// localhost, this machine's name and `allowed_hosts` may stand in Host ("*": any). Without this check a web page of a
// stranger could point its own name at this server and read the answers as its own (DNS rebinding).
std::optional<std::pair<int, std::string>> object_to(const HttpRequest& request,
                                                     const std::vector<std::string>& allowed_hosts);

// ---- The listener.

struct HttpListenOptions {
  std::string host = "127.0.0.1";             // a literal address or a name
  int port = 8000;                            // 0 = any free port
  int max_connections = 2048;                 // beyond: new ones wait to be accepted
  size_t max_header_bytes = 32u << 10;        // request line and headers; beyond: 431
  size_t max_body_bytes = 16u << 20;          // beyond: 413
  size_t max_stream_buffer_bytes = 1u << 20;  // of a stream whose client does not read; beyond: closed
  double idle_timeout_s = 75;                 // until the first byte of a request
  double receive_timeout_s = 30;              // from there to the end of its body
  double write_timeout_s = 30;                // during which the client takes no byte
};

// The answer to one request. All calls are ignored once the client has gone.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;
  // Call exactly one of respond() (the whole answer) and begin_stream(). A stream continues with write()s and ends with
  // one end_stream().
  virtual void respond(HttpResponse response) = 0;
  virtual void begin_stream(HttpResponse head) = 0;  // body empty
  virtual void write(std::string bytes) = 0;
  virtual void end_stream() = 0;
  // The callback is called at most once: when the client goes away, stops reading or closes its sending side before the
  // answer is complete.
  virtual void on_gone(std::function<void()> callback) = 0;
};

class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  virtual void handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) = 0;
  // Called at the end of a header, before handle(). If it returns an answer, the body is not read.
  virtual std::optional<HttpResponse> on_header(const HttpRequest&) { return {}; }
  // Returns the answer to input that is no request or comes at a bad time (status 4xx or 503).
  virtual HttpResponse refuse(int status, const std::string& why) = 0;
};

// Runs a function on the I/O thread, soon. Callable from any thread; does not block. After the listener is gone the
// function does not run.
using HttpPost = std::function<void(std::function<void()>)>;

class HttpListener {
 public:
  // Binds and listens. Error: an address in use, named.
  static Result<std::unique_ptr<HttpListener>> open(const HttpListenOptions& options);
  ~HttpListener();

  void run(HttpHandler& handler);  // returns after stop(), or when a drain is complete
  // Closes every connection after its next answer. run() returns when connections that exist now have theirs. Later
  // connections are answered too (the handler says 503 by then), but not waited for.
  void begin_drain();
  void stop();  // closes everything; run() returns
  int port() const;
  bool is_loopback() const;  // only clients on this machine reach it
  HttpPost post() const;

 private:
  struct Loop;
  class Connection;
  class Exchange;
  explicit HttpListener(std::shared_ptr<Loop> loop);
  std::shared_ptr<Loop> loop_;
};

}  // namespace xpyd::server
