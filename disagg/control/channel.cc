#include "disagg/control/channel.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/utf8.h"
#include "disagg/control/address.h"

namespace xpyd {
namespace {

constexpr uint16_t kPing = 0, kGoodbye = 1;
constexpr size_t kReadBytes = 64u << 10;
constexpr int kReadsPerTurn = 16;        // then the other channels have theirs
constexpr size_t kMaxReasonBytes = 256;  // of a goodbye
constexpr size_t kKeptBytes = 1u << 20;  // of buffer that an idle channel may keep
constexpr double kCheckSeconds = 0.05;   // between two looks at deadlines
constexpr uint64_t kWakeId = 0;

std::string why(int error) { return std::strerror(error); }

std::string printable(std::string_view text) {
  std::string out = replace_invalid_utf8(text.substr(0, kMaxReasonBytes));
  for (char& c : out)
    if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) c = ' ';
  return out;
}

}  // namespace

// One connection, from its first byte to its last.
struct Channel::Impl {
  enum class Stage { connecting, handshake, open, lingering, gone };

  ControlLoop::Impl* loop = nullptr;  // valid until the channel is gone
  uint64_t id = 0;
  std::string address;
  NodeIdentity peer;  // set before the channel opens

  // The I/O thread's.
  Stage stage = Stage::handshake;
  std::optional<Handshake> handshake;
  std::optional<FrameReader> reader;
  OnOpen on_open;
  ChannelEvents events;
  std::function<void(Result<ChannelPtr>)> on_connected;  // of a connect(), until it is answered
  double deadline_s = 0;                                 // of connect and handshake; of lingering
  std::atomic<double> heard_s{0};
  double beat_s = 0;
  bool accepted = false, shut = false;

  std::atomic<bool> open{false};  // written under the mutex

  std::mutex mutex;  // guards what follows
  int fd = -1;
  std::optional<FrameWriter> writer;
  std::string out;
  size_t out_at = 0;
  bool blocked = false;   // the kernel is full; EPOLLOUT goes on
  bool beaten = false;    // something was sent since the last beat
  bool hopeless = false;  // closed at once, whatever waits
  std::string reason;     // why it was closed from this side

  size_t queued() const { return out.size() - out_at; }

  // Asked for only while the kernel is full: a Unix socket tells of room after every read.
  void watch_output(bool wanted);

  // Under the mutex. False: the connection is broken.
  bool write_some() {
    while (fd >= 0 && out_at < out.size()) {
      ssize_t n = ::send(fd, out.data() + out_at, out.size() - out_at, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) {
        out_at += size_t(n);
        continue;
      }
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) return false;
      if (!std::exchange(blocked, true)) watch_output(true);
      if (out_at > kKeptBytes && out_at > out.size() / 2) {
        out.erase(0, out_at);
        out_at = 0;
      }
      return true;
    }
    if (std::exchange(blocked, false)) watch_output(false);
    out_at = 0;
    if (out.capacity() > kKeptBytes)
      out = std::string();
    else
      out.clear();
    return true;
  }
};

struct ControlLoop::Impl {
  using Stage = Channel::Impl::Stage;

  struct Listening {
    int fd;
    ControlEndpoint endpoint;
    OnOpen on_open;
    bool tcp;
    bool retry = false;  // accept() ran out of descriptors
  };

  Clock& clock;
  ChannelLimits limits;
  std::function<void(const std::string&)> log;
  int epoll = -1, wake = -1;
  std::thread thread;
  std::atomic<std::thread::id> io_thread;

  // The I/O thread's.
  std::unordered_map<uint64_t, ChannelPtr> channels;
  std::unordered_map<uint64_t, Listening> listeners;
  std::deque<uint64_t> unknown;  // accepted, in their handshake, oldest first
  std::vector<uint64_t> unread;  // has more to read than its turn allowed
  uint64_t next_id = kWakeId + 1;
  int n_open = 0;
  double next_check_s = 0, next_log_s = 0;
  std::string scratch = std::string(kReadBytes, '\0');

  std::mutex mutex;  // guards the next four
  std::vector<std::function<void()>> inbox;
  std::vector<uint64_t> woken;  // closed by one of our threads
  bool signalled = false, stopping = false;

  std::atomic<int64_t> opened{0}, closed{0}, refused{0}, forged{0}, silent{0}, stalled{0};

