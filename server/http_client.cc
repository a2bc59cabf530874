#include "server/http_client.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <unordered_map>

#include "server/http_message.h"

namespace xpyd {
namespace {

constexpr size_t kMaxHeadBytes = 64 << 10;
constexpr uint64_t kMaxBodyBytes = uint64_t{1} << 40;
constexpr size_t kMaxEventBytes = 16 << 20;

std::string_view trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t' || text.back() == '\r')) text.remove_suffix(1);
  return text;
}

template <class T>
bool parse_all(std::string_view text, T* out, int base = 10) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out, base);
  return error == std::errc() && end == text.data() + text.size();
}

Error malformed(const std::string& what) { return {ErrorCode::io, "malformed response: " + what}; }

}  // namespace

const std::string& HttpResponseParser::header(const std::string& lower_case_name) const {
  static const std::string none;
  auto found = headers_.find(lower_case_name);
  return found == headers_.end() ? none : found->second;
}

Status HttpResponseParser::head_complete() {
  size_t end = line_.find('\n');
  std::string_view first = trim(std::string_view(line_).substr(0, end));
  // "HTTP/1.1 200 OK"
  if (first.size() < 12 || first.substr(0, 7) != "HTTP/1." || first[8] != ' ' ||
      !parse_all(first.substr(9, 3), &status_) || status_ < 100 || status_ > 599)
    return malformed("status line '" + std::string(first.substr(0, 80)) + "'");
  reason_ = trim(first.substr(12));
  headers_.clear();
  while (end != line_.npos) {
    size_t begin = end + 1;
    end = line_.find('\n', begin);
    std::string_view line = trim(std::string_view(line_).substr(begin, end - begin));
    if (line.empty()) continue;
    size_t colon = line.find(':');
    if (colon == line.npos || colon == 0) return malformed("header '" + std::string(line.substr(0, 80)) + "'");
    headers_[lower(line.substr(0, colon))] = trim(line.substr(colon + 1));
  }
  line_.clear();
  if (status_ < 200) return ok();  // 100 Continue: another head follows
  left_ = 0;
  const std::string& length = header("content-length");
  if (lower(header("transfer-encoding")).find("chunked") != std::string::npos) {
    state_ = State::chunk_size;
  } else if (status_ == 204 || status_ == 304) {
    state_ = State::complete;
  } else if (!length.empty()) {
    if (!parse_all(length, &left_) || left_ > kMaxBodyBytes)
      return malformed("Content-Length '" + length.substr(0, 80) + "'");
    state_ = left_ == 0 ? State::complete : State::body_length;
  } else {
    state_ = State::body_close;
    left_ = kMaxBodyBytes;
  }
  return ok();
}

