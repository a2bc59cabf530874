// Channels and their loop as any thread calls them.
#include "disagg/control/channel.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <future>
#include <utility>

#include "disagg/control/channel_impl.h"

namespace xpyd {
namespace {

constexpr size_t kKeptBytes = 1u << 20;  // of buffer that an idle channel may keep

}  // namespace

// ---- Channel

void Channel::Impl::watch_output(bool wanted) {
  uint32_t output = wanted ? uint32_t(EPOLLOUT) : 0;
  loop->watch(fd, id, EPOLLIN | EPOLLRDHUP | output, EPOLL_CTL_MOD);
}

bool Channel::Impl::write_some() {
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
  c.reason = shown_reason(reason);
  c.writer->append(c.out, kGoodbye, c.reason);
  c.open = false;
  c.loop->attend(c.id);
}

// ---- ControlLoop

ControlLoop::ControlLoop(Clock& clock, const ChannelLimits& limits, std::function<void(const std::string&)> log)
    : impl_(std::make_unique<Impl>(clock, limits, std::move(log))) {
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
  return {impl_->opened, impl_->closed, impl_->refused, impl_->forged, impl_->silent, impl_->stalled};
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

}  // namespace xpyd
