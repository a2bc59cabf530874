// The I/O thread: events of the kernel, and deadlines.
#include "disagg/net/loop.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <future>
#include <utility>

namespace xpyd::disagg {
namespace {

constexpr double kCheckSeconds = 0.05;  // between two checks of deadlines
constexpr long kSoonNanoseconds = 20000;

Result<ControlAddress> allowed_address(const ControlEndpoint& endpoint) {
  if (Status status = check_identity(endpoint.self); !status) return status.error();
  Result<ControlAddress> address = parse_control_address(endpoint.address, endpoint.numeric);
  if (address && !address.value().is_local() && !endpoint.key.secret())
    return invalid("address '" + endpoint.address + "' is on another host: expected --cluster-key-file on both sides");
  return address;
}

}  // namespace

// ---- any thread

ControlLoop::ControlLoop(Clock& clock, const ChannelLimits& limits, std::function<void(const std::string&)> log,
                         std::function<bool()> work)
    : impl_(std::make_unique<Impl>(clock, limits, std::move(log), std::move(work))) {
  if (impl_->begun) impl_->thread = std::thread([impl = impl_.get()] { impl->run(); });
}

ControlLoop::~ControlLoop() {
  XPYD_CHECK(!impl_->on_io_thread(), "a ControlLoop ends on another thread than its own");
  if (!impl_->thread.joinable()) return;
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    impl_->signal();
  }
  impl_->thread.join();
}

void ControlLoop::post(std::function<void()> f) {
  std::lock_guard lock(impl_->mutex);
  impl_->inbox.push_back(std::move(f));
  impl_->signal();
}

Result<std::string> ControlLoop::listen(const ControlEndpoint& endpoint, OnOpen on_open) {
  Result<ControlAddress> address = allowed_address(endpoint);
  if (!address) return address.error();
  if (!impl_->begun) return impl_->begun.error();
  std::string bound;
  Result<int> fd = listen_at(address.value(), &bound);
  if (!fd) return fd.error();
  Impl::Listening listening{fd.value(), endpoint, std::move(on_open), !address.value().is_unix()};
  post([impl = impl_.get(), listening = std::move(listening)]() mutable {
    uint64_t id = impl->next_id++;
    int listening_fd = listening.fd;
    impl->listeners.emplace(id, std::move(listening));
    impl->watch(listening_fd, id, EPOLLIN);
  });
  return bound;
}

Result<ChannelPtr> ControlLoop::connect(const ControlEndpoint& endpoint, double timeout_s, OnOpen on_open) {
  XPYD_CHECK(!impl_->on_io_thread(), "connect() waits for the I/O thread");
  std::promise<Result<ChannelPtr>> answer;
  auto result = answer.get_future();
  dial(endpoint, timeout_s, std::move(on_open), [&](Result<ChannelPtr> r) { answer.set_value(std::move(r)); });
  return result.get();
}

void ControlLoop::dial(const ControlEndpoint& endpoint, double timeout_s, OnOpen on_open,
                       std::function<void(Result<ChannelPtr>)> done) {
  Result<ControlAddress> address = allowed_address(endpoint);
  if (!address) return done(address.error());
  if (!impl_->begun) return done(impl_->begun.error());
  post([impl = impl_.get(), address = std::move(address).value(), endpoint, timeout_s, on_open = std::move(on_open),
        done = std::move(done)]() mutable {
    impl->start_connect(address, endpoint, timeout_s, std::move(on_open), std::move(done));
  });
}

// ---- the I/O thread

ControlLoop::Impl::Impl(Clock& c, const ChannelLimits& l, std::function<void(const std::string&)> to,
                        std::function<bool()> turn)
    : clock(c), limits(l), log(std::move(to)), work(std::move(turn)) {
  if (epoll.get() < 0 || wake.get() < 0)
    begun = Error{ErrorCode::unavailable, std::string("epoll: ") + std::strerror(errno)};
  else
    watch(wake.get(), kWakeId, EPOLLIN);
}

void ControlLoop::Impl::watch(int fd, uint64_t id, uint32_t what, int operation) {
  epoll_event event{};
  event.events = what;
  event.data.u64 = id;
  XPYD_CHECK(epoll_ctl(epoll.get(), operation, fd, &event) == 0, std::strerror(errno));
}

void ControlLoop::Impl::signal() {
  if (std::exchange(signalled, true)) return;
  uint64_t one = 1;
  ssize_t n = ::write(wake.get(), &one, sizeof one);
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
  for (;;) {
    const bool soon = work && work();
    const int n = wait(soon, events, 64);
    double now = clock.now();
    bool woke = false;
    for (int i = 0; i < n; ++i) {
      if (events[i].data.u64 == kWakeId)
        woke = true;
      else
        on_event(events[i].data.u64, events[i].events);
    }
    if (woke) run_inbox();
    if (now >= next_check_s) check(now);
    if (woke) {
      std::lock_guard lock(mutex);
      if (stopping) break;
    }
  }
  drop_everything();
}

int ControlLoop::Impl::wait(bool soon, epoll_event* events, int most) {
  if (soon) {
    pollfd any{epoll.get(), POLLIN, 0};
    const timespec a_little{0, kSoonNanoseconds};
    ppoll(&any, 1, &a_little, nullptr);
  }
  return epoll_wait(epoll.get(), events, most, soon ? 0 : waits ? int(kCheckSeconds * 1000) : -1);
}

