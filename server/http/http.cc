#define BOOST_ASIO_DISABLE_FENCED_BLOCK  // see boost_impl.cc
#include "server/http/http.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <ctime>
#include <deque>
#include <limits>
#include <mutex>
#include <unordered_set>

#include "base/log.h"

namespace xpyd::server {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using error_code = boost::system::error_code;
using Wait = tcp::socket::wait_type;

constexpr size_t kReadBytes = 64u << 10;
constexpr size_t kPipelineBytes = 64u << 10;  // of later requests, kept while one is being answered
constexpr size_t kPacketBytes = 16u << 10;    // small waiting writes are joined up to this size
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kLingerSeconds = 2;  // a refused client can read the reason before the reset

std::chrono::nanoseconds seconds(double s) { return std::chrono::nanoseconds(static_cast<int64_t>(s * 1e9)); }

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string date_header() {
  std::time_t now = std::time(nullptr);
  std::tm parts;
  gmtime_r(&now, &parts);
  char text[64];
  size_t n = std::strftime(text, sizeof text, "Date: %a, %d %b %Y %H:%M:%S GMT\r\n", &parts);
  return std::string(text, n);
}

// Also true for an IPv4 loopback address mapped into IPv6.
bool is_loopback_address(const asio::ip::address& address) {
  if (address.is_v6() && address.to_v6().is_v4_mapped())
    return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6()).is_loopback();
  return address.is_loopback();
}

// Asio does not set this. A worker process that inherits a socket would keep its port and client.
void keep_from_children(int fd) { fcntl(fd, F_SETFD, FD_CLOEXEC); }

// Prevents a reason phrase or header value from ending its line.
std::string one_line(std::string_view text, size_t longest) {
  std::string out(text.substr(0, longest));
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = ' ';
  return out;
}

std::string head_text(const HttpResponse& response, const std::string& framing, bool close, int version) {
  std::string out = "HTTP/1.1 " + std::to_string(response.status) + " ";
  out += response.reason.empty() ? http_reason(response.status) : one_line(response.reason, 120);
  out += "\r\n" + date_header();
  if (!response.content_type.empty()) out += "Content-Type: " + response.content_type + "\r\n";
  for (const auto& [name, value] : response.headers) out += name + ": " + one_line(value, 1024) + "\r\n";
  out += framing;
  if (close)
    out += "Connection: close\r\n";
  else if (version == 10)
    out += "Connection: keep-alive\r\n";
  return out + "\r\n";
}

}  // namespace

// The state of the I/O thread. Asio waits and Beast parses; reads and writes are plain calls in between. So one buffer
// serves all connections, and each phase of a connection has its own deadline. (Beast's stream has one deadline for
// reading and writing together.)
//
// It outlives the listener while an HttpPost refers to it.
struct HttpListener::Loop : std::enable_shared_from_this<Loop> {
  explicit Loop(HttpListenOptions o) : options(std::move(o)) {}

  HttpListenOptions options;
  asio::io_context io{1};
  tcp::acceptor acceptor{io};
  asio::steady_timer accept_retry{io}, ticker{io};
  HttpHandler* handler = nullptr;
  std::unordered_set<std::shared_ptr<Connection>> connections;
  size_t body_bytes = 0;  // held by all connections
  bool draining = false, accepting = false;
  size_t waited_for = 0;  // draining: connections that existed when the drain began
  std::vector<char> scratch = std::vector<char>(kReadBytes);

  std::mutex mutex;  // guards the next three members
  std::vector<std::function<void()>> inbox;
  bool scheduled = false, closed = false;

  // One wake-up serves all events that arrive before the I/O thread handles them.
  void post(std::function<void()> f) {
    std::lock_guard lock(mutex);
    if (closed) return;
    inbox.push_back(std::move(f));
    if (std::exchange(scheduled, true)) return;
    asio::post(io, [this] { run_inbox(); });
  }
  void run_inbox() {
    std::vector<std::function<void()>> batch;
    {
      std::lock_guard lock(mutex);
      batch.swap(inbox);
      scheduled = false;
    }
    for (auto& f : batch) f();
  }

  void accept();
  void tick();
  void drain();
  void end_drain();
  void leave(const std::shared_ptr<Connection>& connection);
  bool close_idlest();
  void shed_bodies();
  bool free_descriptor();
  double said_s = -kNever;  // last time it logged that no descriptor is left
};

