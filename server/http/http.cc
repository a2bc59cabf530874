#define BOOST_ASIO_DISABLE_FENCED_BLOCK  // see boost_impl.cc
#include "server/http/http.h"

#include <fcntl.h>

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <cstdio>
#include <unordered_set>

namespace xpyd::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using error_code = boost::system::error_code;

constexpr size_t kReadBytes = 64u << 10;  // Beast reads at most so much at once
constexpr double kLingerSeconds = 2;      // a refused client can read the reason before the reset

std::chrono::nanoseconds seconds(double s) { return std::chrono::nanoseconds(static_cast<int64_t>(s * 1e9)); }

// Also true for an IPv4 loopback address mapped into IPv6.
bool is_loopback_address(const asio::ip::address& address) {
  if (address.is_v6() && address.to_v6().is_v4_mapped())
    return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6()).is_loopback();
  return address.is_loopback();
}

// Asio does not set this. A worker process that inherits a socket would keep its port and client.
void keep_from_children(int fd) { fcntl(fd, F_SETFD, FD_CLOEXEC); }

std::string head_text(const HttpResponse& response, const std::string& framing, bool close) {
  std::string out = "HTTP/1.1 " + std::to_string(response.status) + " " +
                    std::string(http::obsolete_reason(static_cast<http::status>(response.status))) + "\r\n";
  if (!response.content_type.empty()) out += "Content-Type: " + response.content_type + "\r\n";
  for (const auto& [name, value] : response.headers) out += name + ": " + value + "\r\n";
  return out + framing + (close ? "Connection: close\r\n\r\n" : "\r\n");
}

}  // namespace

// The state of the I/O thread. It outlives the listener while an HttpPost refers to it.
struct HttpListener::Loop {
  explicit Loop(HttpListenOptions o) : options(std::move(o)) {}

  HttpListenOptions options;
  asio::io_context io{1};
  tcp::acceptor acceptor{io};
  asio::steady_timer accept_retry{io};
  HttpHandler* handler = nullptr;
  std::unordered_set<std::shared_ptr<Connection>> connections;  // without those that came during a drain
  bool draining = false;

  void accept();
  void accept_later();
  void drain();
  void end_drain();
  void leave(const std::shared_ptr<Connection>& connection);
};

class HttpListener::Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Loop& loop, tcp::socket socket)
      : loop_(loop), stream_(std::move(socket)), input_(loop.options.max_header_bytes + kReadBytes) {}

  void start() {
    error_code ignored;
    keep_from_children(stream_.socket().native_handle());
    stream_.socket().non_blocking(true, ignored);
    stream_.socket().set_option(tcp::no_delay(true), ignored);
    const auto peer = stream_.socket().remote_endpoint(ignored);
    from_loopback_ = !ignored && is_loopback_address(peer.address());
    await_request();
  }

  void drain() {  // without a complete request there is no answer to wait for
    if (phase_ == Phase::idle || phase_ == Phase::receiving) close();
  }

  void close() {
    if (phase_ == Phase::closed) return;
    phase_ = Phase::closed;
    stream_.close();
    if (const auto callback = std::exchange(gone_, nullptr)) callback();
    loop_.leave(shared_from_this());
  }

  // ---- Called by the exchange.
  bool is_asked(uint64_t id) const { return id == exchange_id_ && phase_ == Phase::answering; }
  void respond(HttpResponse response);
  void begin_stream(HttpResponse head);
  void write(std::string bytes);
  void end_stream();
  void on_gone(std::function<void()> callback) { gone_ = std::move(callback); }

 private:
  // idle: no byte of a request has come. receiving: a request is arriving. answering: the handler has it. flushing: the
  // complete answer is being sent. lingering: it is sent, and further input is discarded.
  enum class Phase { idle, receiving, answering, flushing, lingering, closed };

  // Returns a handler of an operation's end. It does nothing if the connection has closed meanwhile.
  template <class F>
  auto while_open(F then) {
    return [self = shared_from_this(), then](const error_code& failed, size_t n) {
      if (self->phase_ != Phase::closed) then(*self, failed, n);
    };
  }

  void await_request();
  void receive();
  void on_header();
  void begin_answer(bool close_after);
  void dispatch();
  void refuse_input(const error_code& failed);
  void refuse(int status, const std::string& why);
  void watch();
  void queue(const std::string& bytes);
  void flush();
  void answered();
  void linger();
  void discard();

  Loop& loop_;
  beast::tcp_stream stream_;
  beast::flat_buffer input_;  // received, not yet parsed; also of later requests
  std::optional<http::request_parser<http::string_body>> parser_;
  HttpRequest request_;  // the parser's header as plain values
  Phase phase_ = Phase::idle;
  bool from_loopback_ = false;
  bool watching_ = false;         // waiting for input, or for the client's end, while the handler has the request
  std::string output_, sending_;  // not yet given to the system: after `sending_`, and from byte `sent_` of it
  size_t sent_ = 0;
  bool writing_ = false;
  uint64_t exchange_id_ = 0;
  bool head_only_ = false, close_after_ = false;
  std::function<void()> gone_;
};

