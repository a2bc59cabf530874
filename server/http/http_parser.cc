#define BOOST_ASIO_DISABLE_FENCED_BLOCK  // see boost_impl.cc
#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <boost/beast/http/status.hpp>
#include <cctype>

#include "server/http/http.h"

namespace xpyd::server {
namespace {

namespace http = boost::beast::http;
using boost::beast::string_view;
using error_code = boost::beast::error_code;

// Bytes that may wait for the rest of a chunk header or of the trailers.
constexpr size_t kMaxChunkHeaderBytes = 8u << 10;

// Bounds of a response.
constexpr size_t kMaxHeadBytes = 64u << 10, kMaxChunkSizeBytes = 256;
constexpr uint64_t kMaxResponseBytes = uint64_t{1} << 40;

Error malformed(const std::string& what) { return {ErrorCode::io, "malformed response: " + what}; }

bool is_token_char(unsigned char c) {
  return std::isalnum(c) || std::string_view("!#$%&'*+-.^_`|~").find(char(c)) != std::string::npos;
}

// True if a comma-separated header value contains `word`.
bool has_word(std::string_view list, std::string_view word) {
  return http::token_list(string_view(list.data(), list.size())).exists(string_view(word.data(), word.size()));
}

// "GET / HTTP/9.9" is HTTP of an unsupported version. "GET /a b HTTP/1.1" is not HTTP.
bool third_word_is_http(std::string_view line) {
  size_t first = line.find(' ');
  size_t second = first == line.npos ? first : line.find(' ', first + 1);
  return second != line.npos && line.substr(second + 1).starts_with("HTTP/");
}

// "name:80", "[::1]:80" -> "name", "::1".
std::string host_name(std::string_view host) {
  if (host.starts_with('[')) return lower(host.substr(1, host.find(']') - 1));
  return lower(host.substr(0, host.find(':')));
}

bool is_address(const std::string& name) {
  const std::string text(name.substr(0, name.find('%')));  // without the zone (interface name)
  in6_addr any;
  return inet_pton(AF_INET, text.c_str(), &any) == 1 || inet_pton(AF_INET6, text.c_str(), &any) == 1;
}

bool is_own_name(const std::string& name) {
  char own[256] = "";
  gethostname(own, sizeof own - 1);
  return name == "localhost" || name.ends_with(".localhost") || name == lower(own) || is_address(name);
}

bool is_json(std::string_view type) {
  const std::string text = lower(type.substr(0, type.find(';')));
  return text.substr(0, text.find(' ')) == "application/json";
}

}  // namespace

std::string_view find_header(const HttpHeaders& headers, std::string_view name) {
  for (const auto& [key, value] : headers)
    if (key == name) return value;
  return {};
}

std::string http_reason(int status) {
  const string_view reason = http::obsolete_reason(static_cast<http::status>(status));
  return {reason.data(), reason.size()};
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
  return out;
}

// ---- Access checks.

bool allows_origin(const HttpRequest& request, const std::vector<std::string>& allowed_origins) {
  const std::string origin = lower(request.header("origin"));
  return !origin.empty() && std::any_of(allowed_origins.begin(), allowed_origins.end(),
                                        [&](const std::string& one) { return one == "*" || lower(one) == origin; });
}

std::optional<std::pair<int, std::string>> object_to(const HttpRequest& request,
                                                     const std::vector<std::string>& allowed_hosts,
                                                     const std::vector<std::string>& allowed_origins) {
  const std::string_view host = request.header("host"), origin = request.header("origin");
  auto listed = [&](const std::string& name) {
    return std::any_of(allowed_hosts.begin(), allowed_hosts.end(),
                       [&](const std::string& one) { return one == "*" || lower(one) == name; });
  };
  if (!host.empty() && !is_own_name(host_name(host)) && !listed(host_name(host)))
    return std::pair(403, "this server does not have the name in the Host header; --allowed-hosts sets its names");
  // A browser's Origin names the page that sends the request. Our own page has our own name.
  if (!origin.empty() && !allows_origin(request, allowed_origins)) {
    const size_t at = origin.find("://");
    const std::string_view from = at == origin.npos ? "" : origin.substr(at + 3);
    const bool named =  // behind a proxy the Host may differ
        std::any_of(allowed_hosts.begin(), allowed_hosts.end(),
                    [&](const std::string& one) { return lower(one) == lower(from); });
    if (from.empty() || (lower(from) != lower(host) && !named))
      return std::pair(403,
                       "this server does not answer requests from web pages of another origin; --allowed-origins sets "
                       "which it does");
  }
  // A form or script of another origin may send other content types without a preflight request.
  const std::string_view type = request.header("content-type"), length = request.header("content-length");
  const bool body = !request.header("transfer-encoding").empty() || length.find_first_not_of('0') != length.npos;
  if (request.method == "POST" && (body || !type.empty()) && !is_json(type))
    return std::pair(415, "expected a body with Content-Type: application/json");
  const std::string encoding = lower(request.header("content-encoding"));
  if (!encoding.empty() && encoding != "identity")
    return std::pair(
        415, "Content-Encoding: " + encoding.substr(0, 64) + " is not supported: send the body without encoding");
  return {};
}

// ---- Parsing.

// Adapts Beast's callbacks to our messages.
template <bool is_request>
class BeastParser final : public http::basic_parser<is_request> {
 public:
  // Both bounds are checked before Beast sees a byte of the head, so Beast's own smaller default is raised.
  BeastParser(size_t max_head_bytes, uint64_t max_body_bytes) {
    this->header_limit(static_cast<uint32_t>(max_head_bytes + 4));
    this->body_limit(max_body_bytes);
    this->eager(true);
  }
  // Returns how many bytes it used. A need for more bytes is not an error.
  size_t take(std::string_view bytes, error_code& failed) {
    size_t used = 0;
    while (used < bytes.size() && !this->is_done() && !failed)
      used += this->put(boost::asio::buffer(bytes.data() + used, bytes.size() - used), failed);
    if (failed == http::error::need_more) failed = {};
    return used;
  }

