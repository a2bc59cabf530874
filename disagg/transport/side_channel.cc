#include "disagg/transport/side_channel.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>

#include "base/clock.h"

namespace xpyd {
namespace {

constexpr size_t kMaxRegions = 1024;

template <class T>
bool number(std::string_view text, T& value, int base) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  return error == std::errc() && end == text.data() + text.size();
}

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%llx", static_cast<unsigned long long>(value));
  return text;
}

// The text up to the next `separator`, which is taken as well.
std::string_view next(std::string_view& text, char separator) {
  const size_t at = std::min(text.find(separator), text.size());
  std::string_view taken = text.substr(0, at);
  text.remove_prefix(std::min(at + 1, text.size()));
  return taken;
}

}  // namespace

std::string to_text(const std::string& kind, const SideAddress& address) {
  std::string text = kind + "," + address.host + "," + std::to_string(address.port) + "," + hex(address.token);
  for (const SideAddress::Region& region : address.regions) text += "," + hex(region.base) + "+" + hex(region.bytes);
  return text;
}

Result<SideAddress> parse_side_address(const std::string& kind, const std::string& text) {
  auto wrong = [&](const std::string& what) { return invalid("address of a " + kind + " transport: " + what); };
  std::string_view rest = text;
  if (next(rest, ',') != kind) return wrong("it does not begin with " + kind);
  SideAddress address;
  address.host = next(rest, ',');
  if (address.host.empty()) return wrong("expected a host");
  if (!number(next(rest, ','), address.port, 10) || address.port == 0) return wrong("expected a port, 1 to 65535");
  if (!number(next(rest, ','), address.token, 16)) return wrong("expected a token, hexadecimal");
  while (!rest.empty()) {
    std::string_view part = next(rest, ',');
    SideAddress::Region region;
    if (!number(next(part, '+'), region.base, 16) || !number(part, region.bytes, 16) ||
        region.bytes > UINT64_MAX - region.base)
      return wrong("expected regions, base+bytes, hexadecimal");
    if (address.regions.size() == kMaxRegions) return wrong("more than 1024 regions");
    address.regions.push_back(region);
  }
  return address;
}

namespace {

constexpr size_t kMaxUnsent = 4 << 20;  // a peer that is stopped does not read
constexpr size_t kStrangers = 32;       // connections without a hello
constexpr size_t kChannels = 4096;
constexpr double kHelloSeconds = 10;
constexpr long kSoonNanoseconds = 20000;
constexpr double kDeafSeconds = 0.1;  // when there are no descriptors for callers

double now() { return RealClock().now(); }

Error io(const std::string& what) { return {ErrorCode::unavailable, what + ": " + std::strerror(errno)}; }

uint32_t frame_bytes(const std::string& received) {
  uint32_t n = 0;
  for (int i = 3; i >= 0; --i) n = n << 8 | uint8_t(received[size_t(i)]);
  return n;
}

struct Lookup {
  addrinfo* found = nullptr;
  Lookup(const std::string& host, uint16_t port, int flags) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) found = nullptr;
  }
  Lookup(const Lookup&) = delete;
  ~Lookup() {
    if (found) freeaddrinfo(found);
  }
};

bool ready(int fd, short events) {
  pollfd one{fd, events, 0};
  return poll(&one, 1, 0) > 0;
}

void wake_up(int eventfd) {
  const uint64_t one = 1;
  XPYD_CHECK(write(eventfd, &one, sizeof one) == ssize_t(sizeof one));
}

void set_no_delay(int fd) {
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace

SideChannel::~SideChannel() { close(fd_); }

bool SideChannel::flush() {
  while (!unsent_.empty()) {
    const ssize_t n = ::send(fd_, unsent_.data(), unsent_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    unsent_.erase(0, size_t(n));
  }
  return true;
}

void SideChannel::send(const std::string& bytes) {
  std::lock_guard lock(mutex_);
  if (ended_) return;
  unsent_ += bytes;
  if (!flush() || unsent_.size() > kMaxUnsent) end();
  // The thread waits for room in the socket only if it knows.
  if (!ended_ && !unsent_.empty() && wake_ >= 0) wake_up(wake_);
}

void SideChannel::end() {
  ended_ = true;
  shutdown(fd_, SHUT_RDWR);
}

bool SideChannel::read() {
  char bytes[16384];
  const ssize_t n = recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n == 0) return false;
  received_.append(bytes, size_t(n));
  size_t taken = 0;
  while (received_.size() - taken >= 4) {
    const size_t body = frame_bytes(received_.substr(taken, 4));
    if (body > (trusted ? limits_.frame : limits_.hello)) return false;
    if (received_.size() - taken - 4 < body) break;
    if (!frame(std::string_view(received_).substr(taken + 4, body))) return false;
    taken += 4 + body;
  }
  received_.erase(0, taken);
  return true;
}

SideChannels::SideChannels(SideLimits limits, std::function<void(const std::shared_ptr<SideChannel>&)> accepted,
                           std::function<bool()> work)
    : limits_(limits),
      accepted_(std::move(accepted)),
      work_(std::move(work)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  XPYD_CHECK(wake_ >= 0);
}

SideChannels::~SideChannels() {
  stop();
  if (listener_ >= 0) close(listener_);
  close(wake_);
}

Status SideChannels::listen(const std::string& host) {
  Lookup lookup(host, 0, AI_PASSIVE);
  if (!lookup.found) return invalid("cannot listen on " + host + ": no such host");
  const addrinfo& at = *lookup.found;
  listener_ = socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  char numeric[128];
  if (listener_ < 0 || bind(listener_, at.ai_addr, at.ai_addrlen) != 0 || ::listen(listener_, 64) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&bound), &length) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&bound), length, numeric, sizeof numeric, nullptr, 0, NI_NUMERICHOST) !=
          0)
    return io("cannot listen on " + host);
  host_ = numeric;
  port_ = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                            : reinterpret_cast<sockaddr_in&>(bound).sin_port);
  return ok();
}

