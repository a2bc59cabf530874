// The I/O thread: what the kernel tells, and the deadlines.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "disagg/control/channel_impl.h"

namespace xpyd {
namespace {

constexpr int kReadsPerTurn = 16;       // then the other channels have theirs
constexpr double kCheckSeconds = 0.05;  // between two looks at deadlines

}  // namespace

ControlLoop::Impl::Impl(Clock& c, const ChannelLimits& l, std::function<void(const std::string&)> to)
    : clock(c), limits(l), log(std::move(to)) {
  epoll = epoll_create1(EPOLL_CLOEXEC);
  wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll < 0 || wake < 0)
    begun = Error{ErrorCode::unavailable, std::string("epoll: ") + std::strerror(errno)};
  else
    watch(wake, kWakeId, EPOLLIN);
}

ControlLoop::Impl::~Impl() {
  ::close(wake);
  ::close(epoll);
}

void ControlLoop::Impl::watch(int fd, uint64_t id, uint32_t what, int operation) {
  epoll_event event{};
  event.events = what | EPOLLET;
  event.data.u64 = id;
  XPYD_CHECK(epoll_ctl(epoll, operation, fd, &event) == 0, std::strerror(errno));
}

void ControlLoop::Impl::signal() {
  if (std::exchange(signalled, true)) return;
  uint64_t one = 1;
  ssize_t n = ::write(wake, &one, sizeof one);
  XPYD_CHECK(n == sizeof one, std::strerror(errno));
}

void ControlLoop::Impl::attend(uint64_t id) {
  std::lock_guard lock(mutex);
  woken.push_back(id);
  signal();
}

void ControlLoop::Impl::run() {
  io_thread = std::this_thread::get_id();
  epoll_event events[64];
  double active_s = clock.now();
  for (;;) {
    const bool poll = !unread.empty() || clock.now() < active_s + limits.spin_s;
    int n = epoll_wait(epoll, events, 64, poll ? 0 : int(kCheckSeconds * 1000));
    double now = clock.now();
    if (n > 0 || !unread.empty()) active_s = now;
    bool woke = false;
    for (int i = 0; i < n; ++i) {
      if (events[i].data.u64 == kWakeId)
        woke = true;
      else
        on_event(events[i].data.u64, events[i].events);
    }
    for (uint64_t id : std::exchange(unread, {}))
      if (auto found = channels.find(id); found != channels.end()) read_some(ChannelPtr(found->second), true);
    if (woke) run_inbox();
    if (now >= next_check_s) check(now);
    if (woke) {
      std::lock_guard lock(mutex);
      if (stopping) break;
    }
  }
  drop_everything();
}

void ControlLoop::Impl::run_inbox() {
  std::vector<std::function<void()>> calls;
  std::vector<uint64_t> ids;
  {
    std::lock_guard lock(mutex);
    uint64_t count;
    [[maybe_unused]] ssize_t n = ::read(wake, &count, sizeof count);
    signalled = false;
    calls.swap(inbox);
    ids.swap(woken);
  }
  for (auto& f : calls) f();
  for (uint64_t id : ids)
    if (auto found = channels.find(id); found != channels.end()) linger(ChannelPtr(found->second));
}

void ControlLoop::Impl::drop_everything() {
  run_inbox();
  for (auto& [id, listening] : listeners) close_listener(listening.fd, listening.tcp ? "" : listening.endpoint.address);
  listeners.clear();
  while (!channels.empty()) {
    ChannelPtr channel = channels.begin()->second;
    channel->close("the process leaves");
    if (channel->impl_->stage == Stage::open) {  // what the kernel takes at once still leaves
      std::lock_guard lock(channel->impl_->mutex);
      channel->impl_->write_some();
    }
    end(channel, "the control loop ended");
  }
  // A callback may have posted, or connect() be waiting: nobody is left without an answer.
  std::vector<std::function<void()>> calls;
  {
    std::lock_guard lock(mutex);
    calls.swap(inbox);
  }
  for (auto& f : calls) f();
  while (!channels.empty()) end(ChannelPtr(channels.begin()->second), "the control loop ended");
}

void ControlLoop::Impl::add(ChannelPtr channel, int fd, double timeout_s) {
  Channel::Impl& c = *channel->impl_;
  c.loop = this;
  c.id = next_id++;
  c.deadline_s = clock.now() + timeout_s;
  c.fd = fd;
  channels.emplace(c.id, std::move(channel));
  uint32_t connecting = c.stage == Stage::connecting ? uint32_t(EPOLLOUT) : 0;
  watch(fd, c.id, EPOLLIN | EPOLLRDHUP | connecting);
}

