#define BOOST_ASIO_DISABLE_FENCED_BLOCK  // see boost_impl.cc
#include "server/http/http_client.h"

#include <fcntl.h>

#include <algorithm>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <unordered_set>

#include "base/numbers.h"

namespace xpyd::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using error_code = boost::system::error_code;

constexpr size_t kMaxEventBytes = 16 << 20;
constexpr uint32_t kMaxHeadBytes = 64 << 10;
constexpr uint64_t kMaxBodyBytes = 1 << 30;

std::chrono::nanoseconds in_ns(double s) { return std::chrono::nanoseconds(static_cast<int64_t>(s * 1e9)); }

}  // namespace

bool SseParser::feed(std::string_view bytes, const std::function<void(const std::string&)>& event) {
  for (char c : bytes) {
    bool lf_of_crlf = c == '\n' && after_cr_;
    after_cr_ = c == '\r';
    if (lf_of_crlf) continue;
    if (c != '\n' && c != '\r') {
      line_ += c;
      if (line_.size() + data_.size() > kMaxEventBytes) return false;
      continue;
    }
    if (line_.empty()) {
      if (has_data_) event(data_);
      data_.clear();
      has_data_ = false;
    } else if (line_.rfind("data:", 0) == 0) {
      size_t begin = line_.size() > 5 && line_[5] == ' ' ? 6 : 5;
      if (has_data_) data_ += '\n';
      data_.append(line_, begin);
      has_data_ = true;
    }
    line_.clear();
  }
  return true;
}

std::string HttpUrl::authority() const {
  std::string name = host.find(':') == host.npos ? host : "[" + host + "]";
  return name + ":" + std::to_string(port);
}

Result<HttpUrl> parse_http_url(const std::string& text) {
  constexpr std::string_view kScheme = "http://";
  std::string_view place = text;
  place.remove_prefix(place.starts_with(kScheme) ? kScheme.size() : place.size());
  HttpUrl url;
  const size_t slash = std::min(place.find('/'), place.size());
  url.prefix = place.substr(slash);
  url.prefix.erase(url.prefix.find_last_not_of('/') + 1);
  place = place.substr(0, slash);
  const size_t colon = place.find(':', place.starts_with('[') ? std::min(place.find(']'), place.size()) : 0);
  url.host = place.substr(0, colon);
  if (url.host.starts_with('[') && url.host.ends_with(']')) url.host = url.host.substr(1, url.host.size() - 2);
  const bool good = !url.host.empty() && text.find_first_of("?#@ \t\r\n") == text.npos &&
                    (colon == place.npos ||
                     (read_number(place.substr(colon + 1), url.port) && url.port >= 1 && url.port <= 65535));
  if (!good) return invalid("'" + text + "': expected http://HOST:PORT");
  return url;
}

struct HttpClient::Impl {
  HttpUrl url;
  std::string fixed_headers;
  asio::io_context io{1};
  asio::steady_timer wake{io};
  tcp::endpoint server;
  std::unordered_set<std::shared_ptr<Connection>> connections;
};

// One call. Operations still in flight after its end keep it alive and see `over`.
struct HttpClient::Connection : std::enable_shared_from_this<Connection> {
  // The parser is not eager: after a chunk an eager one waits for the next chunk's header before it passes the chunk
  // on.
  explicit Connection(Impl& its_client) : client(its_client), stream(its_client.io) {
    parser.header_limit(kMaxHeadBytes);
    parser.body_limit(kMaxBodyBytes);
  }

  void connect(double its_timeout_s) {
    timeout_s = its_timeout_s;
    stream.expires_after(in_ns(timeout_s));  // for everything that follows
    error_code failed;
    stream.socket().open(client.server.protocol(), failed);
    if (failed) return asio::post(client.io, [self = shared_from_this(), failed] { self->end("socket", failed); });
    fcntl(stream.socket().native_handle(), F_SETFD, FD_CLOEXEC);
    stream.socket().set_option(tcp::no_delay(true), failed);
    stream.async_connect(client.server, [self = shared_from_this()](error_code why) {
      if (self->over) return;
      if (why) return self->end("connect", why);
      // A server may answer (413, 503) and close before it has read everything. That answer counts.
      asio::async_write(self->stream, asio::buffer(self->out), [self](error_code, size_t) {});
      self->read();
    });
  }

