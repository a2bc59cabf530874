// Channels between processes: authenticated, framed, ordered, full duplex, over TCP or a Unix socket. One I/O thread
// per ControlLoop serves all of them: it accepts, connects, reads, writes, wakes up and keeps the deadlines of the
// control channels of a process, and of the channels of a wire.
//
// A channel lives from its handshake until one side closes it, the peer goes away or falls silent,
// or something on it is wrong; then it is gone for good, and whoever needs it connects again. What
// was sent and had not arrived is lost then: the channel says that it closed, never what arrived.
//
// Not protected: confidentiality. Frames cross in the clear; use a private network.
//
// Thread safety: send(), close() and the readers from any thread. Callbacks run on the I/O thread,
// one at a time; they may send and close, and must not block: every other channel waits for them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/os.h"
#include "base/status.h"
#include "disagg/net/frames.h"
#include "disagg/net/hello.h"

namespace xpyd::disagg {

inline constexpr uint16_t kFirstFrameType = 16;  // of those below the channel makes its own use

struct ChannelLimits {
  double handshake_timeout_s = 5;      // until a peer has proved who it is; at most 1 KiB until then
  double heartbeat_s = 0.5;            // a sign of life when nothing else was sent for that long
  double silence_timeout_s = 3;        // without a byte from the peer: closed
  double linger_s = 1;                 // for a closed channel's last bytes to leave
  size_t max_unsent_bytes = 64u << 20;  // sent and not taken by the kernel: beyond, closed
  int max_channels = 1024;
  int max_unknown_peers = 64;                      // in their handshake; beyond, the oldest goes
  double spin_s = 0;                               // the I/O thread polls that long after work, before it sleeps
  size_t max_frame_bytes = kMaxFramePayloadBytes;  // of a peer's payload
  // Descriptors that a peer may send along, over Unix sockets. Where they are taken only processes of this very user
  // are.
  size_t max_files = 0;
};

struct ControlStats {
  int64_t opened = 0, closed = 0;
  int64_t refused = 0;  // handshakes that failed
  int64_t garbage = 0;  // … because of what was said, or because strangers were too many
  int64_t forged = 0;   // channels closed because of a bad frame
  int64_t silent = 0;   // … because their peer fell silent
  int64_t stalled = 0;  // … because their peer did not read
};

struct ChannelEvents {
  // A whole, authentic frame; `payload` lives until the call returns.
  std::function<void(uint16_t type, std::string_view payload)> on_frame;
  // Exactly once, and last.
  std::function<void(const std::string& reason)> on_closed;
  // Instead of both: the socket, not blocking and with no byte behind the handshake read, is the caller's from now on.
  std::function<void(Fd socket)> take_over;
};

class ControlLoop;

class Channel {
 public:
  ~Channel();
  // Sends on this thread while the kernel takes it, and leaves the rest to the I/O thread; never
  // blocks. False: the channel is closed, or is now because its peer does not read or the payload
  // is longer than kMaxFramePayloadBytes. With `more_follow` bytes may wait for the next send():
  // one system call for a whole batch.
  bool send(uint16_t type, std::string_view payload, bool more_follow = false);
  // The same, and descriptors cross with it, of a Unix socket. They must stay open until the loop has ended.
  bool send_files(uint16_t type, std::string_view payload, std::span<const int> files);
  // In on_frame: the descriptors that have come.
  std::vector<Fd> take_files();
  // on_closed follows on the I/O thread, at this side with `reason`, at the peer with it too. What
  // was sent before still leaves, if the peer takes it within linger_s.
  void close(const std::string& reason);
  bool is_open() const;
  const NodeIdentity& peer() const;
  const std::string& address() const;  // of the other end, for messages
  size_t queued_bytes() const;         // sent and not taken by the kernel
  double heard_s() const;              // Clock: the peer's last sign of life

 private:
  friend class ControlLoop;
  struct Impl;
  explicit Channel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};
using ChannelPtr = std::shared_ptr<Channel>;

// Where, and as whom.
struct ControlEndpoint {
  std::string address;  // address.h
  ClusterKey key;       // without a secret only addresses of this host are taken
  NodeIdentity self;
  bool numeric = false;  // its host is looked up nowhere
};

// Called on the I/O thread when a channel is open; gives what listens to it.
using OnOpen = std::function<ChannelEvents(ChannelPtr channel)>;

class ControlLoop {
 public:
  // `log` is told, on the I/O thread and once a second at most, of peers that were refused.
  // `work` is called on it in every turn, before it waits; true: again within microseconds, whatever comes or does not.
  explicit ControlLoop(Clock& clock, const ChannelLimits& limits = {},
                       std::function<void(const std::string&)> log = nullptr, std::function<bool()> work = nullptr);
  // Closes every channel (their on_closed run) and joins the thread.
  ~ControlLoop();

  // Listens until the loop goes. Returns the address with its real port.
  Result<std::string> listen(const ControlEndpoint& endpoint, OnOpen on_open);
  // Waits for a channel, timeout_s at most (a name's resolution not counted). Not from a callback.
  Result<ChannelPtr> connect(const ControlEndpoint& endpoint, double timeout_s, OnOpen on_open);
  // The same without waiting: `done` is told, on the I/O thread, or at once of a wrong address.
  void dial(const ControlEndpoint& endpoint, double timeout_s, OnOpen on_open,
            std::function<void(Result<ChannelPtr>)> done);
  // Runs f on the I/O thread, soon.
  void post(std::function<void()> f);

  ControlStats stats() const;

 private:
  friend class Channel;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace xpyd::disagg
