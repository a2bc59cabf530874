// HTTP/1.1 over TCP: one I/O thread owns every connection. Requests go to an HttpHandler, answers
// come back through an HttpExchange, whole or as a stream. Knows nothing of tokens.
//
// Bounds, all per HttpListenOptions: connections, header and body bytes, bytes of bodies held in
// all, bytes waiting for a slow reader, and the time for each phase of a connection.
//
// Where there is not enough for everybody, the one that has least to lose gives way. For a new connection: the one that
// has been without a request for longest, also where the system has no descriptor left. Where all have one, new ones
// wait to be accepted. For a body: the body that has been coming for longest. A request is judged at the end of its
// header, before its body is read.
//
// Thread safety: handler and exchanges are used on the thread in run() only. begin_drain(), stop()
// and an HttpPost may be called from any thread (not from a signal handler).
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

// ---- messages, as plain values

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

// The value of the first header of that (lower case) name; "" when there is none.
std::string_view find_header(const HttpHeaders& headers, std::string_view name);

struct HttpRequest {
  std::string method;   // as sent
  std::string path;     // of the target, without the query; not percent-decoded: no route needs it
  std::string query;    // after '?'
  int version = 11;     // 10 or 11
  HttpHeaders headers;  // names in lower case, in the order sent
  std::string body;
  bool keep_alive = true;      // the client's wish
  bool from_loopback = false;  // the client is on this machine, and no proxy stands between
  std::string_view header(std::string_view name) const { return find_header(headers, name); }
};

struct HttpResponse {
  int status = 200;
  std::string reason;  // "" = the usual phrase; benchmark clients record nothing else of an error
  std::string content_type = "application/json";
  HttpHeaders headers;  // beside Content-Type, Content-Length, Connection, Date
  std::string body;
  bool close = false;  // no further request on this connection
};

struct HttpLimits {
  size_t max_header_bytes = 32u << 10;  // request line and headers; beyond: 431
  size_t max_target_bytes = 8u << 10;   // beyond: 414
  int max_headers = 100;                // beyond: 431
  size_t max_body_bytes = 16u << 20;    // beyond: 413
};

std::string http_reason(int status);
std::string lower(std::string_view text);  // of ASCII

// ---- who asks: judged at the end of a request's header, before its body is read

// Why the request's Host, Origin, content type or content encoding is not served. `allowed_hosts` are names that Host
// may have beside addresses, localhost and this machine's name: with any name, a stranger's page
// could point its own name here and read answers as its own (DNS rebinding). `allowed_origins`: see allows_origin().
// "*": any. A status and words.
std::optional<std::pair<int, std::string>> object_to(const HttpRequest& request,
                                                     const std::vector<std::string>& allowed_hosts,
                                                     const std::vector<std::string>& allowed_origins = {});
// Whether pages of the request's Origin, which is one of the list ("https://app.example.com"; *: any), may read
// answers.
bool allows_origin(const HttpRequest& request, const std::vector<std::string>& allowed_origins);

// ---- from bytes to messages. Boost.Beast parses; what it is lenient about, and what two servers in a row could read
// differently (request smuggling), is refused here. A parser belongs to one connection.

template <bool is_request>
class BeastParser;  // http_parser.cc

class HttpParser {
 public:
  enum class State { header, body, done, failed };

  explicit HttpParser(const HttpLimits& limits);
  ~HttpParser();

  // Reads from the front of `input` and says how much of it was used; the rest must be offered
  // again, in front of what comes later. Input after a whole request is left alone (pipelining).
  size_t feed(std::string_view input);

  State state() const { return state_; }
  // The header is complete, the body is not, and the client waits for "100 Continue". True once.
  bool wants_continue();
  size_t body_bytes() const { return request_.body.size(); }  // received so far
  // state() is body or done: the header is whole.
  HttpRequest& request() { return request_; }
  // state() == done: gives the request away and is ready for the next one.
  HttpRequest take();

  // state() == failed: the answer to give before closing.
  int error_status() const { return error_status_; }
  const std::string& error() const { return error_; }

 private:
  size_t feed_header(std::string_view input);
  size_t feed_body(std::string_view input);
  bool header_block_ok(std::string_view block);
  bool framing_ok();
  bool fail(int status, std::string why);

  HttpLimits limits_;
  State state_ = State::header;
  HttpRequest request_;
  std::unique_ptr<BeastParser<true>> beast_;
  size_t scanned_ = 0;  // header bytes already searched for the end
  bool skipped_blank_line_ = false;
  bool continue_wanted_ = false;
  int error_status_ = 0;
  std::string error_;
};

// What a server sends back, however it is cut. Bounded: 64 KiB of head, 1 TiB of body. Lines of the
// head may end in LF alone; a "100 Continue" before the answer is passed over.
class HttpResponseParser {
 public:
  HttpResponseParser();
  HttpResponseParser(HttpResponseParser&&) noexcept;
  HttpResponseParser& operator=(HttpResponseParser&&) noexcept;
  ~HttpResponseParser();
  // Decoded body bytes go to `body` as they come. The error says what was malformed.
  Status feed(std::string_view bytes, const std::function<void(std::string_view)>& body);
  // The server closed: an error unless the response was complete, or ends at the close.
  Status finish();
  bool complete() const;
  int status() const;  // 0 before the head is whole
  std::string reason() const;
  std::string_view header(std::string_view name) const;

 private:
  Status head_complete();
  std::string head_, line_;                    // whole lines; the one that is coming
  std::unique_ptr<BeastParser<false>> beast_;  // null before the head is whole
  std::string rest_;  // of the body, not yet taken: a part of a chunk's head, or of the trailer
};

// ---- the listener

struct HttpListenOptions {
  std::string host = "127.0.0.1";  // a literal address or a name
  int port = 8000;                 // 0 = any free port
  HttpLimits limits;
  int max_connections = 2048;                 // beyond: the idlest gives way, or the new one waits
  size_t max_body_bytes_in_all = 256u << 20;  // bodies being received or parsed; beyond: 503
  size_t max_stream_buffer_bytes = 1u << 20;  // of a stream whose client does not read; beyond: closed
  double header_timeout_s = 10;               // from the first byte of a request, or from the connection's start
  double body_timeout_s = 30;                 // from the end of the header to the end of the body
  double idle_timeout_s = 75;                 // between two requests
  double place_s = 1;                         // without a request: then others may have its place
  double write_timeout_s = 30;                // without a byte taken by the client
};

// `wanted` connections, or as many as so many descriptors are enough for, with all else that a process opens. At least
// one.
int connections_within(int wanted, size_t descriptors);

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
  // Called at most once, when the client sends no more and the head of a stream is out already: only what is written
  // then tells whether it has gone, or still reads. (Before a head the listener finds out by itself.)
  virtual void on_half_closed(std::function<void()> callback) { (void)callback; }
  // The request's body is in memory no more.
  virtual void body_freed() {}
};

class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  virtual void handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) = 0;
  // At the end of a header, before handle(): an answer, and the body is not read.
  virtual std::optional<HttpResponse> on_header(const HttpRequest&) { return {}; }
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