Status HttpResponseParser::feed(std::string_view bytes, const std::function<void(std::string_view)>& body) {
  // One line more of the head, a chunk size or the trailer; false: its end is not here yet.
  auto take_line = [&] {
    size_t end = bytes.find('\n');
    size_t n = end == bytes.npos ? bytes.size() : end + 1;
    line_.append(bytes.substr(0, n));
    bytes.remove_prefix(n);
    return end != std::string_view::npos;
  };
  while (!bytes.empty()) {
    switch (state_) {
      case State::head: {
        bool whole = take_line();
        if (line_.size() > kMaxHeadBytes) return malformed("more than 64 KiB of headers");
        // The blank line; before a status line it is skipped.
        size_t last = line_.size() > 1 ? line_.rfind('\n', line_.size() - 2) : line_.npos;
        size_t begin = last == line_.npos ? 0 : last + 1;
        if (!whole || !trim(std::string_view(line_).substr(begin, line_.size() - begin - 1)).empty()) break;
        if (begin == 0) {
          line_.clear();
          break;
        }
        if (Status status = head_complete(); !status) return status;
        break;
      }
      case State::body_length:
      case State::body_close:
      case State::chunk_data: {
        size_t n = size_t(std::min<uint64_t>(bytes.size(), left_));
        if (n == 0) return malformed("more than 1 TiB of body");
        body(bytes.substr(0, n));
        bytes.remove_prefix(n);
        left_ -= n;
        if (left_ == 0 && state_ == State::body_length) state_ = State::complete;
        if (left_ == 0 && state_ == State::chunk_data) state_ = State::chunk_end;
        break;
      }
      case State::chunk_size: {
        bool whole = take_line();
        if (line_.size() > 256) return malformed("chunk size of more than 256 bytes");
        if (!whole) break;
        std::string_view size = trim(std::string_view(line_).substr(0, line_.find_first_of(";\n")));
        if (size.empty() || !parse_all(size, &left_, 16) || left_ > kMaxBodyBytes)
          return malformed("chunk size '" + std::string(size.substr(0, 80)) + "'");
        line_.clear();
        state_ = left_ == 0 ? State::trailer : State::chunk_data;
        break;
      }
      case State::chunk_end:
      case State::trailer: {
        bool whole = take_line();
        if (line_.size() > kMaxHeadBytes) return malformed("more than 64 KiB of trailer");
        if (!whole) break;
        bool blank = trim(std::string_view(line_).substr(0, line_.size() - 1)).empty();
        line_.clear();
        if (state_ == State::chunk_end) {
          if (!blank) return malformed("a chunk is longer than its size");
          state_ = State::chunk_size;
        } else if (blank) {
          state_ = State::complete;
        }
        break;
      }
      case State::complete: return malformed("bytes after its end");
    }
  }
  return ok();
}

Status HttpResponseParser::finish() {
  if (state_ == State::body_close) state_ = State::complete;
  if (state_ == State::complete) return ok();
  if (status_ == 0) return Error{ErrorCode::io, "the server closed before it answered"};
  return Error{ErrorCode::io, "the server closed in the middle of its answer"};
}

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

namespace {

constexpr size_t kMaxFetchBytes = 64 << 20;

bool parse_port(std::string_view text, int* port) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *port);
  return error == std::errc() && end == text.data() + text.size() && *port >= 1 && *port <= 65535;
}

}  // namespace

std::string HttpUrl::authority() const {
  std::string name = host.find(':') == host.npos ? host : "[" + host + "]";
  return name + ":" + std::to_string(port);
}

Result<HttpUrl> parse_http_url(const std::string& text) {
  auto bad = [&](const std::string& why) { return invalid("'" + text + "': " + why + "; expected http://HOST:PORT"); };
  if (text.rfind("https://", 0) == 0) return bad("https is not supported");
  if (text.rfind("http://", 0) != 0) return bad("no http://");
  for (unsigned char c : text)
    if (c <= ' ' || c == 0x7f) return bad("a blank or control character");
  HttpUrl url;
  std::string_view rest = std::string_view(text).substr(7);
  size_t slash = std::min(rest.find_first_of("/?#"), rest.size());
  std::string_view place = rest.substr(0, slash), path = rest.substr(slash);
  if (path.find_first_of("?#") != path.npos) return bad("a query or fragment");
  while (!path.empty() && path.back() == '/') path.remove_suffix(1);
  url.prefix = path;
  if (place.find('@') != place.npos) return bad("user names are not supported");
  std::string_view port;
  if (!place.empty() && place[0] == '[') {
    size_t close = place.find(']');
    if (close == place.npos) return bad("'[' without ']'");
    url.host = place.substr(1, close - 1);
    port = place.substr(close + 1);
  } else {
    size_t colon = std::min(place.find(':'), place.size());
    url.host = place.substr(0, colon);
    port = place.substr(colon);
  }
  if (url.host.empty()) return bad("no host");
  if (port.empty()) return url;
  if (port[0] != ':' || !parse_port(port.substr(1), &url.port)) return bad("a port is from 1 to 65535");
  return url;
}