class HttpListener::Exchange final : public HttpExchange {
 public:
  Exchange(std::weak_ptr<Connection> connection, uint64_t id) : connection_(std::move(connection)), id_(id) {}
  void respond(HttpResponse response) override { call(&Connection::respond, std::move(response)); }
  void begin_stream(HttpResponse head) override { call(&Connection::begin_stream, std::move(head)); }
  void write(std::string bytes) override { call(&Connection::write, std::move(bytes)); }
  void end_stream() override { call(&Connection::end_stream); }
  void on_gone(std::function<void()> callback) override {
    if (!call(&Connection::on_gone, callback)) callback();
  }

 private:
  // False: the request has been answered, or its client has gone.
  template <class Method, class... Arguments>
  bool call(Method method, Arguments&&... arguments) const {
    const auto c = connection_.lock();
    if (!c || !c->is_asked(id_)) return false;
    ((*c).*method)(std::forward<Arguments>(arguments)...);
    return true;
  }
  std::weak_ptr<Connection> connection_;
  uint64_t id_;
};

// ---- Receiving.

void HttpListener::Connection::await_request() {
  phase_ = Phase::idle;
  if (input_.size() > 0) return receive();
  stream_.expires_after(seconds(loop_.options.idle_timeout_s));
  stream_.async_read_some(input_.prepare(4096), while_open([](Connection& c, const error_code& failed, size_t n) {
                            if (failed) return c.close();
                            c.input_.commit(n);
                            c.receive();
                          }));
}

void HttpListener::Connection::receive() {
  phase_ = Phase::receiving;
  parser_.emplace();
  parser_->header_limit(static_cast<uint32_t>(loop_.options.max_header_bytes));
  parser_->body_limit(loop_.options.max_body_bytes);
  stream_.expires_after(seconds(loop_.options.receive_timeout_s));  // of the header and the body together
  http::async_read_header(stream_, input_, *parser_, while_open([](Connection& c, const error_code& failed, size_t) {
                            failed ? c.refuse_input(failed) : c.on_header();
                          }));
}

void HttpListener::Connection::on_header() {
  const auto& message = parser_->get();
  const std::string target(message.target());
  request_ = {.method = std::string(message.method_string()),
              .path = target.substr(0, target.find('?')),
              .from_loopback = from_loopback_};
  for (const auto& field : message)
    request_.headers.emplace_back(lower(std::string(field.name_string())), std::string(field.value()));
  head_only_ = request_.method == "HEAD";
  if (message.version() != 11) return refuse(505, "expected HTTP/1.1");
  if (message.count(http::field::host) != 1) return refuse(400, "expected one Host header");
  // Two servers in a row may read two lengths, or an encoding that is none, differently (RFC 9112 6.3).
  const auto lengths = message.count(http::field::content_length);
  const auto encodings = message.count(http::field::transfer_encoding);
  const std::string_view encoding = request_.header("transfer-encoding");
  if (lengths > 1 || request_.header("content-length").find(',') != std::string::npos)
    return refuse(400, "expected one Content-Length");
  if (encodings > 1 || (encodings == 1 && encoding.empty())) return refuse(400, "expected one Transfer-Encoding");
  // Beast takes the body of any other encoding for the next request. A server in front of this one may not.
  if (encodings == 1 && lower(encoding) != "chunked")
    return refuse(501, "Transfer-Encoding other than chunked is not supported");
  if (auto refusal = loop_.handler->on_header(request_)) {
    // The rest of its body is not read, so the start of the next request is unknown.
    begin_answer(!message.keep_alive() || !parser_->is_done());
    return respond(std::move(*refusal));
  }
  if (parser_->is_done()) return dispatch();
  http::async_read(stream_, input_, *parser_, while_open([](Connection& c, const error_code& failed, size_t) {
                     failed ? c.refuse_input(failed) : c.dispatch();
                   }));
  if (lower(request_.header("expect")) == "100-continue") queue("HTTP/1.1 100 Continue\r\n\r\n");
}