void ControlLoop::Impl::accept_all(uint64_t listener_id) {
  Listening& listening = listeners.at(listener_id);
  listening.retry = false;
  for (;;) {
    sockaddr_storage from{};
    socklen_t bytes = sizeof from;
    int fd = accept4(listening.fd, reinterpret_cast<sockaddr*>(&from), &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // Out of descriptors or memory: no spinning, the next look at the deadlines tries again.
      listening.retry = errno != EAGAIN && errno != EWOULDBLOCK;
      return;
    }
    if (!listening.tcp && !of_user_or_root(fd)) {
      ++refused;
      ::close(fd);
      continue;
    }
    if (int(unknown.size()) >= limits.max_unknown_peers) {
      uint64_t oldest = unknown.front();  // honest peers need a millisecond; who lingers, goes
      if (auto found = channels.find(oldest); found != channels.end())
        fail(ChannelPtr(found->second), "handshake: too many unknown peers at once");
    }
    int one = 1;
    if (listening.tcp) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    auto impl = std::make_unique<Channel::Impl>();
    impl->accepted = true;
    impl->address = "a peer of " + listening.endpoint.address;
    impl->handshake.emplace(Handshake::Side::acceptor, listening.endpoint.key, listening.endpoint.self);
    impl->on_open = listening.on_open;
    ChannelPtr channel(new Channel(std::move(impl)));
    add(channel, fd, limits.handshake_timeout_s);
    unknown.push_back(channel->impl_->id);
  }
}

void ControlLoop::Impl::start_connect(const ControlAddress& address, const ControlEndpoint& endpoint, double timeout_s,
                                      OnOpen on_open, std::function<void(Result<ChannelPtr>)> done) {
  {
    std::lock_guard lock(mutex);
    if (stopping) return done(Error{ErrorCode::cancelled, "the control loop ended"});
  }
  Result<int> fd = connect_to(address);
  if (!fd) return done(fd.error());
  int one = 1;
  if (!address.is_unix()) setsockopt(fd.value(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  auto impl = std::make_unique<Channel::Impl>();
  impl->stage = Stage::connecting;
  impl->address = address.text;
  impl->handshake.emplace(Handshake::Side::initiator, endpoint.key, endpoint.self);
  impl->on_open = std::move(on_open);
  impl->on_connected = std::move(done);
  add(ChannelPtr(new Channel(std::move(impl))), fd.value(), timeout_s);
}

void ControlLoop::Impl::on_event(uint64_t id, uint32_t happened) {
  if (listeners.count(id)) return accept_all(id);
  auto found = channels.find(id);
  if (found == channels.end()) return;
  ChannelPtr channel = found->second;
  Channel::Impl& c = *channel->impl_;
  if (c.stage == Stage::connecting) {
    int error = 0;
    socklen_t bytes = sizeof error;
    getsockopt(c.fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error) return fail(channel, std::string("connect: ") + std::strerror(error));
    if (!(happened & EPOLLOUT)) return;
    c.stage = Stage::handshake;
    {
      std::lock_guard lock(c.mutex);
      c.watch_output(false);
    }
    std::string_view none;
    take_handshake(channel, none);
  } else if (happened & EPOLLOUT) {
    std::lock_guard lock(c.mutex);
    c.write_some();
  }
  if (c.stage == Stage::lingering) shut_when_sent(c);
  const uint32_t ended = happened & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
  if (ended || (happened & EPOLLIN)) read_some(channel, ended);
}

// With `to_the_end` until the socket has no more: its end, or an error, was announced and will not
// be again. Otherwise a short read is enough, as what comes later is announced anew.
void ControlLoop::Impl::read_some(const ChannelPtr& channel, bool to_the_end) {
  Channel::Impl& c = *channel->impl_;
  for (int turn = 0; turn < kReadsPerTurn; ++turn) {
    if (c.stage == Stage::gone || c.stage == Stage::connecting) return;
    ssize_t n = ::recv(c.fd, scratch.data(), scratch.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) {
      std::string reason = n == 0 ? "the peer closed the connection" : std::strerror(errno);
      if (c.stage == Stage::handshake && c.handshake->proving() && !c.accepted)
        reason += " during the handshake: probably it has another cluster key";
      return fail(channel, reason);
    }
    if (c.stage == Stage::lingering) continue;
    c.heard_s = clock.now();
    take(channel, std::string_view(scratch.data(), size_t(n)));
    if (!to_the_end && size_t(n) < scratch.size()) return;
  }
  unread.push_back(c.id);
}

void ControlLoop::Impl::check(double now) {
  next_check_s = now + kCheckSeconds;
  for (auto& [id, listening] : listeners)
    if (listening.retry) accept_all(id);
  std::vector<ChannelPtr> all;
  all.reserve(channels.size());
  for (auto& [id, channel] : channels) all.push_back(channel);
  for (const ChannelPtr& channel : all) {
    Channel::Impl& c = *channel->impl_;
    if (c.stage == Stage::connecting || c.stage == Stage::handshake) {
      if (now >= c.deadline_s)
        fail(channel, c.stage == Stage::connecting ? "connect: no answer in time" : "handshake: not complete in time");
    } else if (c.stage == Stage::lingering) {
      if (now >= c.deadline_s) end(channel, "");
    } else if (c.stage == Stage::open) {
      // If it was we who slept, the peer's signs of life are still in the socket.
      if (now >= c.heard_s + limits.silence_timeout_s) read_some(channel, true);
      if (c.stage == Stage::open && now >= c.heard_s + limits.silence_timeout_s) {
        ++silent;
        fail(channel, "the peer was silent for " + std::to_string(int((now - c.heard_s) * 1000)) + " ms");
      } else if (c.stage == Stage::open && now >= c.beat_s + limits.heartbeat_s) {
        c.beat_s = now;
        std::lock_guard lock(c.mutex);
        if (!std::exchange(c.beaten, false) && c.open) c.writer->append(c.out, kPing, {});
        if (!c.blocked) c.write_some();
      }
    }
  }
}

}  // namespace xpyd