  void read() {
    http::async_read_some(stream, buffer, parser, [self = shared_from_this()](error_code failed, size_t) {
      if (self->over) return;
      std::string& body = self->parser.get().body();
      if (!body.empty()) self->on_body(self->status(), body);
      body.clear();
      if (self->over) return;
      if (failed == http::error::end_of_stream) return self->end("the server closed the connection before it answered");
      if (failed == http::error::partial_message)
        return self->end("the server closed the connection in the middle of its answer");
      if (failed) return self->end("", failed);
      self->parser.is_done() ? self->end("") : self->read();
    });
  }

  int status() { return parser.is_header_done() ? int(parser.get().result_int()) : 0; }

  void end(const std::string& during, const error_code& why) {
    if (why == beast::error::timeout)
      return end("the answer was not complete in time (" + std::to_string(int64_t(timeout_s * 1000)) + " ms)");
    end(during.empty() ? why.message() : during + ": " + why.message());
  }
  // The call is removed first, because on_done may start another.
  void end(const std::string& error) {
    if (over) return;
    const OnDone done = std::move(on_done);
    drop();
    const auto& head = parser.get();
    done({status(), std::string(head.reason()), error, std::string(head[http::field::retry_after])});
  }
  void drop() {
    over = true;
    client.connections.erase(shared_from_this());
    stream.close();
  }

  Impl& client;
  beast::tcp_stream stream;
  double timeout_s = 0;
  std::string out;
  beast::flat_buffer buffer;
  http::response_parser<http::string_body> parser;  // its body is passed on and cleared after each read
  OnBody on_body;
  OnDone on_done;
  bool over = false;
};

HttpClient::HttpClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpClient::~HttpClient() { abort_all(); }

Result<std::unique_ptr<HttpClient>> HttpClient::create(const HttpUrl& url, HttpHeaders headers) {
  auto impl = std::make_unique<Impl>();
  impl->url = url;
  headers.insert(headers.begin(), {"Host", url.authority()});
  for (const auto& [name, value] : headers) {
    if ((name + value).find_first_of(std::string("\r\n\0", 3)) != std::string::npos)
      return invalid("header " + name + ": its value has a line break");
    impl->fixed_headers += name + ": " + value + "\r\n";
  }
  error_code failed;
  tcp::resolver resolver(impl->io);
  const auto found = resolver.resolve(url.host, std::to_string(url.port), tcp::resolver::numeric_service, failed);
  if (failed || found.empty()) return Error{ErrorCode::io, "host " + url.host + ": " + failed.message()};
  impl->server = found.begin()->endpoint();
  return std::unique_ptr<HttpClient>(new HttpClient(std::move(impl)));
}

void HttpClient::start(const HttpCall& call, OnBody on_body, OnDone on_done) {
  auto connection = std::make_shared<Connection>(*impl_);
  connection->on_body = std::move(on_body);
  connection->on_done = std::move(on_done);
  connection->out = call.method + " " + impl_->url.prefix + call.target + " HTTP/1.1\r\n" + impl_->fixed_headers +
                    "Connection: close\r\n";
  if (!call.body.empty())
    connection->out += "Content-Type: application/json\r\nContent-Length: " + std::to_string(call.body.size()) + "\r\n";
  connection->out += "\r\n" + call.body;
  impl_->connections.insert(connection);
  connection->connect(call.timeout_s);
}

void HttpClient::poll(double wait_s) {
  impl_->io.restart();
  if (wait_s > 0) {
    // Uses a timer, because the wait itself has a resolution of whole milliseconds and would delay arrivals.
    impl_->wake.expires_after(in_ns(std::min(wait_s, 0.1)));
    impl_->wake.async_wait([](error_code) {});
    impl_->io.run_one();
    impl_->wake.cancel();
  }
  impl_->io.poll();
}

int HttpClient::in_flight() const { return int(impl_->connections.size()); }

void HttpClient::abort_all() {
  while (!impl_->connections.empty()) std::shared_ptr(*impl_->connections.begin())->drop();
}

Result<std::string> HttpClient::fetch(const HttpCall& call) {
  std::string body;
  bool done = false;
  HttpOutcome outcome;
  start(
      call, [&](int, std::string_view bytes) { body += bytes; },
      [&](const HttpOutcome& result) {
        outcome = result;
        done = true;
      });
  while (!done) poll(0.1);
  std::string what = call.method + " http://" + impl_->url.authority() + impl_->url.prefix + call.target + ": ";
  if (!outcome.error.empty()) return Error{ErrorCode::io, what + outcome.error};
  if (outcome.status < 200 || outcome.status > 299) {
    ErrorCode code = outcome.status == 404 ? ErrorCode::not_found : ErrorCode::io;
    return Error{code, what + std::to_string(outcome.status) + " " + outcome.reason};
  }
  return body;
}

}  // namespace xpyd::server