struct HttpClient::Impl {
  struct Connection {
    int fd = -1;
    std::string out;
    size_t sent = 0;
    double deadline_s = 0, timeout_s = 0;
    HttpResponseParser parser;
    OnBody on_body;
    OnDone on_done;
  };

  HttpUrl url;
  std::string fixed_headers;
  Clock* clock = nullptr;
  sockaddr_storage address{};
  socklen_t address_bytes = 0;
  int epoll = -1;
  uint64_t next_id = 1;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections;
  double next_deadline_check_s = 0;

  ~Impl() {
    drop_all();
    if (epoll >= 0) close(epoll);
  }

  void drop_all() {
    for (auto& [id, connection] : connections) close(connection->fd);
    connections.clear();
  }

  // Ends a call: off the books first, because on_done may start another.
  void end(uint64_t id, const std::string& error) {
    auto node = connections.extract(id);
    if (node.empty()) return;
    Connection& connection = *node.mapped();
    close(connection.fd);
    HttpOutcome outcome{connection.parser.status(), connection.parser.reason(), error};
    if (connection.on_done) connection.on_done(outcome);
  }

  void watch(uint64_t id, Connection& connection, bool writing) {
    epoll_event event{};
    event.events = EPOLLIN | (writing ? uint32_t(EPOLLOUT) : 0u);
    event.data.u64 = id;
    if (epoll_ctl(epoll, EPOLL_CTL_MOD, connection.fd, &event) != 0)
      epoll_ctl(epoll, EPOLL_CTL_ADD, connection.fd, &event);
  }

  void write_some(uint64_t id, Connection& connection) {
    while (connection.sent < connection.out.size()) {
      ssize_t n = send(connection.fd, connection.out.data() + connection.sent, connection.out.size() - connection.sent,
                       MSG_NOSIGNAL);
      if (n > 0) {
        connection.sent += size_t(n);
        continue;
      }
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN) return;
      // A server may answer (413, 503) and close before it has read everything: the answer counts.
      connection.out.clear();
      connection.sent = 0;
      watch(id, connection, false);
      return;
    }
    connection.out = std::string();
    connection.sent = 0;
    watch(id, connection, false);
  }

  void read_some(uint64_t id, Connection& connection) {
    char buffer[64 << 10];
    while (true) {
      ssize_t n = recv(connection.fd, buffer, sizeof buffer, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (n < 0) return end(id, std::strerror(errno));
      auto body = [&](std::string_view bytes) { connection.on_body(connection.parser.status(), bytes); };
      Status status = n == 0 ? connection.parser.finish() : connection.parser.feed({buffer, size_t(n)}, body);
      if (!status) return end(id, status.error().message);
      if (connection.parser.complete()) return end(id, "");
    }
  }
};

HttpClient::HttpClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpClient::~HttpClient() = default;

Result<std::unique_ptr<HttpClient>> HttpClient::create(const HttpUrl& url,
                                                       std::vector<std::pair<std::string, std::string>> headers,
                                                       Clock& clock) {
  auto impl = std::make_unique<Impl>();
  impl->url = url;
  impl->clock = &clock;
  headers.insert(headers.begin(), {"Host", url.authority()});
  for (const auto& [name, value] : headers) {
    if ((name + value).find_first_of(std::string("\r\n\0", 3)) != std::string::npos)
      return invalid("header " + name + ": a line break in its value");
    impl->fixed_headers += name + ": " + value + "\r\n";
  }
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  int failed = getaddrinfo(url.host.c_str(), std::to_string(url.port).c_str(), &hints, &found);
  if (failed) return Error{ErrorCode::io, "host " + url.host + ": " + gai_strerror(failed)};
  std::memcpy(&impl->address, found->ai_addr, found->ai_addrlen);
  impl->address_bytes = found->ai_addrlen;
  freeaddrinfo(found);
  impl->epoll = epoll_create1(EPOLL_CLOEXEC);
  if (impl->epoll < 0) return Error{ErrorCode::io, std::string("epoll: ") + std::strerror(errno)};
  return std::unique_ptr<HttpClient>(new HttpClient(std::move(impl)));
}