void HttpListener::Connection::begin_answer(bool close_after) {
  phase_ = Phase::answering;
  ++exchange_id_;
  close_after_ = close_after;
}

void HttpListener::Connection::dispatch() {
  request_.body = std::move(parser_->get().body());
  begin_answer(!parser_->get().keep_alive());
  parser_.reset();
  watch();
  loop_.handler->handle(std::move(request_), std::make_shared<Exchange>(weak_from_this(), exchange_id_));
}

// The client has sent no request, or it has gone or is too slow.
void HttpListener::Connection::refuse_input(const error_code& failed) {
  const HttpListenOptions& bound = loop_.options;
  head_only_ = false;
  if (failed == http::error::header_limit)
    return refuse(431, "the request header is longer than " + std::to_string(bound.max_header_bytes) + " bytes");
  if (failed == http::error::body_limit)
    return refuse(413, "the request body is larger than " + std::to_string(bound.max_body_bytes) + " bytes");
  const bool ended = failed == http::error::end_of_stream || failed == http::error::partial_message;
  if (ended || failed.category() != make_error_code(http::error::bad_method).category()) return close();
  refuse(400, "malformed request: " + failed.message());
}

void HttpListener::Connection::refuse(int status, const std::string& why) {
  begin_answer(true);
  respond(loop_.handler->refuse(status, why));
}

// Closes the connection when the client has gone, or has closed its sending side, before its answer is complete. If the
// client has sent another request meanwhile, only a failed write tells.
void HttpListener::Connection::watch() {
  if (std::exchange(watching_, true)) return;
  stream_.socket().async_wait(tcp::socket::wait_read, [self = shared_from_this()](error_code failed) {
    self->watching_ = false;
    if (self->phase_ != Phase::answering) return;
    char next;
    if (!failed) self->stream_.socket().receive(asio::buffer(&next, 1), tcp::socket::message_peek, failed);
    if (failed == asio::error::would_block) return self->watch();
    if (failed) self->close();
  });
}

// ---- Answering.

void HttpListener::Connection::respond(HttpResponse response) {
  close_after_ = close_after_ || response.close || loop_.draining;
  std::string text = head_text(response, "Content-Length: " + std::to_string(response.body.size()) + "\r\n",
                               close_after_);
  if (!head_only_) text += response.body;
  gone_ = nullptr;
  phase_ = Phase::flushing;
  queue(text);
}

void HttpListener::Connection::begin_stream(HttpResponse head) {
  close_after_ = close_after_ || head.close || loop_.draining;
  queue(head_text(head, "Transfer-Encoding: chunked\r\n", close_after_));
}

void HttpListener::Connection::write(std::string bytes) {
  if (bytes.empty()) return;
  if (output_.size() + sending_.size() - sent_ + bytes.size() > loop_.options.max_stream_buffer_bytes) return close();
  char size[24];
  std::snprintf(size, sizeof size, "%zx\r\n", bytes.size());
  queue(size + bytes + "\r\n");
}

void HttpListener::Connection::end_stream() {
  gone_ = nullptr;
  phase_ = Phase::flushing;
  queue("0\r\n\r\n");
}

void HttpListener::Connection::queue(const std::string& bytes) {
  output_ += bytes;
  flush();
}

// What comes while a write is under way goes out together in the next one.
void HttpListener::Connection::flush() {
  if (writing_) return;
  if (sent_ == sending_.size()) {
    sending_ = std::exchange(output_, {});
    sent_ = 0;
  }
  if (sending_.empty()) {
    if (phase_ == Phase::flushing) answered();
    return;
  }
  writing_ = true;
  stream_.expires_after(seconds(loop_.options.write_timeout_s));
  stream_.async_write_some(asio::buffer(sending_) + sent_,
                           while_open([](Connection& c, const error_code& failed, size_t n) {
                             c.writing_ = false;
                             if (failed) return c.close();
                             c.sent_ += n;
                             c.flush();
                           }));
}

void HttpListener::Connection::answered() {
  if (close_after_ || loop_.draining) return linger();
  await_request();
}

