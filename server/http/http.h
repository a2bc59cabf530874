// An HTTP/1.1 server over TCP. One I/O thread owns every connection. Requests go to an HttpHandler; answers return
// through an HttpExchange, whole or as a stream. Nothing here knows of tokens.
//
// HttpListenOptions bounds the connections, header bytes, body bytes of one request and of all, bytes waiting for a
// slow reader, and the time of each phase of a connection.
//
// When a bound is reached, the connection with the least to lose gives way. A new connection replaces the one that has
// been without a request for longest, also when the system has no file descriptor left; if all have a request, new ones
// wait to be accepted. A new body replaces the body that has been arriving for longest. A request is checked at the end
// of its header, before its body is read.
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
  std::string query;    // after '?'
  int version = 11;     // 10 or 11
  HttpHeaders headers;  // names in lower case, in the order sent
  std::string body;
  bool keep_alive = true;      // the client asks for it
  bool from_loopback = false;  // the client is on this machine and no proxy is between
  std::string_view header(std::string_view name) const { return find_header(headers, name); }
};

struct HttpResponse {
  int status = 200;
  std::string reason;  // "" = the standard phrase; benchmark clients record only this of an error
  std::string content_type = "application/json";
  HttpHeaders headers;  // besides Content-Type, Content-Length, Connection, Date
  std::string body;
  bool close = false;  // close the connection after this answer
};

struct HttpLimits {
  size_t max_header_bytes = 32u << 10;  // request line and headers; beyond: 431
  size_t max_target_bytes = 8u << 10;   // beyond: 414
  int max_headers = 100;                // beyond: 431
  size_t max_body_bytes = 16u << 20;    // beyond: 413
};

std::string http_reason(int status);
std::string lower(std::string_view text);  // ASCII only

// ---- Access checks at the end of a request's header, before its body is read.

// Returns why the request's Host, Origin, content type or content encoding is refused, as status and text. Addresses,
// localhost, this machine's name and `allowed_hosts` may stand in Host ("*": any). Without this check a web page of a
// stranger could point its own name at this server and read the answers as its own (DNS rebinding). `allowed_origins`:
// see allows_origin().
std::optional<std::pair<int, std::string>> object_to(const HttpRequest& request,
                                                     const std::vector<std::string>& allowed_hosts,
                                                     const std::vector<std::string>& allowed_origins = {});
// True if the request's Origin is in the list ("https://app.example.com"; "*": any): its pages may read answers.
bool allows_origin(const HttpRequest& request, const std::vector<std::string>& allowed_origins);

// ---- Parsers. Boost.Beast parses. This code refuses what Beast tolerates and what two servers in a row could read
// differently (request smuggling). A parser belongs to one connection.

template <bool is_request>
class BeastParser;  // http_parser.cc

class HttpParser {
 public:
  enum class State { header, body, done, failed };

  explicit HttpParser(const HttpLimits& limits);
  ~HttpParser();

  // Parses from the front of `input` and returns how many bytes it used. Offer the rest again, in front of later input.
  // Input after a complete request is not used (pipelining).
  size_t feed(std::string_view input);

  State state() const { return state_; }
  // True once, if the header is complete, the body is not, and the client waits for "100 Continue".
  bool wants_continue();
  size_t body_bytes() const { return request_.body.size(); }  // received so far
  // Requires: state() is body or done, so the header is complete.
  HttpRequest& request() { return request_; }
  // Requires: state() == done. Moves the request out; the parser is then ready for the next one.
  HttpRequest take();

  // Requires: state() == failed. The answer to give before closing.
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
  size_t scanned_ = 0;  // header bytes already searched for its end
  bool skipped_blank_line_ = false;
  bool continue_wanted_ = false;
  int error_status_ = 0;
  std::string error_;
};

// Parses a server's response with any framing. Bounds: 64 KiB of head, 1 TiB of body. Head lines may end in LF alone. A
// "100 Continue" before the answer is skipped.
class HttpResponseParser {
 public:
  HttpResponseParser();
  HttpResponseParser(HttpResponseParser&&) noexcept;
  HttpResponseParser& operator=(HttpResponseParser&&) noexcept;
  ~HttpResponseParser();
  // Passes decoded body bytes to `body` as they arrive. The error says what is malformed.
  Status feed(std::string_view bytes, const std::function<void(std::string_view)>& body);
  // Call when the server closed. Error, unless the response is complete or ends at the close.
  Status finish();
  bool complete() const;
  int status() const;  // 0 until the head is complete
  std::string reason() const;
  std::string_view header(std::string_view name) const;

 private:
  Status head_complete();
  std::string head_, line_;                    // complete lines; the unfinished line
  std::unique_ptr<BeastParser<false>> beast_;  // null until the head is complete
  std::string rest_;                           // body bytes not consumed yet: part of a chunk header or of the trailer
};

// ---- The listener.

struct HttpListenOptions {
  std::string host = "127.0.0.1";  // a literal address or a name
  int port = 8000;                 // 0 = any free port
  HttpLimits limits;
  int max_connections = 2048;                 // beyond: the idlest closes, or the new one waits
  size_t max_body_bytes_in_all = 256u << 20;  // bodies being received or parsed; beyond: 503
  size_t max_stream_buffer_bytes = 1u << 20;  // of a stream whose client does not read; beyond: closed
  double header_timeout_s = 10;               // from the first byte of a request or the start of the connection
  double body_timeout_s = 30;                 // from the end of the header to the end of the body
  double idle_timeout_s = 75;                 // between two requests
  double place_s = 1;                         // after this time without a request another may take its place
  double write_timeout_s = 30;                // during which the client takes no byte
};

// Returns `wanted`, or as many connections as `descriptors` allow beside all other files that the process opens. At
// least 1.
int connections_within(int wanted, size_t descriptors);

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
  // The callback is called at most once: when the client goes away (or stops reading) before the answer is complete.
  virtual void on_gone(std::function<void()> callback) = 0;
  // The callback is called at most once: when the client sends no more and the head of a stream is already out. Only a
  // later write can then tell whether the client still reads. (Before the head, the listener finds out by itself.)
  virtual void on_half_closed(std::function<void()> callback) { (void)callback; }
  // Tells the listener that the request's body is no longer in memory.
  virtual void body_freed() {}
};

class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  virtual void handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) = 0;
  // Called at the end of a header, before handle(). If it returns an answer, the body is not read.
  virtual std::optional<HttpResponse> on_header(const HttpRequest&) { return {}; }
  // Returns the answer to input that is no request or comes at a bad time (status 4xx or 503).
  virtual HttpResponse refuse(int status, const std::string& why) = 0;
  virtual void tick() {}  // about every half second
};

// Runs a function on the I/O thread, soon. Callable from any thread; does not block. After the listener is gone the
// function is dropped.
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
