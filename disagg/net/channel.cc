// Channels: the calls of any thread, and the stages on the I/O thread (handshake, open, lingering, gone).
#include "disagg/net/channel.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "disagg/net/loop.h"

namespace xpyd::disagg {
// ---- any thread

void Channel::Impl::watch_output(bool wanted) {
  uint32_t output = wanted ? uint32_t(EPOLLOUT) : 0;
  loop->watch(fd, id, EPOLLIN | EPOLLRDHUP | output, EPOLL_CTL_MOD);
}

bool Channel::Impl::write_some() {
  while (fd >= 0 && out_at < out.size()) {
    const ssize_t n = ::send(fd, out.data() + out_at, queued(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      out_at += size_t(n);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return false;
    if (!std::exchange(blocked, true)) watch_output(true);
    if (out_at > out.size() / 2) {
      out.erase(0, out_at);
      out_at = 0;
    }
    return true;
  }
  if (std::exchange(blocked, false)) watch_output(false);
  out_at = 0;
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
    return give_up("a message of " + std::to_string(payload.size()) + " bytes; expected at most " +
                   std::to_string(kMaxFramePayloadBytes));
  if (c.queued() + payload.size() + kFrameOverheadBytes > c.loop->limits.max_unsent_bytes)
    return give_up("the peer does not read: " + std::to_string(c.queued()) + " bytes wait for it");
  c.writer->append(c.out, type, payload);
  c.sent_since = true;
  // The I/O thread also notices a broken connection, and reports the reason.
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

// ---- the I/O thread

void ControlLoop::Impl::take(const ChannelPtr& channel, std::string_view bytes) {
  Channel::Impl& c = *channel->impl_;
  if (c.stage == Stage::handshake && !take_handshake(channel, bytes)) return;
  if (c.stage == Stage::open && !bytes.empty()) take_frames(channel, bytes);
}

// Returns false if the handshake has failed or is not complete.
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
  c.reader.emplace(c.handshake->receive_key(), limits.max_frame_bytes);
  c.heartbeat_s = clock.now();
  c.heard_s = c.heartbeat_s;
  if (c.accepted) c.address = c.peer.id;
  {
    std::lock_guard lock(c.mutex);
    c.writer.emplace(c.handshake->send_key());
    c.open = true;
  }
  c.handshake.reset();
  c.events = std::exchange(c.on_open, nullptr)(channel);
  if (auto done = std::exchange(c.on_connected, nullptr)) done(channel);
  if (c.events.take_over) hand_over(channel);
}

void ControlLoop::Impl::hand_over(const ChannelPtr& channel) {
  Channel::Impl& c = *channel->impl_;
  const auto take = std::exchange(c.events, {}).take_over;
  Fd socket;
  {
    std::lock_guard lock(c.mutex);
    if (c.queued() == 0) socket = Fd(std::exchange(c.fd, -1));
  }
  if (socket.get() >= 0) epoll_ctl(epoll.get(), EPOLL_CTL_DEL, socket.get(), nullptr);
  end(channel, "handed over");
  if (socket.get() >= 0) take(std::move(socket));
}

void ControlLoop::Impl::take_frames(const ChannelPtr& channel, std::string_view bytes) {
  Channel::Impl& c = *channel->impl_;
  std::optional<std::string> wrong;
  Status status = c.reader->feed(bytes, [&](uint16_t type, std::string_view payload) {
    if (type >= kFirstFrameType) {
      if (c.events.on_frame) c.events.on_frame(type, payload);
    } else if (type == kGoodbye) {
      wrong = "the peer left: " + shown_reason(payload);
    } else if (type != kPing) {
      wrong = "a frame of unknown type " + std::to_string(type);
    }
    return !wrong && channel->is_open();
  });
  if (!status) wrong = status.error().message;
  if (wrong) fail(channel, *wrong);
}

// Follows close() by any thread: calls on_closed, then lets the last bytes leave.
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
  waits = true;
  tell_closed(c, reason);
  shut_when_sent(c);  // bytes that still come are read, because a close with unread ones would discard what was sent
}

void ControlLoop::Impl::shut_when_sent(Channel::Impl& c) {
  std::lock_guard lock(c.mutex);
  if (c.fd < 0 || c.shut || c.queued() > 0) return;
  c.shut = true;
  shutdown(c.fd, SHUT_WR);
}

void ControlLoop::Impl::fail(const ChannelPtr& channel, const std::string& reason) {
  Channel::Impl& c = *channel->impl_;
  const double now = clock.now();
  if (c.stage == Stage::handshake && c.accepted && log && now >= next_log_s) {
    next_log_s = now + 1;
    log(c.address + " was refused: " + reason);
  }
  end(channel, reason);
}

void ControlLoop::Impl::end(const ChannelPtr& held, const std::string& why_closed) {
  ChannelPtr channel = held;  // keeps it alive: `held` may be the map's entry
  Channel::Impl& c = *channel->impl_;
  const Stage was = std::exchange(c.stage, Stage::gone);
  if (was == Stage::gone) return;
  std::string reason = why_closed;
  {
    std::lock_guard lock(c.mutex);
    if (c.open.exchange(false) == false && !c.reason.empty()) reason = c.reason;  // this side closed first
    if (c.fd >= 0) ::close(std::exchange(c.fd, -1));
    c.out = std::string();
    c.out_at = 0;
  }
  channels.erase(c.id);
  c.reader.reset();
  c.handshake.reset();
  c.on_open = nullptr;
  if (was == Stage::open) tell_closed(c, reason);
  if (auto done = std::exchange(c.on_connected, nullptr)) done(Error{ErrorCode::io, c.address + ": " + reason});
}

// Releases the owner's callbacks, because they may hold the channel.
void ControlLoop::Impl::tell_closed(Channel::Impl& c, const std::string& reason) {
  ChannelEvents events = std::exchange(c.events, {});
  if (events.on_closed) events.on_closed(reason);
}

}  // namespace xpyd::disagg
