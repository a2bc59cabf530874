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

constexpr int kReadsPerTurn = 16;       // then the other channels have their turn
constexpr double kCheckSeconds = 0.05;  // between two checks of deadlines
constexpr long kSoonNanoseconds = 20000;
constexpr size_t kMostFiles = 128;

// recv() that also takes up to `most` descriptors for a channel and closes the others. Fails with EMFILE if this
// process can have no more.
ssize_t receive(int fd, std::string& into, size_t most, std::vector<Fd>& files) {
  if (most == 0) return ::recv(fd, into.data(), into.size(), 0);
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostFiles)];
  iovec piece{into.data(), into.size()};
  msghdr message{};
  message.msg_iov = &piece, message.msg_iovlen = 1;
  message.msg_control = control, message.msg_controllen = sizeof control;
  const ssize_t n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  for (cmsghdr* head = n < 0 ? nullptr : CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= head->cmsg_len; ++i) {
      int passed;
      std::memcpy(&passed, CMSG_DATA(head) + i * sizeof(int), sizeof passed);
      Fd file(passed);
      if (files.size() < most) files.push_back(std::move(file));
    }
  }
  if (n < 0 || !(message.msg_flags & MSG_CTRUNC)) return n;
  errno = EMFILE;
  return -1;
}

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

ControlStats ControlLoop::stats() const {
  return {impl_->opened, impl_->closed, impl_->refused, impl_->garbage, impl_->forged, impl_->silent, impl_->stalled};
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
  event.events = what | EPOLLET;
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
  double active_s = clock.now();
  for (;;) {
    const bool soon = work && work();
    const int n = wait(soon, events, 64, !unread.empty() || clock.now() < active_s + limits.spin_s);
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

int ControlLoop::Impl::wait(bool soon, epoll_event* events, int most, bool poll) {
  if (soon && !poll) {
    pollfd any{epoll.get(), POLLIN, 0};
    const timespec a_little{0, kSoonNanoseconds};
    ppoll(&any, 1, &a_little, nullptr);
  }
  return epoll_wait(epoll.get(), events, most, poll || soon ? 0 : waits ? int(kCheckSeconds * 1000) : -1);
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
  Listening& listening = listeners.at(listener_id);
  listening.retry = false;
  for (;;) {
    sockaddr_storage from{};
    socklen_t bytes = sizeof from;
    int fd = accept4(listening.fd, reinterpret_cast<sockaddr*>(&from), &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // Out of descriptors or memory: the next check of deadlines tries again.
      listening.retry = errno != EAGAIN && errno != EWOULDBLOCK;
      waits |= listening.retry;
      return;
    }
    if (!listening.tcp && !of_user(fd, limits.max_files == 0)) {
      ++refused;
      ::close(fd);
      continue;
    }
    if (int(unknown.size()) >= limits.max_unknown_peers) {
      ++garbage;
      uint64_t oldest = unknown.front();  // an honest peer needs a millisecond
      if (auto found = channels.find(oldest); found != channels.end())
        fail(ChannelPtr(found->second), "handshake: there are too many unknown peers at once");
    }
    auto impl = std::make_unique<Channel::Impl>();
    impl->accepted = true;
    impl->address = "a peer of " + listening.endpoint.address;
    impl->handshake.emplace(Handshake::Side::acceptor, listening.endpoint.key, listening.endpoint.self);
    impl->on_open = listening.on_open;
    ChannelPtr channel(new Channel(std::move(impl)));
    add(channel, limits.handshake_timeout_s);
    watch(channel, fd);
    unknown.push_back(channel->impl_->id);
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
  impl->to = address;
  impl->address = address.text;
  impl->handshake.emplace(Handshake::Side::initiator, endpoint.key, endpoint.self);
  impl->on_open = std::move(on_open);
  impl->on_connected = std::move(done);
  ChannelPtr channel(new Channel(std::move(impl)));
  add(channel, timeout_s);
  try_connect(channel);
}

void ControlLoop::Impl::try_connect(const ChannelPtr& channel) {
  Channel::Impl& c = *channel->impl_;
  const Result<int> fd = connect_to(c.to);
  c.no_room = !fd && fd.error().code == ErrorCode::unavailable;
  if (fd) return watch(channel, fd.value());
  if (c.no_room) return;
  const auto done = std::exchange(c.on_connected, nullptr);
  end(channel, "");
  done(fd.error());
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
    if (limits.max_files > 0 && c.to.is_unix() && !of_user(c.fd, false))
      return fail(channel, "the socket belongs to another user");
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

// With `to_the_end` it reads until the socket is empty, because the kernel has reported an end or an error and does not
// report it twice. Otherwise a short read suffices, since later bytes are reported. But if descriptors may arrive, a
// read also stops short before each batch of them.
void ControlLoop::Impl::read_some(const ChannelPtr& channel, bool to_the_end) {
  Channel::Impl& c = *channel->impl_;
  for (int turn = 0; turn < kReadsPerTurn; ++turn) {
    if (c.stage == Stage::gone || c.stage == Stage::connecting) return;
    ssize_t n = receive(c.fd, scratch, limits.max_files, c.files);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) {
      std::string reason = n == 0 ? "the peer closed the connection" : std::strerror(errno);
      if (c.stage == Stage::handshake && c.handshake->proving() && !c.accepted)
        reason += " during the handshake: it probably has a different cluster key";
      return fail(channel, reason);
    }
    if (c.stage == Stage::lingering) continue;
    c.heard_s = clock.now();
    take(channel, std::string_view(scratch.data(), size_t(n)));
    if (!to_the_end && size_t(n) < scratch.size() && limits.max_files == 0) return;
  }
  unread.push_back(c.id);
}

void ControlLoop::Impl::check(double now) {
  next_check_s = now + kCheckSeconds;
  for (auto& [id, listening] : listeners)
    if (listening.retry) accept_all(id);
  waits = std::isfinite(limits.silence_timeout_s) && !channels.empty();
  for (const auto& [id, listening] : listeners) waits |= listening.retry;
  std::vector<ChannelPtr> all;
  all.reserve(channels.size());
  for (auto& [id, channel] : channels) all.push_back(channel);
  for (const ChannelPtr& channel : all) {
    Channel::Impl& c = *channel->impl_;
    waits |= c.stage != Stage::open;
    if (c.stage == Stage::connecting || c.stage == Stage::handshake) {
      if (c.no_room && now < c.deadline_s) try_connect(channel);
      if (now >= c.deadline_s)
        fail(channel, c.stage == Stage::connecting ? "connect: the peer did not answer in time"
                                                   : "handshake: it was not complete in time");
    } else if (c.stage == Stage::lingering) {
      if (now >= c.deadline_s) end(channel, "");
    } else if (c.stage == Stage::open) {
      // If this process was asleep, the peer's pings are still in the socket.
      if (now >= c.heard_s + limits.silence_timeout_s) read_some(channel, true);
      if (c.stage == Stage::open && now >= c.heard_s + limits.silence_timeout_s) {
        ++silent;
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
