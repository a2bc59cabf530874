#define BOOST_ASIO_DISABLE_FENCED_BLOCK  // see boost_asio_impl.cc
#include "server/http_parser.h"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/http/basic_parser.hpp>
#include <cctype>

#include "base/status.h"

namespace xpyd {
namespace {

namespace http = boost::beast::http;
using boost::beast::string_view;
using error_code = boost::beast::error_code;

// Bytes that may wait for the rest of a chunk header or of the trailers.
constexpr size_t kMaxChunkHeaderBytes = 8u << 10;

bool is_token_char(unsigned char c) {
  return std::isalnum(c) || std::string_view("!#$%&'*+-.^_`|~").find(char(c)) != std::string::npos;
}

// Whether a comma-separated header value contains `word`.
bool has_word(std::string_view list, std::string_view word) {
  std::string text = lower(list);
  for (size_t at = 0; at <= text.size();) {
    size_t end = std::min(text.find(',', at), text.size());
    std::string_view item = std::string_view(text).substr(at, end - at);
    while (!item.empty() && (item.front() == ' ' || item.front() == '\t')) item.remove_prefix(1);
    while (!item.empty() && (item.back() == ' ' || item.back() == '\t')) item.remove_suffix(1);
    if (item == word) return true;
    at = end + 1;
  }
  return false;
}

// "GET / HTTP/9.9": HTTP, of a version that is not ours. "GET /a b HTTP/1.1" is no HTTP at all.
bool third_word_is_http(std::string_view line) {
  size_t first = line.find(' ');
  size_t second = first == line.npos ? first : line.find(' ', first + 1);
  return second != line.npos && line.substr(second + 1).starts_with("HTTP/");
}

}  // namespace

const char* http_reason(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 409: return "Conflict";
    case 410: return "Gone";
    case 413: return "Payload Too Large";
    case 414: return "URI Too Long";
    case 415: return "Unsupported Media Type";
    case 417: return "Expectation Failed";
    case 431: return "Request Header Fields Too Large";
    case 500: return "Internal Server Error";
    case 501: return "Not Implemented";
    case 503: return "Service Unavailable";
    case 504: return "Gateway Timeout";
    case 505: return "HTTP Version Not Supported";
    default: return "Unknown";
  }
}

// Beast's callbacks into our HttpRequest.
class HttpParser::Beast final : public http::basic_parser<true> {
 public:
  Beast(HttpRequest& request, const HttpLimits& limits) : request_(request) {
    // The block's size was checked before Beast sees it; this only keeps its own smaller default
    // away.
    header_limit(static_cast<uint32_t>(limits.max_header_bytes + 4));
    body_limit(limits.max_body_bytes);
    eager(true);
  }
  std::string target;

 private:
  void on_request_impl(http::verb, string_view method, string_view uri, int version, error_code&) override {
    request_.method.assign(method.data(), method.size());
    target.assign(uri.data(), uri.size());
    request_.version = version;
  }
  void on_response_impl(int, string_view, int, error_code&) override {}
  void on_field_impl(http::field, string_view name, string_view value, error_code&) override {
    if (header_done_) return;  // a trailer must not pass for a header
    request_.headers.emplace_back(lower({name.data(), name.size()}), std::string(value.data(), value.size()));
  }
  // Pure virtual in later versions of Beast only.
  virtual void on_trailer_field_impl(http::field, string_view, string_view, error_code&) {}
  void on_header_impl(error_code&) override { header_done_ = true; }
  void on_body_init_impl(boost::optional<uint64_t> const&, error_code&) override {}
  size_t on_body_impl(string_view body, error_code&) override {
    request_.body.append(body.data(), body.size());
    return body.size();
  }
  void on_chunk_header_impl(uint64_t, string_view, error_code&) override {}
  size_t on_chunk_body_impl(uint64_t, string_view body, error_code&) override {
    request_.body.append(body.data(), body.size());
    return body.size();
  }
  void on_finish_impl(error_code&) override {}

  HttpRequest& request_;
  bool header_done_ = false;
};

HttpParser::HttpParser(const HttpLimits& limits) : limits_(limits) {}
HttpParser::~HttpParser() = default;

bool HttpParser::fail(int status, std::string why) {
  state_ = State::failed;
  error_status_ = status;
  error_ = std::move(why);
  return false;
}

size_t HttpParser::feed(std::string_view input) {
  if (input.empty()) return 0;
  if (state_ == State::header) return feed_header(input);
  if (state_ == State::body) return feed_beast(input);
  return 0;
}

size_t HttpParser::feed_header(std::string_view input) {
  if (scanned_ == 0 && !skipped_blank_line_) {  // RFC 9112, 2.2: one empty line before a request
    if (input == "\r") return 0;
    if (input.starts_with("\r\n")) {
      skipped_blank_line_ = true;
      return 2;
    }
  }
  if (!is_token_char(static_cast<unsigned char>(input[0]))) return fail(400, "not an HTTP request"), 0;
  // Line ends are looked at as they come, so that a client with bare LFs hears of it at once.
  for (size_t at = scanned_; at < input.size(); ++at) {
    if (at >= limits_.max_header_bytes)
      return fail(431, "request header longer than " + std::to_string(limits_.max_header_bytes) + " bytes"), 0;
    if (input[at] != '\n') continue;
    if (at == 0 || input[at - 1] != '\r') return fail(400, "line ends with LF without CR"), 0;
    if (at >= 3 && input[at - 3] == '\r' && input[at - 2] == '\n') {
      size_t size = at + 1;
      if (!header_block_ok(input.substr(0, size))) return 0;
      beast_ = std::make_unique<Beast>(request_, limits_);
      error_code failed;
      size_t used = 0;
      // Beast is given the header alone, so that the framing is judged before any body byte.
      used = beast_->put(boost::asio::buffer(input.data(), size), failed);
      if (failed == http::error::body_limit)
        return fail(413, "request body larger than " + std::to_string(limits_.max_body_bytes) + " bytes"), 0;
      if (failed && failed != http::error::need_more) {
        bool version = failed == http::error::bad_version && third_word_is_http(input);
        return fail(version ? 505 : 400, version ? std::string("HTTP version must be 1.0 or 1.1")
                                                 : "malformed request: " + failed.message()),
               0;
      }
      if (!beast_->is_header_done() || used != size) return fail(400, "malformed request header"), 0;
      if (!framing_ok()) return 0;
      state_ = beast_->is_done() ? State::done : State::body;
      continue_wanted_ = continue_wanted_ && state_ == State::body;
      return size;
    }
  }
  scanned_ = input.size();
  return 0;
}