void ControlLoop::Impl::run_inbox() {
  std::vector<std::function<void()>> calls;
  std::vector<uint64_t> ids;
  {
    std::lock_guard lock(mutex);
    uint64_t count;
    [[maybe_unused]] ssize_t n = ::read(wake.get(), &count, sizeof count);
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
    channel->close("the process is leaving");
    if (channel->impl_->stage == Stage::open) {  // bytes that the kernel takes at once still leave
      std::lock_guard lock(channel->impl_->mutex);
      channel->impl_->write_some();
    }
    end(channel, "the control loop has ended");
  }
  // A callback may have posted, or connect() may be waiting. Each call still gets its answer.
  std::vector<std::function<void()>> calls;
  {
    std::lock_guard lock(mutex);
    calls.swap(inbox);
  }
  for (auto& f : calls) f();
  while (!channels.empty()) end(ChannelPtr(channels.begin()->second), "the control loop has ended");
}

void ControlLoop::Impl::add(ChannelPtr channel, double timeout_s) {
  Channel::Impl& c = *channel->impl_;
  c.loop = this;
  c.id = next_id++;
  c.deadline_s = clock.now() + timeout_s;
  channels.emplace(c.id, std::move(channel));
  waits = true;
}

void ControlLoop::Impl::watch(const ChannelPtr& channel, int fd) {
  Channel::Impl& c = *channel->impl_;
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);  // fails on a Unix socket, without effect
  c.fd = fd;
  uint32_t connecting = c.stage == Stage::connecting ? uint32_t(EPOLLOUT) : 0;
  watch(fd, c.id, EPOLLIN | EPOLLRDHUP | connecting);
}

void ControlLoop::Impl::accept_all(uint64_t listener_id) {
  const Listening& listening = listeners.at(listener_id);
  for (;;) {
    sockaddr_storage from{};
    socklen_t bytes = sizeof from;
    int fd = accept4(listening.fd, reinterpret_cast<sockaddr*>(&from), &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;  // out of descriptors or memory, too: epoll reports the caller again
    }
    if (!listening.tcp && !of_user_or_root(fd)) {
      ::close(fd);
      continue;
    }
    auto impl = std::make_unique<Channel::Impl>();
    impl->accepted = true;
    impl->address = "a peer of " + listening.endpoint.address;
    impl->handshake.emplace(Handshake::Side::acceptor, listening.endpoint.key, listening.endpoint.self);
    impl->on_open = listening.on_open;
    ChannelPtr channel(new Channel(std::move(impl)));
    add(channel, limits.handshake_timeout_s);
    watch(channel, fd);
  }
}

void ControlLoop::Impl::start_connect(const ControlAddress& address, const ControlEndpoint& endpoint, double timeout_s,
                                      OnOpen on_open, std::function<void(Result<ChannelPtr>)> done) {
  {
    std::lock_guard lock(mutex);
    if (stopping) return done(Error{ErrorCode::cancelled, "the control loop has ended"});
  }
  auto impl = std::make_unique<Channel::Impl>();
  impl->stage = Stage::connecting;
  impl->address = address.text;
  impl->handshake.emplace(Handshake::Side::initiator, endpoint.key, endpoint.self);
  impl->on_open = std::move(on_open);
  impl->on_connected = std::move(done);
  const Result<int> fd = connect_to(address);
  if (!fd) return impl->on_connected(fd.error());
  ChannelPtr channel(new Channel(std::move(impl)));
  add(channel, timeout_s);
  watch(channel, fd.value());
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
  if (happened & ~uint32_t(EPOLLOUT)) read_some(channel);
}

// Reads once. epoll reports again what is left.
void ControlLoop::Impl::read_some(const ChannelPtr& channel) {
  Channel::Impl& c = *channel->impl_;
  if (c.stage == Stage::gone || c.stage == Stage::connecting) return;
  const ssize_t n = ::recv(c.fd, scratch.data(), scratch.size(), 0);
  if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
  if (n <= 0) {
    std::string reason = n == 0 ? "the peer closed the connection" : std::strerror(errno);
    if (c.stage == Stage::handshake && c.handshake->proving() && !c.accepted)
      reason += " during the handshake: it probably has a different cluster key";
    return fail(channel, reason);
  }
  if (c.stage == Stage::lingering) return;
  c.heard_s = clock.now();
  take(channel, std::string_view(scratch.data(), size_t(n)));
}

void ControlLoop::Impl::check(double now) {
  next_check_s = now + kCheckSeconds;
  waits = std::isfinite(limits.silence_timeout_s) && !channels.empty();
  std::vector<ChannelPtr> all;
  all.reserve(channels.size());
  for (auto& [id, channel] : channels) all.push_back(channel);
  for (const ChannelPtr& channel : all) {
    Channel::Impl& c = *channel->impl_;
    waits |= c.stage != Stage::open;
    if (c.stage == Stage::connecting || c.stage == Stage::handshake) {
      if (now >= c.deadline_s)
        fail(channel, c.stage == Stage::connecting ? "connect: the peer did not answer in time"
                                                   : "handshake: it was not complete in time");
    } else if (c.stage == Stage::lingering) {
      if (now >= c.deadline_s) end(channel, "");
    } else if (c.stage == Stage::open) {
      // If this process was asleep, the peer's pings are still in the socket.
      if (now >= c.heard_s + limits.silence_timeout_s) read_some(channel);
      if (c.stage == Stage::open && now >= c.heard_s + limits.silence_timeout_s) {
        fail(channel, "the peer was silent for " + std::to_string(int((now - c.heard_s) * 1000)) + " ms");
      } else if (c.stage == Stage::open && now >= c.heartbeat_s + limits.heartbeat_s) {
        c.heartbeat_s = now;
        std::lock_guard lock(c.mutex);
        if (!std::exchange(c.sent_since, false) && c.open) c.writer->append(c.out, kPing, {});
        if (!c.blocked) c.write_some();
      }
    }
  }
}

}  // namespace xpyd::disagg
