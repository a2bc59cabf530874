// HTTP/1.1 over TCP: one I/O thread owns every connection. Requests go to an HttpHandler, answers
// come back through an HttpExchange, whole or as a stream. Knows nothing of tokens.
//
// Bounds, all per HttpListenOptions: connections, header and body bytes, bytes of bodies held in
// all, bytes waiting for a slow reader, and the time for each phase of a connection.
//
// Where there is not enough for everybody, the one that has least to lose gives way. For a new connection: the one that
// has been without a request for longest. Where all have one, the new one has a place in the waiting room: what it asks
// is heard, probes are answered at once, the rest waits for a place. For a body: of the address that holds most bytes,
// the body that has been coming for longest. A request is judged at the end of its header, before its body is read.
//
// Thread safety: handler and exchanges are used on the thread in run() only. begin_drain(), stop()
// and an HttpPost may be called from any thread (not from a signal handler).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/http_parser.h"

namespace xpyd::server {

struct HttpListenOptions {
  std::string host = "127.0.0.1";  // a literal address or a name
  int port = 8000;                 // 0 = any free port
  HttpLimits limits;
  int max_connections = 2048;                 // beyond: they wait for a place
  int max_connections_per_address = 1024;     // of them; those of trusted proxies do not count
  std::vector<std::string> trusted_proxies;   // addresses whose X-Forwarded-For is believed
  size_t max_body_bytes_in_all = 256u << 20;  // bodies being received or parsed; beyond: 503
  size_t max_stream_buffer_bytes = 1u << 20;  // of a stream whose client does not read; beyond: closed
  double header_timeout_s = 10;               // from the first byte of a request, or from the connection's start
  double body_timeout_s = 30;                 // from the end of the header to the end of the body
  double idle_timeout_s = 75;                 // between two requests
  double place_s = 1;                         // without a request: then others may have its place
  double write_timeout_s = 30;                // without a byte taken by the client
};

// The answer to one request. After the client has gone every call is ignored.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;
  // The whole answer; or the head of a stream, followed by write()s and one end_stream(). Exactly
  // one of respond and begin_stream.
  virtual void respond(HttpResponse response) = 0;
  virtual void begin_stream(HttpResponse head) = 0;  // body empty
  virtual void write(std::string bytes) = 0;
  virtual void end_stream() = 0;
  // Called at most once, when the client goes away (or does not read) before the answer is complete.
  virtual void on_gone(std::function<void()> callback) = 0;
  // The request's body is in memory no more.
  virtual void body_freed() {}
};

class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  virtual void handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) = 0;
  // At the end of a header, before handle(): an answer, and the body is not read.
  virtual std::optional<HttpResponse> on_header(const HttpRequest&) { return {}; }
  virtual bool is_probe(const HttpRequest&) { return false; }  // answered without a place
  // The answer to what was not a request, or came at a bad time (status 4xx or 503).
  virtual HttpResponse refuse(int status, const std::string& why) = 0;
  virtual void tick() {}  // about every half second
};

// Runs a function on the I/O thread, soon. Any thread; does not block; after the listener is gone
// the function is dropped.
using HttpPost = std::function<void(std::function<void()>)>;

class HttpListener {
 public:
  // Binds and listens. An address in use is an error that names it.
  static Result<std::unique_ptr<HttpListener>> open(const HttpListenOptions& options);
  ~HttpListener();

  void run(HttpHandler& handler);  // until stop(), or until a drain is complete
  // Every connection is closed after its next answer. run() returns when those that were there have
  // theirs; who comes meanwhile is answered too (by then the handler says 503), and not waited for.
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