// Closing a socket with unread input resets the connection and can destroy the answer in flight.
void HttpListener::Connection::linger() {
  phase_ = Phase::lingering;
  error_code ignored;
  stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
  stream_.expires_after(seconds(kLingerSeconds));
  discard();
}

void HttpListener::Connection::discard() {
  input_.clear();
  stream_.async_read_some(input_.prepare(kReadBytes), while_open([](Connection& c, const error_code& failed, size_t) {
                            failed ? c.close() : c.discard();
                          }));
}

// ---- The listener.

void HttpListener::Loop::accept() {
  if (connections.size() >= static_cast<size_t>(options.max_connections)) return accept_later();
  acceptor.async_accept([this](const error_code& failed, tcp::socket socket) {
    if (!acceptor.is_open()) return;
    if (failed) return accept_later();  // no descriptor is left: retrying at once would spin
    auto connection = std::make_shared<Connection>(*this, std::move(socket));
    if (!draining) connections.insert(connection);
    connection->start();
    accept();
  });
}

void HttpListener::Loop::accept_later() {
  accept_retry.expires_after(std::chrono::milliseconds(100));
  accept_retry.async_wait([this](const error_code& stopped) {
    if (!stopped) accept();
  });
}

void HttpListener::Loop::drain() {
  draining = true;
  const auto all = std::vector(connections.begin(), connections.end());
  for (auto& connection : all) connection->drain();
  if (connections.empty()) end_drain();
}

// Closes the port, so that no client waits at a port that nobody serves.
void HttpListener::Loop::end_drain() {
  error_code ignored;
  acceptor.close(ignored);
  io.stop();
}

void HttpListener::Loop::leave(const std::shared_ptr<Connection>& connection) {
  connections.erase(connection);
  if (draining && connections.empty()) end_drain();
}

HttpListener::HttpListener(std::shared_ptr<Loop> loop) : loop_(std::move(loop)) {}

Result<std::unique_ptr<HttpListener>> HttpListener::open(const HttpListenOptions& options) {
  std::string name = options.host + ":" + std::to_string(options.port);
  if (options.port < 0 || options.port > 65535)
    return invalid("port " + std::to_string(options.port) + ": expected a port from 0 to 65535");
  auto loop = std::make_shared<Loop>(options);
  auto failed_at = [&](const char* what, const error_code& why) {
    return Error{ErrorCode::io, "cannot " + std::string(what) + " " + name + ": " + why.message()};
  };
  error_code failed;
  tcp::resolver resolver(loop->io);
  auto found = resolver.resolve(options.host, std::to_string(options.port),
                                tcp::resolver::passive | tcp::resolver::numeric_service, failed);
  if (failed || found.empty()) return failed_at("resolve", failed);
  tcp::endpoint endpoint = found.begin()->endpoint();
  loop->acceptor.open(endpoint.protocol(), failed);
  if (failed) return failed_at("open a socket for", failed);
  keep_from_children(loop->acceptor.native_handle());
  loop->acceptor.set_option(tcp::acceptor::reuse_address(true), failed);
  loop->acceptor.non_blocking(true, failed);
  loop->acceptor.bind(endpoint, failed);
  if (failed) return failed_at("bind", failed);
  loop->acceptor.listen(asio::socket_base::max_listen_connections, failed);
  if (failed) return failed_at("listen on", failed);
  return std::unique_ptr<HttpListener>(new HttpListener(std::move(loop)));
}

HttpListener::~HttpListener() {
  error_code ignored;
  loop_->acceptor.close(ignored);
  const auto all = std::vector(loop_->connections.begin(), loop_->connections.end());
  for (auto& connection : all) connection->close();
}

void HttpListener::run(HttpHandler& handler) {
  loop_->handler = &handler;
  loop_->accept();
  loop_->io.run();
}

void HttpListener::begin_drain() {
  asio::post(loop_->io, [loop = loop_.get()] { loop->drain(); });
}
void HttpListener::stop() { loop_->io.stop(); }
int HttpListener::port() const { return loop_->acceptor.local_endpoint().port(); }
bool HttpListener::is_loopback() const { return is_loopback_address(loop_->acceptor.local_endpoint().address()); }
HttpPost HttpListener::post() const {
  return [loop = loop_](std::function<void()> f) { asio::post(loop->io, std::move(f)); };
}

}  // namespace xpyd::server
