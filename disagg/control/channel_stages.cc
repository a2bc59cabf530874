// A channel's life on the I/O thread: handshake, open, lingering, gone.
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "disagg/control/channel_impl.h"

namespace xpyd {

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
      wrong = "the peer left: " + shown_reason(payload);
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
  if (auto done = std::exchange(c.on_connected, nullptr)) done(Error{ErrorCode::io, c.address + ": " + reason});
}

// Lets go of the owner's callbacks, which may hold the channel.
void ControlLoop::Impl::tell_closed(Channel::Impl& c, const std::string& reason) {
  ChannelEvents events = std::exchange(c.events, {});
  if (events.on_closed) events.on_closed(reason);
}

}  // namespace xpyd
