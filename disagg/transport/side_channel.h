// The side channel of wires whose bytes go another way (rdma, nccl): TCP connections on which the
// two ends of a link agree about what the wire needs (rdma_messages.h, nccl_messages.h). One thread
// reads them all, so that a peer is answered while the instance computes. When a process dies its
// connections end at once, which is how the other side learns of it: RDMA itself would retry for
// seconds, NCCL would wait for ever.
//
// A frame is its length (4 bytes, little endian, of what follows) and a body.
//
// Thread safety: SideChannel: any thread. SideChannels: its owner's thread; handlers run on the
// thread of its own.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/status.h"

namespace xpyd {

// The largest body of a frame: a stranger's first one, and those that follow.
struct SideLimits {
  size_t hello = 0, frame = 0;
};

class SideChannel {
 public:
  SideChannel(int fd, SideLimits limits) : fd_(fd), limits_(limits) {}
  ~SideChannel();
  SideChannel(const SideChannel&) = delete;
  // Never blocks: what the socket does not take waits, up to a limit at which the channel ends.
  void send(const std::string& frame);
  void end();  // the peer sees its end; our handler's `left` follows
  bool ended() const { return ended_; }

  // Called on the thread. `frame`: a body; false: the peer talks nonsense, and the channel ends.
  // `left` is the last call.
  std::function<bool(std::string_view body)> frame;
  std::function<void()> left;
  bool trusted = false;  // has sent its hello: until then few bytes and seconds are granted

 private:
  friend class SideChannels;
  friend class SideCall;
  bool flush();  // false: the connection is broken; mutex_ is held
  bool read();   // false: at its end
  const int fd_;
  const SideLimits limits_;
  std::mutex mutex_;
  std::string unsent_;
  int wake_ = -1;         // the thread's eventfd, once it has this one
  std::string received_;  // the thread's
  double since_ = 0;      // the thread's
  std::atomic<bool> ended_ = false;
};

class SideChannels {
 public:
  // `accepted` sets the handlers of a channel that somebody has called us on.
  // `work`: called on the thread at each turn, before it waits; true: again within microseconds,
  // whatever comes or does not.
  explicit SideChannels(SideLimits limits, std::function<void(const std::shared_ptr<SideChannel>&)> accepted,
                        std::function<bool()> work = {});
  ~SideChannels();
  Status listen(const std::string& host);            // before start()
  const std::string& host() const { return host_; }  // as numbers, once it listens
  uint16_t port() const { return port_; }
  void start();
  void stop();  // no handler runs afterwards; channels are ended
  void add(std::shared_ptr<SideChannel> channel);
  void wake();  // there is work

 private:
  void run();
  bool accept_one();  // false: there are no descriptors left
  const SideLimits limits_;
  const std::function<void(const std::shared_ptr<SideChannel>&)> accepted_;
  const std::function<bool()> work_;
  int listener_ = -1, wake_ = -1;
  std::string host_;
  uint16_t port_ = 0;
  std::mutex mutex_;
  std::vector<std::shared_ptr<SideChannel>> added_;
  std::vector<std::shared_ptr<SideChannel>> channels_;  // the thread's
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

// A call to host:port (numeric): sends `frame` and takes one frame back, without waiting for
// either.
//
// Thread safety: its owner's thread.
class SideCall {
 public:
  static Result<SideCall> begin(const std::string& host, uint16_t port, std::string frame, SideLimits limits);
  // Goes on. The answer's body, once it is there; the channel goes to a thread next.
  Result<std::optional<std::string>> answer();
  bool said() const { return unsent_.empty(); }
  const std::shared_ptr<SideChannel>& channel() const { return channel_; }

 private:
  SideCall() = default;
  std::string where_, unsent_, received_;
  SideLimits limits_;
  std::shared_ptr<SideChannel> channel_;
};

}  // namespace xpyd