class HttpListener::Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Loop& loop, tcp::socket socket)
      : late(loop.draining), loop_(loop), socket_(std::move(socket)), timer_(loop.io), parser_(loop.options.limits) {}

  const bool late;  // it came during the drain: it is refused and not waited for

  void start() {
    error_code ignored;
    keep_from_children(socket_.native_handle());
    socket_.non_blocking(true, ignored);
    socket_.set_option(tcp::no_delay(true), ignored);
    auto peer = socket_.remote_endpoint(ignored);
    from_loopback_ = !ignored && is_loopback_address(peer.address());
    arm(loop_.options.header_timeout_s);
    read();
  }

  // Start of the time without a request, if that is long enough. kNever: the connection is not idle.
  double idle_since_s() const {
    const bool idle = phase_ == Phase::lingering ||
                      (phase_ == Phase::receiving && parser_.state() == HttpParser::State::header);
    return idle && now_s() >= since_s_ + loop_.options.place_s ? since_s_ : kNever;
  }
  double body_since_s() const {  // kNever: no body is arriving
    return phase_ == Phase::receiving && body_accounted_ > 0 ? since_s_ : kNever;
  }

  void drain() {  // an idle connection has no answer to wait for
    if (phase_ == Phase::receiving && input_.empty() && parser_.state() == HttpParser::State::header) close();
  }

  void close() {
    if (phase_ == Phase::closed) return;
    phase_ = Phase::closed;
    account_body(0);
    timer_.cancel();
    error_code ignored;
    socket_.close(ignored);
    tell_gone();
    loop_.leave(shared_from_this());
  }

  // ---- Called by the exchange.
  bool is_asked(uint64_t id) const { return id == exchange_id_ && phase_ == Phase::answering; }
  void respond(HttpResponse response);
  void begin_stream(HttpResponse head);
  void write(std::string bytes);
  void end_stream();
  void body_freed() { account_body(0); }
  void refuse(int status, const std::string& why);
  void on_gone(std::function<void()> callback) { gone_ = std::move(callback); }
  void on_half_closed(std::function<void()> callback) { doubted_ = std::move(callback); }

 private:
  // receiving: reading a request or waiting for one. answering: the handler has it. flushing: the complete answer is
  // being sent. lingering: it is sent, and further input is discarded.
  enum class Phase { receiving, answering, flushing, lingering, closed };

  void arm(double s);
  void on_timer();
  void read();
  void on_readable();
  void advance();
  bool judge();
  void begin_exchange(const HttpRequest& request);
  void dispatch();
  void half_closed();
  void append(std::string bytes);
  void queue(std::string bytes);
  void flush();
  void answered();
  void linger();
  void account_body(size_t bytes);
  void tell_gone() {
    if (auto callback = std::exchange(gone_, nullptr)) callback();
  }

  Loop& loop_;
  tcp::socket socket_;
  asio::steady_timer timer_;
  HttpParser parser_;
  Phase phase_ = Phase::receiving;
  bool from_loopback_ = false, judged_ = false;
  double since_s_ = now_s();  // start of the time without a request, or of the arriving body
  bool ended_ = false;        // the client has closed its side
  bool head_begun_ = false;   // the head of the answer is queued
  std::string input_;         // received, not yet parsed
  bool reading_ = false, advancing_ = false, body_timed_ = false, header_timed_ = false;
  std::deque<std::string> output_;
  size_t output_bytes_ = 0, output_at_ = 0;  // in the queue; already sent of its front
  bool writing_ = false;                     // waiting until the socket takes more
  uint64_t exchange_id_ = 0;
  int version_ = 11;
  bool head_only_ = false, close_after_ = false, chunked_ = false;
  size_t body_accounted_ = 0;
  std::function<void()> gone_, doubted_;
};