  std::string method, target, reason;
  int version = 0, status = 0;
  HttpHeaders headers;
  std::function<void(std::string_view)> on_body;
  bool after_chunk() const { return this->chunked() && n_chunks_ > 0 && chunk_left_ == 0; }

 private:
  void on_request_impl(http::verb, string_view word, string_view uri, int its_version, error_code&) override {
    method.assign(word.data(), word.size());
    target.assign(uri.data(), uri.size());
    version = its_version;
  }
  void on_response_impl(int code, string_view words, int, error_code&) override {
    status = code;
    reason.assign(words.data(), words.size());
  }
  void on_field_impl(http::field, string_view name, string_view value, error_code&) override {
    if (header_done_) return;  // a trailer must not act as a header
    headers.emplace_back(lower({name.data(), name.size()}), std::string(value.data(), value.size()));
  }
  // Pure virtual only in later versions of Beast.
  virtual void on_trailer_field_impl(http::field, string_view, string_view, error_code&) {}
  void on_header_impl(error_code&) override { header_done_ = true; }
  void on_body_init_impl(boost::optional<uint64_t> const&, error_code&) override {}
  size_t on_body_impl(string_view body, error_code&) override {
    on_body({body.data(), body.size()});
    return body.size();
  }
  void on_chunk_header_impl(uint64_t size, string_view, error_code&) override {
    ++n_chunks_;
    chunk_left_ = size;
  }
  size_t on_chunk_body_impl(uint64_t, string_view body, error_code& failed) override {
    chunk_left_ -= body.size();
    return on_body_impl(body, failed);
  }
  void on_finish_impl(error_code&) override {}

