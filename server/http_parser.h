// HTTP messages as plain values, and the way from bytes to them. Boost.Beast parses; what it is lenient about, and what
// two servers in a row could read differently (request smuggling), is refused here.
//
// Thread safety: none; one parser belongs to one connection.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace xpyd::server {

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
  std::string client;          // its address (client_address in access.h)
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

}  // namespace xpyd::server
