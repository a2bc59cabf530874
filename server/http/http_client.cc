#define BOOST_ASIO_DISABLE_FENCED_BLOCK  // see boost_impl.cc
#include "server/http/http_client.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <optional>
#include <unordered_set>

#include "base/numbers.h"

namespace xpyd::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
using asio::ip::tcp;
using error_code = boost::system::error_code;

constexpr size_t kMaxEventBytes = 16 << 20;
constexpr size_t kMaxFetchBytes = 64 << 20;

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
  auto bad = [&](const std::string& why) { return invalid("'" + text + "': " + why + "; expected http://HOST:PORT"); };
  const bool tls = text.rfind("https://", 0) == 0;
  if (!tls && text.rfind("http://", 0) != 0) return bad("it does not begin with http:// or https://");
  for (unsigned char c : text)
    if (c <= ' ' || c == 0x7f) return bad("it has a blank or a control character");
  HttpUrl url{.port = tls ? 443 : 80, .tls = tls};
  std::string_view rest = std::string_view(text).substr(tls ? 8 : 7);
  size_t slash = std::min(rest.find_first_of("/?#"), rest.size());
  std::string_view place = rest.substr(0, slash), path = rest.substr(slash);
  if (path.find_first_of("?#") != path.npos) return bad("it has a query or a fragment");
  while (!path.empty() && path.back() == '/') path.remove_suffix(1);
  url.prefix = path;
  if (place.find('@') != place.npos) return bad("a user name is not supported");
  std::string_view port;
  if (!place.empty() && place[0] == '[') {
    size_t close = place.find(']');
    if (close == place.npos) return bad("it has '[' without ']'");
    url.host = place.substr(1, close - 1);
    port = place.substr(close + 1);
  } else {
    size_t colon = std::min(place.find(':'), place.size());
    url.host = place.substr(0, colon);
    port = place.substr(colon);
  }
  if (url.host.empty()) return bad("it has no host");
  if (port.empty()) return url;
  if (port[0] != ':' || !read_number(port.substr(1), url.port) || url.port < 1 || url.port > 65535)
    return bad("the port is not from 1 to 65535");
  return url;
}

struct HttpClient::Impl {
  HttpUrl url;
  std::string fixed_headers;
  std::optional<asio::ssl::context> tls;
  asio::io_context io{1};
  asio::steady_timer wake{io};
  tcp::endpoint server;
  std::unordered_set<std::shared_ptr<Connection>> connections;
};

// One call. Operations still in flight after its end keep it alive and see `over`.
struct HttpClient::Connection : std::enable_shared_from_this<Connection> {
  explicit Connection(Impl& its_client) : client(its_client), stream(its_client.io) {
    if (!client.tls) return;
    tls.emplace(stream, *client.tls);
    tls->set_verify_callback(asio::ssl::host_name_verification(client.url.host));
    SSL_set_tlsext_host_name(tls->native_handle(), client.url.host.c_str());
  }

  template <class F>
  void on_stream(F&& f) {
    tls ? f(*tls) : f(stream);
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
      if (why) return self->end("connect", why);
      if (!self->tls) return self->send();
      self->tls->async_handshake(asio::ssl::stream_base::client, [self](error_code refused) {
        if (self->over) return;
        refused ? self->end("TLS", refused) : self->send();
      });
    });
  }

  void send() {
    // A server may answer (413, 503) and close before it has read everything. That answer counts.
    on_stream([&](auto& to) {
      asio::async_write(to, asio::buffer(out), [self = shared_from_this()](error_code, size_t) {});
    });
    read();
  }

  void read() {
    const auto on_bytes = [self = shared_from_this()](error_code failed, size_t n) {
      if (self->over) return;
      if (failed == asio::ssl::error::stream_truncated) failed = asio::error::eof;  // no close_notify, as in plain TCP
      if (failed && failed != asio::error::eof) return self->end("", failed);
      const std::string_view bytes(self->buffer.data(), n);
      auto body = [&](std::string_view part) { self->on_body(self->parser.status(), part); };
      const Status status = failed ? self->parser.finish() : self->parser.feed(bytes, body);
      if (self->over) return;
      if (!status) return self->end(status.error().message);
      if (self->parser.complete()) return self->end("");
      self->read();
    };
    on_stream([&](auto& from) { from.async_read_some(asio::buffer(buffer), on_bytes); });
  }

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
    done({parser.status(), parser.reason(), error, std::string(parser.header("retry-after"))});
  }
  void drop() {
    over = true;
    client.connections.erase(shared_from_this());
    stream.close();
  }

  Impl& client;
  beast::tcp_stream stream;
  std::optional<asio::ssl::stream<beast::tcp_stream&>> tls;
  double timeout_s = 0;
  std::string out;
  std::array<char, 16 << 10> buffer;
  HttpResponseParser parser;
  OnBody on_body;
  OnDone on_done;
  bool over = false;
};

HttpClient::HttpClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpClient::~HttpClient() { abort_all(); }

Result<std::unique_ptr<HttpClient>> HttpClient::create(const HttpUrl& url, HttpHeaders headers) {
  auto impl = std::make_unique<Impl>();
  impl->url = url;
  if (url.tls) {
    impl->tls.emplace(asio::ssl::context::tls_client);
    impl->tls->set_default_verify_paths();
    impl->tls->set_verify_mode(asio::ssl::verify_peer);
  }
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
  bool done = false, too_long = false;
  HttpOutcome outcome;
  start(
      call,
      [&](int, std::string_view bytes) {
        too_long = too_long || body.size() + bytes.size() > kMaxFetchBytes;
        if (!too_long) body += bytes;
      },
      [&](const HttpOutcome& result) {
        outcome = result;
        done = true;
      });
  while (!done) poll(0.1);
  std::string what = call.method + (impl_->tls ? " https://" : " http://") + impl_->url.authority() +
                     impl_->url.prefix + call.target + ": ";
  if (!outcome.error.empty()) return Error{ErrorCode::io, what + outcome.error};
  if (outcome.status < 200 || outcome.status > 299) {
    ErrorCode code = outcome.status == 404 ? ErrorCode::not_found : ErrorCode::io;
    return Error{code, what + std::to_string(outcome.status) + " " + outcome.reason};
  }
  if (too_long) return Error{ErrorCode::io, what + "the answer is larger than 64 MiB"};
  return body;
}

}  // namespace xpyd::server
