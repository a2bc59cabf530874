// The side channel of the rdma wire: TCP connections on which the two ends of a link exchange queue
// pair numbers and keys of windows (rdma_messages.h). One thread reads them all, so that a peer is
// answered while the instance computes. When a process dies its connections end at once, which is
// how the other side learns of it: RDMA itself would retry for seconds.
//
// Thread safety: Channel: any thread. ChannelThread: its owner's thread; handlers run on the thread
// of its own.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/status.h"

namespace xpyd::rdma {

class Channel {
 public:
  explicit Channel(int fd) : fd_(fd) {}
  ~Channel();
  Channel(const Channel&) = delete;
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
  friend class ChannelThread;
  bool flush();  // false: the connection is broken; mutex_ is held
  bool read();   // false: at its end
  const int fd_;
  std::mutex mutex_;
  std::string unsent_;
  std::string received_;  // the thread's
  double since_ = 0;      // the thread's
  std::atomic<bool> ended_ = false;
};

class ChannelThread {
 public:
  // `accepted` sets the handlers of a channel that somebody has called us on.
  explicit ChannelThread(std::function<void(const std::shared_ptr<Channel>&)> accepted);
  ~ChannelThread();
  Status listen(const std::string& host);  // before start()
  uint16_t port() const { return port_; }
  void start();
  void stop();  // no handler runs afterwards; channels are ended
  void add(std::shared_ptr<Channel> channel);

 private:
  void run();
  void accept_one();
  const std::function<void(const std::shared_ptr<Channel>&)> accepted_;
  int listener_ = -1, wake_ = -1;
  uint16_t port_ = 0;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Channel>> added_;
  std::vector<std::shared_ptr<Channel>> channels_;  // the thread's
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

// Calls host:port, sends `frame` and waits for one frame back, all within `seconds`. The answer's
// body; the channel goes to a thread next.
Result<std::string> call(const std::string& host, uint16_t port, const std::string& frame,
                         double seconds, std::shared_ptr<Channel>& channel);

}  // namespace xpyd::rdma