class HttpListener::Exchange final : public HttpExchange {
 public:
  Exchange(std::weak_ptr<Connection> connection, uint64_t id) : connection_(std::move(connection)), id_(id) {}
  void respond(HttpResponse response) override { call(&Connection::respond, std::move(response)); }
  void begin_stream(HttpResponse head) override { call(&Connection::begin_stream, std::move(head)); }
  void write(std::string bytes) override { call(&Connection::write, std::move(bytes)); }
  void end_stream() override { call(&Connection::end_stream); }
  void body_freed() override { call(&Connection::body_freed); }
  void on_gone(std::function<void()> callback) override {
    if (!call(&Connection::on_gone, callback)) callback();
  }
  void on_half_closed(std::function<void()> callback) override {
    call(&Connection::on_half_closed, std::move(callback));
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

void HttpListener::Connection::arm(double s) {
  timer_.expires_after(seconds(s));
  timer_.async_wait([self = shared_from_this()](error_code stopped) {
    // A cancelled wait may already be queued as done. The expiry time shows it.
    if (!stopped && self->timer_.expiry() <= std::chrono::steady_clock::now()) self->on_timer();
  });
}

void HttpListener::Connection::on_timer() {
  bool began = !input_.empty() || parser_.state() != HttpParser::State::header;
  if (phase_ == Phase::receiving && began) return refuse(408, "the request did not arrive within the time limit");
  close();  // the client is silent, or does not take its answer
}

void HttpListener::Connection::read() {
  if (reading_ || ended_ || phase_ == Phase::closed) return;
  bool busy = phase_ == Phase::answering || phase_ == Phase::flushing;
  if (busy && input_.size() >= kPipelineBytes) return;
  reading_ = true;
  socket_.async_wait(Wait::wait_read, [self = shared_from_this()](error_code failed) {
    self->reading_ = false;
    if (self->phase_ == Phase::closed) return;
    if (failed) return self->close();
    self->on_readable();
  });
}

void HttpListener::Connection::on_readable() {
  error_code failed;
  auto& scratch = loop_.scratch;
  size_t n = socket_.read_some(asio::buffer(scratch), failed);
  if (failed == asio::error::would_block) return read();
  bool busy = phase_ == Phase::answering || phase_ == Phase::flushing;
  if (failed == asio::error::eof && busy) return half_closed();
  if (failed) return close();
  if (phase_ == Phase::lingering) return read();
  input_.append(scratch.data(), n);
  advance();
  read();
}

// The client sends no more. It either waits for its answer or has gone, and its system tells which after the next
// write. Before an HTTP/1.1 answer begins, a "100 Continue" may be written for this, any number of times. An HTTP/1.0
// client that has gone is noticed when its answer is sent. The handler of a stream is told.
void HttpListener::Connection::half_closed() {
  ended_ = true;
  socket_.async_wait(Wait::wait_error, [self = shared_from_this()](error_code) { self->close(); });
  if (!head_begun_ && version_ >= 11) queue("HTTP/1.1 100 Continue\r\n\r\n");
  if (auto callback = std::exchange(doubted_, nullptr); callback && head_begun_ && phase_ == Phase::answering)
    callback();
}

// Parses requests one after another until one has to wait for input or for its answer.
void HttpListener::Connection::advance() {
  if (advancing_) return;
  advancing_ = true;
  size_t at = 0;
  while (phase_ == Phase::receiving && at < input_.size()) {
    size_t used = parser_.feed(std::string_view(input_).substr(at));
    at += used;
    auto state = parser_.state();
    const bool whole = state == HttpParser::State::body || state == HttpParser::State::done;
    if (whole && !std::exchange(judged_, true) && !judge()) continue;
    if (state == HttpParser::State::failed) {
      refuse(parser_.error_status(), parser_.error());
    } else if (state == HttpParser::State::done) {
      // dispatch() may read input_, so used bytes are erased first.
      input_.erase(0, at);
      at = 0;
      dispatch();
    } else if (state == HttpParser::State::body) {
      if (!std::exchange(body_timed_, true)) arm(loop_.options.body_timeout_s);
      if (parser_.wants_continue() && at == input_.size()) queue("HTTP/1.1 100 Continue\r\n\r\n");
      if (used == 0) break;
    } else {
      if (!std::exchange(header_timed_, true)) arm(loop_.options.header_timeout_s);
      if (used == 0) break;
    }
  }
  if (at > 0) input_.erase(0, at);
  advancing_ = false;
  if (phase_ == Phase::receiving) account_body(parser_.body_bytes() + input_.size());
}

void HttpListener::Connection::account_body(size_t bytes) {
  loop_.body_bytes += bytes - body_accounted_;
  body_accounted_ = bytes;
  if (bytes > 0) loop_.shed_bodies();
}

// The header is complete. False: the request has already been answered.
bool HttpListener::Connection::judge() {
  HttpRequest& request = parser_.request();
  account_body(0);
  bool proxied = false;
  for (const char* name : {"x-forwarded-for", "forwarded", "via"}) proxied = proxied || !request.header(name).empty();
  request.from_loopback = from_loopback_ && !proxied;
  since_s_ = now_s();
  auto refusal = loop_.handler->on_header(request);
  if (!refusal) return true;
  begin_exchange(request);
  // Its body is not read, so the start of the next request is unknown.
  close_after_ = close_after_ || parser_.state() == HttpParser::State::body;
  if (parser_.state() == HttpParser::State::done) parser_.take();
  respond(std::move(*refusal));
  return false;
}

void HttpListener::Connection::begin_exchange(const HttpRequest& request) {
  body_timed_ = header_timed_ = judged_ = head_begun_ = false;
  doubted_ = nullptr;
  timer_.cancel();
  phase_ = Phase::answering;
  ++exchange_id_;
  version_ = request.version;
  head_only_ = request.method == "HEAD";
  close_after_ = !request.keep_alive;
  chunked_ = false;
}

void HttpListener::Connection::dispatch() {
  HttpRequest request = parser_.take();
  begin_exchange(request);
  loop_.handler->handle(std::move(request), std::make_shared<Exchange>(weak_from_this(), exchange_id_));
}

void HttpListener::Connection::refuse(int status, const std::string& why) {
  HttpResponse response = loop_.handler->refuse(status, why);
  response.close = true;
  phase_ = Phase::answering;
  ++exchange_id_;
  head_only_ = false;
  account_body(0);
  respond(std::move(response));
}

// ---- Answering.

void HttpListener::Connection::respond(HttpResponse response) {
  close_after_ = close_after_ || response.close || loop_.draining;
  std::string framing = "Content-Length: " + std::to_string(response.body.size()) + "\r\n";
  std::string text = head_text(response, framing, close_after_, version_);
  if (!head_only_) text += response.body;
  gone_ = nullptr;
  head_begun_ = true;
  phase_ = Phase::flushing;
  queue(std::move(text));
}

void HttpListener::Connection::begin_stream(HttpResponse head) {
  head_begun_ = true;
  chunked_ = version_ >= 11;
  close_after_ = close_after_ || head.close || loop_.draining || !chunked_;
  queue(head_text(head, chunked_ ? "Transfer-Encoding: chunked\r\n" : "", close_after_, version_));
}

void HttpListener::Connection::write(std::string bytes) {
  if (bytes.empty()) return;
  if (output_bytes_ + bytes.size() > loop_.options.max_stream_buffer_bytes) return close();
  if (chunked_) {
    char size[24];
    std::snprintf(size, sizeof size, "%zx\r\n", bytes.size());
    bytes.insert(0, size);
    bytes += "\r\n";
  }
  queue(std::move(bytes));
}

void HttpListener::Connection::end_stream() {
  gone_ = nullptr;
  phase_ = Phase::flushing;
  if (chunked_)
    queue("0\r\n\r\n");
  else
    flush();
}

void HttpListener::Connection::append(std::string bytes) {
  output_bytes_ += bytes.size();
  bool back_is_whole = output_.size() > 1 || (output_.size() == 1 && output_at_ == 0);
  if (back_is_whole && output_.back().size() + bytes.size() <= kPacketBytes)
    output_.back() += bytes;
  else
    output_.push_back(std::move(bytes));
}

void HttpListener::Connection::queue(std::string bytes) {
  append(std::move(bytes));
  flush();
}

// Sends what the socket takes at once. Waits only when the socket is full.
void HttpListener::Connection::flush() {
  if (writing_ || phase_ == Phase::closed) return;
  while (!output_.empty()) {
    error_code failed;
    const std::string& front = output_.front();
    size_t n = socket_.write_some(asio::buffer(front.data() + output_at_, front.size() - output_at_), failed);
    if (failed == asio::error::would_block) {
      writing_ = true;
      bool timed = phase_ != Phase::receiving;  // otherwise the body's deadline is running
      if (timed) arm(loop_.options.write_timeout_s);
      socket_.async_wait(Wait::wait_write, [self = shared_from_this(), timed](error_code why) {
        self->writing_ = false;
        if (self->phase_ == Phase::closed) return;
        if (why) return self->close();
        if (timed) self->timer_.cancel();
        self->flush();
      });
      return;
    }
    if (failed) return close();
    output_at_ += n;
    output_bytes_ -= n;
    if (output_at_ == front.size()) {
      output_.pop_front();
      output_at_ = 0;
    }
  }
  if (phase_ == Phase::flushing) answered();
}

void HttpListener::Connection::answered() {
  account_body(0);
  if (close_after_ || loop_.draining) return linger();
  phase_ = Phase::receiving;
  since_s_ = now_s();
  arm(loop_.options.idle_timeout_s);
  // advance() loops instead of recursing, for a client that pipelines thousands of requests.
  if (!advancing_) {
    auto self = shared_from_this();
    advance();
    if (ended_ && phase_ == Phase::receiving) return close();
    read();
  }
}

// Closing a socket with unread input resets the connection and can destroy the answer in flight.
void HttpListener::Connection::linger() {
  phase_ = Phase::lingering;
  since_s_ = now_s();
  input_.clear();
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  if (ended_) return close();
  arm(kLingerSeconds);
  read();
}

// ---- The listener.

int connections_within(int wanted, size_t descriptors) {
  constexpr size_t kReserve = 64;  // files, channels, transports, pipes of workers
  const size_t most = descriptors > kReserve ? descriptors - kReserve : 0;
  return static_cast<int>(std::clamp(most, size_t(1), static_cast<size_t>(wanted)));
}

void HttpListener::Loop::shed_bodies() {
  while (body_bytes > options.max_body_bytes_in_all) {
    std::shared_ptr<Connection> oldest;
    for (const auto& c : connections)
      if (c->body_since_s() < (oldest ? oldest->body_since_s() : kNever)) oldest = c;
    if (!oldest) return;
    oldest->refuse(503, "the server is receiving too many request bodies; try again later");
  }
}

// Closes the connection that has been without a request for longest. False: all have one, or have just connected.
bool HttpListener::Loop::close_idlest() {
  std::shared_ptr<Connection> oldest;
  for (const auto& c : connections)
    if (c->idle_since_s() < (oldest ? oldest->idle_since_s() : kNever)) oldest = c;
  if (oldest) oldest->close();
  return oldest != nullptr;
}

// True: a descriptor is free for another connection.
bool HttpListener::Loop::free_descriptor() {
  constexpr double kQuietSeconds = 10;
  if (now_s() >= said_s + kQuietSeconds) {
    said_s = now_s();
    log_line(LogLevel::warning,
             "xpyd: no file descriptor is left for a new connection (%zu are open); idle connections are closed",
             connections.size());
  }
  return close_idlest();
}

void HttpListener::Loop::accept() {
  if (!acceptor.is_open() || accepting) return;
  // On EMFILE and similar errors the backlog stays readable, so retrying at once would spin.
  auto later = [this] {
    accept_retry.expires_after(std::chrono::milliseconds(100));
    accept_retry.async_wait([this](error_code stopped) {
      if (!stopped) accept();
    });
  };
  accepting = true;
  acceptor.async_wait(Wait::wait_read, [this, later](error_code failed) {
    accepting = false;
    if (!acceptor.is_open()) return;
    const bool full = connections.size() >= static_cast<size_t>(options.max_connections);
    if (failed || (full && !close_idlest())) return later();
    tcp::socket socket(io);
    acceptor.accept(socket, failed);
    if (failed == asio::error::would_block) return accept();  // the client has gone
    const bool none_left = failed == asio::error::no_descriptors || failed == std::errc::too_many_files_open_in_system;
    if (none_left && free_descriptor()) return accept();
    if (failed) return later();
    auto connection = std::make_shared<Connection>(*this, std::move(socket));
    connections.insert(connection);
    connection->start();
    accept();
  });
}

void HttpListener::Loop::tick() {
  ticker.expires_after(std::chrono::milliseconds(500));
  ticker.async_wait([this](error_code stopped) {
    if (stopped) return;
    handler->tick();
    tick();
  });
}

void HttpListener::Loop::drain() {
  if (draining) return;
  auto all = std::vector(connections.begin(), connections.end());
  for (auto& connection : all) connection->drain();
  draining = true;
  waited_for = connections.size();
  if (waited_for == 0) end_drain();
}

// Closes the port, so that no client waits at a port that nobody serves.
void HttpListener::Loop::end_drain() {
  error_code ignored;
  acceptor.close(ignored);
  io.stop();
}

void HttpListener::Loop::leave(const std::shared_ptr<Connection>& connection) {
  connections.erase(connection);
  if (draining && !connection->late && --waited_for == 0) end_drain();
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
  std::vector<std::function<void()>> dropped;
  {
    std::lock_guard lock(loop_->mutex);
    loop_->closed = true;
    dropped.swap(loop_->inbox);
  }
  error_code ignored;
  loop_->acceptor.close(ignored);
  auto all = std::vector(loop_->connections.begin(), loop_->connections.end());
  for (auto& connection : all) connection->close();
}

void HttpListener::run(HttpHandler& handler) {
  loop_->handler = &handler;
  loop_->accept();
  loop_->tick();
  loop_->io.run();
}

void HttpListener::begin_drain() {
  loop_->post([loop = loop_.get()] { loop->drain(); });
}
void HttpListener::stop() {
  loop_->post([loop = loop_.get()] { loop->io.stop(); });
}
int HttpListener::port() const { return loop_->acceptor.local_endpoint().port(); }
bool HttpListener::is_loopback() const { return is_loopback_address(loop_->acceptor.local_endpoint().address()); }
HttpPost HttpListener::post() const {
  return [loop = loop_](std::function<void()> f) { loop->post(std::move(f)); };
}

}  // namespace xpyd::server