void SideChannels::start() {
  thread_ = std::thread([this] { run(); });
}

void SideChannels::stop() {
  stopping_ = true;
  if (!thread_.joinable()) return;
  wake();
  thread_.join();
  for (auto& channel : channels_) channel->end();
  for (auto& channel : added_) channel->end();
}

void SideChannels::add(std::shared_ptr<SideChannel> channel) {
  {
    std::scoped_lock lock(mutex_, channel->mutex_);
    channel->wake_ = wake_;
    added_.push_back(channel);
  }
  wake();
}

void SideChannels::wake() { wake_up(wake_); }

bool SideChannels::accept_one() {
  const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return errno != EMFILE && errno != ENFILE;
  auto channel = std::make_shared<SideChannel>(fd, limits_);
  const auto stranger = [](const auto& c) { return !c->trusted; };
  if (size_t(std::count_if(channels_.begin(), channels_.end(), stranger)) >= kStrangers) {
    const auto oldest = std::find_if(channels_.begin(), channels_.end(), stranger);
    (*oldest)->end();  // honest peers need a millisecond
    (*oldest)->left();
    channels_.erase(oldest);
  }
  if (channels_.size() >= kChannels) return true;
  set_no_delay(fd);
  channel->wake_ = wake_;
  accepted_(channel);
  channel->since_ = now();
  channels_.push_back(std::move(channel));
  return true;
}

void SideChannels::run() {
  std::vector<pollfd> polled;
  double deaf_until = 0;
  while (!stopping_) {
    {
      std::lock_guard lock(mutex_);
      for (auto& channel : added_) channels_.push_back(std::move(channel));
      added_.clear();
    }
    const bool soon = work_ && work_();
    // A caller that cannot be let in stays: poll would return at once, again and again.
    const bool deaf = now() < deaf_until;
    const timespec most = soon   ? timespec{0, kSoonNanoseconds}
                          : deaf ? timespec{0, long(kDeafSeconds * 1e9)}
                                 : timespec{1, 0};
    polled.assign({{wake_, POLLIN, 0}, {deaf ? -1 : listener_, POLLIN, 0}});
    for (const auto& channel : channels_) {
      std::lock_guard lock(channel->mutex_);
      polled.push_back({channel->fd_, short(POLLIN | (channel->unsent_.empty() ? 0 : POLLOUT)), 0});
    }
    // A send that leaves something unsent wakes us; once a second is enough to see strangers that
    // say nothing.
    if (ppoll(polled.data(), polled.size(), &most, nullptr) < 0 && errno != EINTR) break;
    uint64_t count;
    while (::read(wake_, &count, sizeof count) > 0) {
    }
    const size_t n = polled.size() - 2;
    for (size_t i = 0; i < n; ++i) {
      SideChannel& channel = *channels_[i];
      const short events = polled[i + 2].revents;
      bool alive = channel.trusted || now() < channel.since_ + kHelloSeconds;
      if (alive && (events & POLLOUT)) {
        std::lock_guard lock(channel.mutex_);
        alive = channel.flush();
      }
      if (alive && (events & (POLLIN | POLLHUP | POLLERR))) alive = channel.read();
      if (!alive) {
        channel.end();
        channel.left();
        channels_[i] = nullptr;
      }
    }
    std::erase(channels_, nullptr);
    if ((polled[1].revents & POLLIN) && !accept_one()) deaf_until = now() + kDeafSeconds;
  }
}

Result<SideCall> SideCall::begin(const std::string& host, uint16_t port, std::string frame, SideLimits limits) {
  SideCall call;
  call.where_ = host + ":" + std::to_string(port);
  call.limits_ = limits;
  call.unsent_ = std::move(frame);
  Lookup lookup(host, port, AI_NUMERICHOST);
  if (!lookup.found) return Error{ErrorCode::unavailable, call.where_ + ": not an IP address"};
  const int fd = socket(lookup.found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return io(call.where_);
  call.channel_ = std::make_shared<SideChannel>(fd, limits);
  set_no_delay(fd);
  if (connect(fd, lookup.found->ai_addr, lookup.found->ai_addrlen) != 0 && errno != EINPROGRESS) return io(call.where_);
  return call;
}

Result<std::optional<std::string>> SideCall::answer() {
  const int fd = channel_->fd_;
  if (!unsent_.empty()) {
    int error = 0;
    socklen_t length = sizeof error;
    if (!ready(fd, POLLOUT)) return std::optional<std::string>();
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    errno = error;
    if (error != 0) return io(where_);
    channel_->send(std::exchange(unsent_, {}));
  }
  for (;;) {
    // Not a byte more than the answer: what follows it is the thread's to read.
    const size_t wanted = received_.size() < 4 ? 4 : 4 + size_t(frame_bytes(received_));
    if (received_.size() == wanted) return std::optional(received_.substr(4));
    if (wanted > 4 + limits_.hello) return Error{ErrorCode::unavailable, where_ + " answers nonsense"};
    char bytes[4096];
    const ssize_t n = recv(fd, bytes, std::min(sizeof bytes, wanted - received_.size()), MSG_DONTWAIT);
    if (n == 0) return Error{ErrorCode::unavailable, where_ + " hung up"};
    if (n < 0 && errno == EAGAIN) return std::optional<std::string>();
    if (n < 0 && errno != EINTR) return io(where_);
    if (n > 0) received_.append(bytes, size_t(n));
  }
}

}  // namespace xpyd
