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
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/status.h"

namespace xpyd {

// Bytes of a side channel's frames, and the addresses at which side channels are reached. Numbers
// are little endian. What is read comes from outside: a read past the end is seen, never made.
//
// Thread safety: plain values and functions.

class SideWriter {
 public:
  template <class T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    for (size_t i = 0; i < sizeof value; ++i) bytes_.push_back(char(uint64_t(value) >> (8 * i)));
  }
  void put(std::string_view text) { bytes_.append(text); }
  std::string framed() && {  // with the length before it
    SideWriter whole;
    whole.put(uint32_t(bytes_.size()));
    whole.put(std::string_view(bytes_));
    return std::move(whole.bytes_);
  }

 private:
  std::string bytes_;
};

// After a read past the end every value is 0, and ok() false.
class SideReader {
 public:
  explicit SideReader(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
  T get() {
    uint64_t value = 0;
    std::string_view raw = take(sizeof(T));
    for (size_t i = 0; i < raw.size(); ++i) value |= uint64_t(uint8_t(raw[i])) << (8 * i);
    return T(value);
  }
  std::string_view take(size_t n) {
    if (n > bytes_.size()) {
      ok_ = false;
      n = 0;
    }
    std::string_view taken = bytes_.substr(0, n);
    bytes_.remove_prefix(n);
    return taken;
  }
  bool ok() const { return ok_; }
  size_t left() const { return bytes_.size(); }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

// KvTransport::address() of such a wire: KIND,HOST,PORT,TOKEN,BASE+BYTES,..., text without blanks,
// known to the cluster only. `token` is what lets somebody in.
struct SideAddress {
  struct Region {
    uint64_t base = 0, bytes = 0;
    bool operator==(const Region&) const = default;
  };
  bool operator==(const SideAddress&) const = default;
  std::string host;  // without commas
  uint16_t port = 0;
  uint64_t token = 0;
  std::vector<Region> regions;
};
std::string to_text(const std::string& kind, const SideAddress& address);
Result<SideAddress> parse_side_address(const std::string& kind, const std::string& text);

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