  Impl(Clock& c, const ChannelLimits& l, std::function<void(const std::string&)> to)
      : clock(c), limits(l), log(std::move(to)) {
    epoll = epoll_create1(EPOLL_CLOEXEC);
    wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    XPYD_CHECK(epoll >= 0 && wake >= 0, why(errno));
    watch(wake, kWakeId, EPOLLIN);
  }
  ~Impl() {
    ::close(wake);
    ::close(epoll);
  }

  void watch(int fd, uint64_t id, uint32_t what, int operation = EPOLL_CTL_ADD) {
    epoll_event event{};
    event.events = what | EPOLLET;
    event.data.u64 = id;
    XPYD_CHECK(epoll_ctl(epoll, operation, fd, &event) == 0, why(errno));
  }

  bool on_io_thread() const { return std::this_thread::get_id() == io_thread; }

  // Under the mutex.
  void signal() {
    if (std::exchange(signalled, true)) return;
    uint64_t one = 1;
    ssize_t n = ::write(wake, &one, sizeof one);
    XPYD_CHECK(n == sizeof one, why(errno));
  }

  void attend(uint64_t id) {
    std::lock_guard lock(mutex);
    woken.push_back(id);
    signal();
  }

  void run();
  void run_inbox();
  void accept_all(uint64_t listener_id);
  void check(double now);
  void drop_everything();

  void add(ChannelPtr channel, int fd, double timeout_s);
  void start_connect(const ControlAddress& address, const ControlEndpoint& endpoint,
                     double timeout_s, OnOpen on_open,
                     std::function<void(Result<ChannelPtr>)> done);
  void on_event(uint64_t id, uint32_t happened);
  void read_some(const ChannelPtr& channel, bool to_the_end);
  void take(const ChannelPtr& channel, std::string_view bytes);
  bool take_handshake(const ChannelPtr& channel, std::string_view& bytes);
  void take_frames(const ChannelPtr& channel, std::string_view bytes);
  void become_open(const ChannelPtr& channel);
  void linger(const ChannelPtr& channel);
  void shut_when_sent(Channel::Impl& c);
  void fail(const ChannelPtr& channel, const std::string& reason);
  void end(const ChannelPtr& channel, const std::string& reason);
  void tell_closed(Channel::Impl& c, const std::string& reason);
};

// ---------------------------------------------------------------- Channel: any thread

void Channel::Impl::watch_output(bool wanted) {
  uint32_t output = wanted ? uint32_t(EPOLLOUT) : 0;
  loop->watch(fd, id, EPOLLIN | EPOLLRDHUP | output, EPOLL_CTL_MOD);
}

Channel::Channel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Channel::~Channel() {
  if (impl_->fd >= 0) ::close(impl_->fd);
}

bool Channel::is_open() const { return impl_->open.load(std::memory_order_acquire); }
const NodeIdentity& Channel::peer() const { return impl_->peer; }
const std::string& Channel::address() const { return impl_->address; }
double Channel::heard_s() const { return impl_->heard_s; }
size_t Channel::queued_bytes() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->queued();
}

bool Channel::send(uint16_t type, std::string_view payload, bool more_follow) {
  XPYD_CHECK(type >= kFirstFrameType);
  Impl& c = *impl_;
  std::lock_guard lock(c.mutex);
  if (!c.open) return false;
  auto give_up = [&](const std::string& reason) {
    c.reason = reason;
    c.hopeless = true;
    c.open = false;
    c.loop->attend(c.id);
    return false;
  };
  if (payload.size() > kMaxFramePayloadBytes)
    return give_up("a message of " + std::to_string(payload.size()) + " bytes, at most " +
                   std::to_string(kMaxFramePayloadBytes));
  if (c.queued() + payload.size() + kFrameOverheadBytes > c.loop->limits.max_queue_bytes) {
    ++c.loop->stalled;
    return give_up("the peer does not read: " + std::to_string(c.queued()) + " bytes wait for it");
  }
  c.writer->append(c.out, type, payload);
  c.beaten = true;
  // A broken connection is seen by the I/O thread too, which says why.
  if (!more_follow && !c.blocked) c.write_some();
  return true;
}

void Channel::close(const std::string& reason) {
  Impl& c = *impl_;
  std::lock_guard lock(c.mutex);
  if (!c.open) return;
  c.reason = printable(reason);
  c.writer->append(c.out, kGoodbye, c.reason);
  c.open = false;
  c.loop->attend(c.id);
}

// ---------------------------------------------------------------- ControlLoop: any thread

ControlLoop::ControlLoop(Clock& clock, const ChannelLimits& limits,
                         std::function<void(const std::string&)> log)
    : impl_(std::make_unique<Impl>(clock, limits, std::move(log))) {
  impl_->thread = std::thread([impl = impl_.get()] { impl->run(); });
}