void HttpClient::start(const HttpCall& call, OnBody on_body, OnDone on_done) {
  auto fail = [&](const char* what) {
    HttpOutcome outcome{0, "", std::string(what) + ": " + std::strerror(errno)};
    on_done(outcome);
  };
  int fd = socket(impl_->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return fail("socket");
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  double start_s = impl_->clock->now();
  if (connect(fd, reinterpret_cast<sockaddr*>(&impl_->address), impl_->address_bytes) != 0 && errno != EINPROGRESS) {
    fail("connect");
    close(fd);
    return;
  }
  auto connection = std::make_unique<Impl::Connection>();
  connection->fd = fd;
  connection->timeout_s = call.timeout_s;
  connection->deadline_s = start_s + call.timeout_s;
  connection->on_body = std::move(on_body);
  connection->on_done = std::move(on_done);
  connection->out = call.method + " " + impl_->url.prefix + call.target + " HTTP/1.1\r\n" + impl_->fixed_headers +
                    "Connection: close\r\n";
  if (!call.body.empty())
    connection->out += "Content-Type: application/json\r\nContent-Length: " + std::to_string(call.body.size()) + "\r\n";
  connection->out += "\r\n" + call.body;
  uint64_t id = impl_->next_id++;
  Impl::Connection& placed = *impl_->connections.emplace(id, std::move(connection)).first->second;
  impl_->watch(id, placed, true);
}

void HttpClient::poll(double seconds) {
  epoll_event events[256];
  double wait_s = std::clamp(seconds, 0.0, 0.1);  // timeouts are looked at ten times a second
  // ppoll, because epoll_wait counts in whole milliseconds: an arrival would be that much late.
  timespec wait{0, long(wait_s * 1e9)};
  pollfd ready{impl_->epoll, POLLIN, 0};
  int n = ppoll(&ready, 1, &wait, nullptr) > 0 ? epoll_wait(impl_->epoll, events, 256, 0) : 0;
  for (int i = 0; i < n; ++i) {
    uint64_t id = events[i].data.u64;
    auto connection_of = [&] {
      auto found = impl_->connections.find(id);
      return found == impl_->connections.end() ? nullptr : found->second.get();
    };
    if (auto* c = connection_of(); c && (events[i].events & EPOLLOUT)) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
      if (error)
        impl_->end(id, std::string("connect: ") + std::strerror(error));
      else
        impl_->write_some(id, *c);
    }
    if (auto* c = connection_of(); c && (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) impl_->read_some(id, *c);
  }
  double now = impl_->clock->now();
  if (now < impl_->next_deadline_check_s) return;
  impl_->next_deadline_check_s = now + 0.1;
  std::vector<uint64_t> late;
  for (auto& [id, connection] : impl_->connections)
    if (now >= connection->deadline_s) late.push_back(id);
  for (uint64_t id : late) {
    auto found = impl_->connections.find(id);
    if (found == impl_->connections.end()) continue;
    impl_->end(id, "no complete answer in time (" + std::to_string(int64_t(found->second->timeout_s * 1000)) + " ms)");
  }
}

int HttpClient::in_flight() const { return int(impl_->connections.size()); }

void HttpClient::abort_all() { impl_->drop_all(); }

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
  std::string what = call.method + " http://" + impl_->url.authority() + impl_->url.prefix + call.target + ": ";
  if (!outcome.error.empty()) return Error{ErrorCode::io, what + outcome.error};
  if (outcome.status < 200 || outcome.status > 299) {
    ErrorCode code = outcome.status == 404 ? ErrorCode::not_found : ErrorCode::io;
    return Error{code, what + std::to_string(outcome.status) + " " + outcome.reason};
  }
  if (too_long) return Error{ErrorCode::io, what + "an answer of more than 64 MiB"};
  return body;
}

}  // namespace xpyd