  bool header_done_ = false;
  uint64_t n_chunks_ = 0, chunk_left_ = 0;
};

// ---- Requests.

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
  if (state_ == State::body) return feed_body(input);
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
  if (!is_token_char(static_cast<unsigned char>(input[0]))) return fail(400, "this is not an HTTP request"), 0;
  // Line ends are checked as they arrive, so that a client with bare LFs gets its error at once.
  for (size_t at = scanned_; at < input.size(); ++at) {
    if (at >= limits_.max_header_bytes)
      return fail(431, "the request header is longer than " + std::to_string(limits_.max_header_bytes) + " bytes"), 0;
    if (input[at] != '\n') continue;
    if (at == 0 || input[at - 1] != '\r') return fail(400, "a header line ends with LF without CR"), 0;
    if (at >= 3 && input[at - 3] == '\r' && input[at - 2] == '\n') {
      size_t size = at + 1;
      if (!header_block_ok(input.substr(0, size))) return 0;
      beast_ = std::make_unique<BeastParser<true>>(limits_.max_header_bytes, limits_.max_body_bytes);
      beast_->on_body = [this](std::string_view bytes) { request_.body += bytes; };
      error_code failed;
      // Beast gets only the header, so that the framing is checked before any body byte.
      const size_t used = beast_->take(input.substr(0, size), failed);
      request_.method = beast_->method;
      request_.version = beast_->version;
      request_.headers = std::move(beast_->headers);
      if (failed == http::error::body_limit)
        return fail(413, "the request body is larger than " + std::to_string(limits_.max_body_bytes) + " bytes"), 0;
      if (failed) {
        bool version = failed == http::error::bad_version && third_word_is_http(input);
        return fail(version ? 505 : 400, version ? std::string("expected HTTP version 1.0 or 1.1")
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

// Refuses what Beast tolerates: folded lines (Beast unfolds them), NULs, stray CRs, any number of headers.
bool HttpParser::header_block_ok(std::string_view block) {
  size_t line_end = block.find("\r\n");
  size_t space = block.find(' ');
  size_t second = space < line_end ? block.find(' ', space + 1) : space;
  if (std::min(second, line_end) - std::min(space, line_end) > limits_.max_target_bytes + 1)
    return fail(414, "the request target is longer than " + std::to_string(limits_.max_target_bytes) + " bytes");
  int lines = -1;  // header lines: request line and empty line are not counted
  for (size_t at = 0; at + 2 < block.size(); ++lines) {
    size_t end = block.find("\r\n", at);
    std::string_view line = block.substr(at, end - at);
    if (line.starts_with(' ') || line.starts_with('\t')) return fail(400, "a header line is folded");
    for (unsigned char c : line)
      if ((c < 0x20 && c != '\t') || c == 0x7f) return fail(400, "the request header has a control character");
    at = end + 2;
  }
  if (lines > limits_.max_headers)
    return fail(431, "the request has more than " + std::to_string(limits_.max_headers) + " headers");
  return true;
}

// Refuses every request whose body length could be read in two ways.
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
      if (lower(value) != "100-continue") return fail(417, "Expect: only 100-continue is supported");
      continue_wanted_ = request_.version >= 11;
    }
  }
  if (n_lengths > 1) return fail(400, "the request has more than one Content-Length header");
  if (n_encodings > 1 || (n_encodings == 1 && n_lengths == 1))
    return fail(400, "the request states the end of its body more than once (Content-Length, Transfer-Encoding)");
  if (n_encodings == 1 && request_.version < 11) return fail(400, "an HTTP/1.0 request cannot have Transfer-Encoding");
  if (n_hosts > 1 || (n_hosts == 0 && request_.version >= 11))
    return fail(400, n_hosts > 1 ? "the request has more than one Host header" : "the request has no Host header");

  std::string_view target = beast_->target;
  if (target.starts_with("http://") || target.starts_with("https://")) {  // absolute form
    target.remove_prefix(target.find("//") + 2);
    size_t slash = target.find('/');
    if (n_hosts == 1 && host_name(target.substr(0, slash)) != host_name(request_.header("host")))
      return fail(400, "the request target and the Host header name different hosts");
    target = slash == target.npos ? std::string_view("/") : target.substr(slash);
  }
  if (!target.starts_with('/') && target != "*") return fail(400, "the request target is not a path");
  size_t mark = target.find('?');
  request_.path = std::string(target.substr(0, mark));
  if (mark != target.npos) request_.query = std::string(target.substr(mark + 1));

  std::string_view connection = request_.header("connection");
  request_.keep_alive = request_.version >= 11 ? !has_word(connection, "close") : has_word(connection, "keep-alive");
  return true;
}

size_t HttpParser::feed_body(std::string_view input) {
  error_code failed;
  const size_t used = beast_->take(input, failed);
  if (beast_->is_done()) {
    state_ = State::done;
  } else if (failed == http::error::body_limit) {
    fail(413, "the request body is larger than " + std::to_string(limits_.max_body_bytes) + " bytes");
  } else if (failed) {
    fail(400, "malformed request body: " + failed.message());
  } else if (input.size() - used > kMaxChunkHeaderBytes) {
    fail(400, "a chunk header or trailer is longer than " + std::to_string(kMaxChunkHeaderBytes) + " bytes");
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

// ---- Responses.

HttpResponseParser::HttpResponseParser() = default;
HttpResponseParser::HttpResponseParser(HttpResponseParser&&) noexcept = default;
HttpResponseParser& HttpResponseParser::operator=(HttpResponseParser&&) noexcept = default;
HttpResponseParser::~HttpResponseParser() = default;

bool HttpResponseParser::complete() const { return beast_ && beast_->is_done(); }
int HttpResponseParser::status() const { return beast_ ? beast_->status : 0; }
std::string HttpResponseParser::reason() const { return beast_ ? beast_->reason : ""; }
std::string_view HttpResponseParser::header(std::string_view name) const {
  return beast_ ? find_header(beast_->headers, name) : std::string_view();
}

Status HttpResponseParser::feed(std::string_view bytes, const std::function<void(std::string_view)>& body) {
  while (!bytes.empty() && !beast_) {
    const size_t end = bytes.find('\n'), n = end == bytes.npos ? bytes.size() : end + 1;
    line_ += bytes.substr(0, n);
    bytes.remove_prefix(n);
    if (head_.size() + line_.size() > kMaxHeadBytes) return malformed("the headers are larger than 64 KiB");
    if (end == bytes.npos) return ok();
    line_.erase(line_.find_last_not_of("\r\n") + 1);
    if (head_.empty())  // Beast refuses a reason with such bytes, and the answer would be lost
      for (char& c : line_) c = std::iscntrl(static_cast<unsigned char>(c)) ? '?' : c;
    const bool whole = line_.empty() && !head_.empty();  // an empty line before a status line is skipped
    if (!line_.empty()) head_ += std::exchange(line_, "") + "\r\n";
    if (!whole) continue;
    if (Status status = head_complete(); !status) return status;
  }
  if (bytes.empty()) return ok();
  if (complete()) return malformed("bytes follow its end");
  beast_->on_body = body;
  rest_ += bytes;
  error_code failed;
  rest_.erase(0, beast_->take(rest_, failed));
  if (failed) return malformed(failed.message());
  if (rest_.empty()) return ok();
  if (complete()) return malformed("bytes follow its end");
  if (beast_->after_chunk() && rest_[0] != '\r') return malformed("a chunk is longer than its stated size");
  if (rest_.size() > (rest_.find('\n') == rest_.npos ? kMaxChunkSizeBytes : kMaxHeadBytes))
    return malformed("a chunk size is longer than 256 bytes, or the trailer is larger than 64 KiB");
  return ok();
}

Status HttpResponseParser::head_complete() {
  beast_ = std::make_unique<BeastParser<false>>(kMaxHeadBytes + 2, kMaxResponseBytes);
  error_code failed;
  beast_->take(head_ + "\r\n", failed);
  if (failed || beast_->status < 100 || beast_->status > 599)
    return malformed("its header, '" + head_.substr(0, std::min<size_t>(80, head_.find('\r'))) +
                     "': " + (failed ? failed.message() : "the status code is not valid"));
  head_.clear();
  if (beast_->status < 200) beast_.reset();  // 100 Continue: another head follows
  return ok();
}

Status HttpResponseParser::finish() {
  error_code failed;
  if (beast_ && !beast_->is_done()) beast_->put_eof(failed);
  if (complete() && !failed) return ok();
  if (!beast_) return Error{ErrorCode::io, "the server closed the connection before it answered"};
  return Error{ErrorCode::io, "the server closed the connection in the middle of its answer"};
}

}  // namespace xpyd::server