ControlLoop::~ControlLoop() {
  XPYD_CHECK(!impl_->on_io_thread(), "a ControlLoop ends on another thread than its own");
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
  return {impl_->opened, impl_->closed, impl_->refused,
          impl_->forged, impl_->silent, impl_->stalled};
}

namespace {

Result<ControlAddress> allowed_address(const ControlEndpoint& endpoint) {
  if (Status status = check_identity(endpoint.self); !status) return status.error();
  Result<ControlAddress> address = parse_control_address(endpoint.address);
  if (address && !address.value().is_local() && !endpoint.key.secret())
    return invalid("address '" + endpoint.address +
                   "' is not of this host: it needs a --cluster-key-file on both sides");
  return address;
}

}  // namespace

Result<std::string> ControlLoop::listen(const ControlEndpoint& endpoint, OnOpen on_open) {
  Result<ControlAddress> address = allowed_address(endpoint);
  if (!address) return address.error();
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

Result<ChannelPtr> ControlLoop::connect(const ControlEndpoint& endpoint, double timeout_s,
                                        OnOpen on_open) {
  XPYD_CHECK(!impl_->on_io_thread(), "connect() waits for the I/O thread");
  Result<ControlAddress> address = allowed_address(endpoint);
  if (!address) return address.error();
  std::promise<Result<ChannelPtr>> answer;
  auto result = answer.get_future();
  post([&] {
    impl_->start_connect(address.value(), endpoint, timeout_s, std::move(on_open),
                         [&](Result<ChannelPtr> r) { answer.set_value(std::move(r)); });
  });
  return result.get();
}

// ---------------------------------------------------------------- the I/O thread

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
      if (auto found = channels.find(id); found != channels.end())
        read_some(ChannelPtr(found->second), true);
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
  for (auto& [id, listening] : listeners) ::close(listening.fd);
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
    int fd = accept4(listening.fd, reinterpret_cast<sockaddr*>(&from), &bytes,
                     SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // Out of descriptors or memory: no spinning, the next look at the deadlines tries again.
      listening.retry = errno != EAGAIN && errno != EWOULDBLOCK;
      return;
    }
    if (!listening.tcp && !same_user(fd)) {
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
    impl->handshake.emplace(Handshake::Side::acceptor, listening.endpoint.key,
                            listening.endpoint.self);
    impl->on_open = listening.on_open;
    ChannelPtr channel(new Channel(std::move(impl)));
    add(channel, fd, limits.handshake_timeout_s);
    unknown.push_back(channel->impl_->id);
  }
}

