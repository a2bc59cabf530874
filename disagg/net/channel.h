// Channels between processes: authenticated, framed, ordered, full duplex, over TCP or a Unix socket. A ControlLoop has
// one I/O thread for all its channels. That thread accepts, connects, reads, writes and keeps deadlines, for the
// control channels of a process or for the channels of a transport.
//
// A channel lives from its handshake until one side closes it, the peer dies or falls silent, or an invalid frame
// arrives. It does not reconnect; its owner makes a new channel. Messages on their way are then lost. A closed channel
// does not tell which messages have arrived.
//
// Frames are not encrypted. Use a private network.
//
// Thread safety: any thread may call send(), close() and the getters. Callbacks run on the I/O thread, one at a time.
// They may send and close, and must not block, because all channels wait for them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/os.h"
#include "base/status.h"
#include "disagg/net/frames.h"
#include "disagg/net/hello.h"

namespace xpyd::disagg {

inline constexpr uint16_t kFirstFrameType = 16;  // lower types are the channel's own

struct ChannelLimits {
  double handshake_timeout_s = 5;                  // until the peer has proved the key
  double heartbeat_s = 0.5;                        // a ping is sent after this long without other traffic
  double silence_timeout_s = 3;                    // without a byte from the peer; then closed
  double linger_s = 1;                             // for the last bytes of a closed channel
  size_t max_unsent_bytes = 64u << 20;             // sent but not taken by the kernel; beyond it the channel is closed
  size_t max_frame_bytes = kMaxFramePayloadBytes;  // longest payload of a peer's frame
};

struct ChannelEvents {
  // Gets a whole, authentic frame. `payload` is valid during the call.
  std::function<void(uint16_t type, std::string_view payload)> on_frame;
  // Called exactly once, as the last call.
  std::function<void(const std::string& reason)> on_closed;
  // If set, replaces both: gets the non-blocking socket, of which no byte behind the handshake has been read.
  std::function<void(Fd socket)> take_over;
};

class ControlLoop;

class Channel {
 public:
  ~Channel();
  // Writes what the kernel takes at once, and leaves the rest to the I/O thread. Never blocks. Returns false if the
  // channel is closed, or is closed now because its peer does not read or the payload exceeds kMaxFramePayloadBytes.
  // With `more_follow` the bytes may wait for the next send(), which saves system calls.
  bool send(uint16_t type, std::string_view payload, bool more_follow = false);
  // Closes the channel. on_closed follows on the I/O thread of both sides with `reason`. Earlier messages still leave
  // if the peer takes them within linger_s.
  void close(const std::string& reason);
  bool is_open() const;
  const NodeIdentity& peer() const;
  const std::string& address() const;  // of the peer, for error texts
  double heard_s() const;              // Clock: last byte from the peer

 private:
  friend class ControlLoop;
  struct Impl;
  explicit Channel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};
using ChannelPtr = std::shared_ptr<Channel>;

// An address and the identity that this side shows there.
struct ControlEndpoint {
  std::string address;  // see address.h
  ClusterKey key;       // an empty key allows only addresses of this host
  NodeIdentity self;
  bool numeric = false;  // host names are not resolved
};

// Called on the I/O thread when a channel is open. Returns the channel's callbacks.
using OnOpen = std::function<ChannelEvents(ChannelPtr channel)>;

class ControlLoop {
 public:
  // `log` gets refused peers, on the I/O thread, at most once a second. `work` runs on the I/O thread in every turn. If
  // it returns true, the next turn follows within microseconds even without I/O.
  explicit ControlLoop(Clock& clock, const ChannelLimits& limits = {},
                       std::function<void(const std::string&)> log = nullptr, std::function<bool()> work = nullptr);
  // Closes every channel, which calls on_closed, and joins the thread.
  ~ControlLoop();

  // Listens until the loop is destroyed. Returns the address with its real port.
  Result<std::string> listen(const ControlEndpoint& endpoint, OnOpen on_open);
  // Connects and waits at most timeout_s, plus the time to resolve a name. Must not be called from a callback.
  Result<ChannelPtr> connect(const ControlEndpoint& endpoint, double timeout_s, OnOpen on_open);
  // Connects without waiting, but for the time to resolve a name. `done` is called on the I/O thread, or before dial()
  // returns if the address is invalid.
  void dial(const ControlEndpoint& endpoint, double timeout_s, OnOpen on_open,
            std::function<void(Result<ChannelPtr>)> done);
  // Runs f on the I/O thread, soon.
  void post(std::function<void()> f);

 private:
  friend class Channel;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace xpyd::disagg