// What Beast would let pass: folded lines (it unfolds them), NULs and stray CRs, any number of
// headers.
bool HttpParser::header_block_ok(std::string_view block) {
  size_t line_end = block.find("\r\n");
  size_t space = block.find(' ');
  size_t second = space < line_end ? block.find(' ', space + 1) : space;
  if (std::min(second, line_end) - std::min(space, line_end) > limits_.max_target_bytes + 1)
    return fail(414, "request target longer than " + std::to_string(limits_.max_target_bytes) + " bytes");
  int lines = -1;  // headers: without the request line and the empty one
  for (size_t at = 0; at + 2 < block.size(); ++lines) {
    size_t end = block.find("\r\n", at);
    std::string_view line = block.substr(at, end - at);
    if (line.starts_with(' ') || line.starts_with('\t')) return fail(400, "folded header line");
    for (unsigned char c : line)
      if ((c < 0x20 && c != '\t') || c == 0x7f) return fail(400, "control character in the request header");
    at = end + 2;
  }
  if (lines > limits_.max_headers)
    return fail(431, "more than " + std::to_string(limits_.max_headers) + " request headers");
  return true;
}

// One request, one length: everything that leaves a choice of where the body ends is refused.
bool HttpParser::framing_ok() {
  int n_lengths = 0, n_encodings = 0, n_hosts = 0;
  for (const auto& [name, value] : request_.headers) {
    if (name == "content-length") {
      ++n_lengths;
      bool digits = !value.empty() && value.size() <= 19 &&
                    std::all_of(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; });
      if (!digits) return fail(400, "Content-Length is not a number");
    }
    if (name == "transfer-encoding") {
      ++n_encodings;
      if (lower(value) != "chunked") return fail(501, "Transfer-Encoding other than chunked is not supported");
    }
    if (name == "host") ++n_hosts;
    if (name == "expect") {
      if (lower(value) != "100-continue") return fail(417, "Expect other than 100-continue");
      continue_wanted_ = request_.version >= 11;
    }
  }
  if (n_lengths > 1) return fail(400, "more than one Content-Length");
  if (n_encodings > 1 || (n_encodings == 1 && n_lengths == 1))
    return fail(400, "more than one way to tell where the body ends");
  if (n_encodings == 1 && request_.version < 11) return fail(400, "Transfer-Encoding in an HTTP/1.0 request");
  if (n_hosts > 1 || (n_hosts == 0 && request_.version >= 11))
    return fail(400, n_hosts > 1 ? "more than one Host header" : "no Host header");

  std::string_view target = beast_->target;
  if (target.starts_with("http://") || target.starts_with("https://")) {  // absolute form
    target.remove_prefix(target.find("//") + 2);
    size_t slash = target.find('/');
    target = slash == target.npos ? std::string_view("/") : target.substr(slash);
  }
  if (!target.starts_with('/') && target != "*") return fail(400, "request target is not a path");
  size_t mark = target.find('?');
  request_.path = std::string(target.substr(0, mark));
  if (mark != target.npos) request_.query = std::string(target.substr(mark + 1));

  std::string_view connection = request_.header("connection");
  request_.keep_alive = request_.version >= 11 ? !has_word(connection, "close") : has_word(connection, "keep-alive");
  return true;
}

size_t HttpParser::feed_beast(std::string_view input) {
  error_code failed;
  size_t used = 0;
  while (used < input.size() && !beast_->is_done()) {
    used += beast_->put(boost::asio::buffer(input.data() + used, input.size() - used), failed);
    if (failed) break;
  }
  if (beast_->is_done()) {
    state_ = State::done;
  } else if (failed == http::error::body_limit) {
    fail(413, "request body larger than " + std::to_string(limits_.max_body_bytes) + " bytes");
  } else if (failed && failed != http::error::need_more) {
    fail(400, "malformed request body: " + failed.message());
  } else if (input.size() - used > kMaxChunkHeaderBytes) {
    fail(400, "chunk header or trailer longer than " + std::to_string(kMaxChunkHeaderBytes) + " bytes");
  }
  return used;
}

bool HttpParser::wants_continue() { return state_ == State::body && std::exchange(continue_wanted_, false); }

HttpRequest HttpParser::take() {
  XPYD_CHECK(state_ == State::done);
  HttpRequest out = std::move(request_);
  request_ = HttpRequest();
  beast_.reset();
  state_ = State::header;
  scanned_ = 0;
  skipped_blank_line_ = false;
  continue_wanted_ = false;
  return out;
}

}  // namespace xpyd