void ControlLoop::Impl::start_connect(const ControlAddress& address,
                                      const ControlEndpoint& endpoint, double timeout_s,
                                      OnOpen on_open,
                                      std::function<void(Result<ChannelPtr>)> done) {
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
    if (error) return fail(channel, "connect: " + why(error));
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
      std::string reason = n == 0 ? "the peer closed the connection" : why(errno);
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

void ControlLoop::Impl::take(const ChannelPtr& channel, std::string_view bytes) {
  Channel::Impl& c = *channel->impl_;
  if (c.stage == Stage::handshake && !take_handshake(channel, bytes)) return;
  if (c.stage == Stage::open && !bytes.empty()) take_frames(channel, bytes);
}

// False: the channel has failed, or the handshake goes on.
bool ControlLoop::Impl::take_handshake(const ChannelPtr& channel, std::string_view& bytes) {
  Channel::Impl& c = *channel->impl_;
  std::string out;
  Status status = c.handshake->feed(bytes, out);
  if (!out.empty()) {
    std::lock_guard lock(c.mutex);
    c.out += out;
    if (!c.blocked) c.write_some();
  }
  if (!status) {
    fail(channel, status.error().message);
    return false;
  }
  if (!c.handshake->done()) return false;
  become_open(channel);
  return c.stage == Stage::open;
}

void ControlLoop::Impl::become_open(const ChannelPtr& channel) {
  Channel::Impl& c = *channel->impl_;
  c.stage = Stage::open;
  c.peer = c.handshake->peer();
  c.reader.emplace(c.handshake->receive_key());
  c.beat_s = clock.now();
  c.heard_s = c.beat_s;
  if (c.accepted) {
    c.address = name_of(c.peer.role) + (" " + c.peer.id);
    std::erase(unknown, c.id);
  }
  {
    std::lock_guard lock(c.mutex);
    c.writer.emplace(c.handshake->send_key());
    c.open = true;
  }
  c.handshake.reset();
  ++opened;
  if (++n_open > limits.max_channels) {
    channel->close("too many channels: " + std::to_string(limits.max_channels));
    c.on_open = nullptr;
  } else {
    c.events = std::exchange(c.on_open, nullptr)(channel);
  }
  if (auto done = std::exchange(c.on_connected, nullptr)) done(channel);
}

void ControlLoop::Impl::take_frames(const ChannelPtr& channel, std::string_view bytes) {
  Channel::Impl& c = *channel->impl_;
  std::optional<std::string> wrong;
  Status status = c.reader->feed(bytes, [&](uint16_t type, std::string_view payload) {
    if (type >= kFirstFrameType) {
      if (c.events.on_frame) c.events.on_frame(type, payload);
    } else if (type == kGoodbye) {
      wrong = "the peer left: " + printable(payload);
    } else if (type != kPing) {
      wrong = "a frame of unknown type " + std::to_string(type);
    }
    return !wrong && channel->is_open();
  });
  if (!status) {
    ++forged;
    wrong = status.error().message;
  }
  if (wrong) fail(channel, *wrong);
}

// After close(), by whichever thread: tell the owner, then let the last bytes leave.
void ControlLoop::Impl::linger(const ChannelPtr& channel) {
  Channel::Impl& c = *channel->impl_;
  if (c.stage != Stage::open) return;
  std::string reason;
  bool hopeless;
  {
    std::lock_guard lock(c.mutex);
    if (!c.blocked) c.write_some();
    reason = c.reason;
    hopeless = c.hopeless;
  }
  if (hopeless) return end(channel, reason);
  c.stage = Stage::lingering;
  c.deadline_s = clock.now() + limits.linger_s;
  --n_open;
  ++closed;
  tell_closed(c, reason);
  shut_when_sent(c);
  read_some(channel, true);  // closing over unread bytes would destroy what was just sent
}

void ControlLoop::Impl::shut_when_sent(Channel::Impl& c) {
  std::lock_guard lock(c.mutex);
  if (c.fd < 0 || c.shut || c.queued() > 0) return;
  c.shut = true;
  shutdown(c.fd, SHUT_WR);
}

void ControlLoop::Impl::fail(const ChannelPtr& channel, const std::string& reason) {
  Channel::Impl& c = *channel->impl_;
  if (c.stage == Stage::handshake && c.accepted) {
    ++refused;
    if (double now = clock.now(); log && now >= next_log_s) {
      next_log_s = now + 1;
      log(c.address + " was refused: " + reason);
    }
  }
  end(channel, reason);
}

void ControlLoop::Impl::end(const ChannelPtr& held, const std::string& why_closed) {
  ChannelPtr channel = held;  // `held` may be the map's
  Channel::Impl& c = *channel->impl_;
  const Stage was = std::exchange(c.stage, Stage::gone);
  if (was == Stage::gone) return;
  std::string reason = why_closed;
  {
    std::lock_guard lock(c.mutex);
    if (c.open.exchange(false) == false && !c.reason.empty()) reason = c.reason;  // our close() won
    ::close(c.fd);
    c.fd = -1;
    c.out = std::string();
    c.out_at = 0;
  }
  channels.erase(c.id);
  if (was == Stage::handshake && c.accepted) std::erase(unknown, c.id);
  c.reader.reset();
  c.handshake.reset();
  c.on_open = nullptr;
  if (was == Stage::open) {
    --n_open;
    ++closed;
    tell_closed(c, reason);
  }
  if (auto done = std::exchange(c.on_connected, nullptr))
    done(Error{ErrorCode::io, c.address + ": " + reason});
}

// Lets go of the owner's callbacks, which may hold the channel.
void ControlLoop::Impl::tell_closed(Channel::Impl& c, const std::string& reason) {
  ChannelEvents events = std::exchange(c.events, {});
  if (events.on_closed) events.on_closed(reason);
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
        fail(channel, c.stage == Stage::connecting ? "connect: no answer in time"
                                                   : "handshake: not complete in time");
    } else if (c.stage == Stage::lingering) {
      if (now >= c.deadline_s) end(channel, "");
    } else if (c.stage == Stage::open) {
      // If it was we who slept, the peer's signs of life are still in the socket.
      if (now >= c.heard_s + limits.silence_timeout_s) read_some(channel, true);
      if (c.stage == Stage::open && now >= c.heard_s + limits.silence_timeout_s) {
        ++silent;
        fail(channel,
             "the peer was silent for " + std::to_string(int((now - c.heard_s) * 1000)) + " ms");
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
