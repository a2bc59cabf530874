// The private state of channels and of the loop that serves them.
#pragma once

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/utf8.h"
#include "disagg/net/address.h"
#include "disagg/net/channel.h"

namespace xpyd::disagg {

inline constexpr uint16_t kPing = 0, kGoodbye = 1;
inline constexpr size_t kReadBytes = 64u << 10;
inline constexpr uint64_t kWakeId = 0;
inline constexpr size_t kMaxReasonBytes = 256;  // of a goodbye message

inline std::string shown_reason(std::string_view text) { return printable(text.substr(0, kMaxReasonBytes)); }

// One connection, from its first byte to its last.
struct Channel::Impl {
  enum class Stage { connecting, handshake, open, lingering, gone };

  ControlLoop::Impl* loop = nullptr;  // valid until the channel is gone
  uint64_t id = 0;
  std::string address;
  NodeIdentity peer;  // set before the channel opens

  // For the I/O thread only:
  Stage stage = Stage::handshake;
  std::optional<Handshake> handshake;
  std::optional<FrameReader> reader;
  OnOpen on_open;
  ChannelEvents events;
  std::function<void(Result<ChannelPtr>)> on_connected;  // of connect(), until it is answered
  double deadline_s = 0;                                 // of connecting and handshake; of lingering
  std::atomic<double> heard_s{0};
  double heartbeat_s = 0;
  bool accepted = false, shut = false;

  std::atomic<bool> open{false};  // written under the mutex

  std::mutex mutex;  // guards what follows
  int fd = -1;
  std::optional<FrameWriter> writer;
  std::string out;
  size_t out_at = 0;
  bool blocked = false;     // the kernel's buffer is full; EPOLLOUT resumes
  bool sent_since = false;  // something was sent since the last heartbeat
  bool hopeless = false;    // closes at once, without the queued bytes
  std::string reason;       // why this side closed it

  size_t queued() const { return out.size() - out_at; }

  // EPOLLOUT is requested only while the kernel's buffer is full.
  void watch_output(bool wanted);

  // Requires the mutex. Returns false if the connection is broken.
  bool write_some();
};

struct ControlLoop::Impl {
  using Stage = Channel::Impl::Stage;

  struct Listening {
    int fd;
    ControlEndpoint endpoint;
    OnOpen on_open;
    bool tcp;
  };

  Clock& clock;
  ChannelLimits limits;
  std::function<void(const std::string&)> log;
  std::function<bool()> work;
  const Fd epoll{epoll_create1(EPOLL_CLOEXEC)}, wake{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  Status begun = ok();  // an error: there is no thread, and listen() fails
  std::thread thread;
  std::atomic<std::thread::id> io_thread;

  // For the I/O thread only:
  std::unordered_map<uint64_t, ChannelPtr> channels;
  std::unordered_map<uint64_t, Listening> listeners;
  uint64_t next_id = kWakeId + 1;
  double next_check_s = 0, next_log_s = 0;
  bool waits = false;  // a channel has a deadline
  std::string scratch = std::string(kReadBytes, '\0');

  std::mutex mutex;  // guards the next four
  std::vector<std::function<void()>> inbox;
  std::vector<uint64_t> woken;  // channels closed by other threads
  bool signalled = false, stopping = false;

  Impl(Clock& clock, const ChannelLimits& limits, std::function<void(const std::string&)> log,
       std::function<bool()> work);

  bool on_io_thread() const { return std::this_thread::get_id() == io_thread; }
  void watch(int fd, uint64_t id, uint32_t what, int operation = EPOLL_CTL_ADD);
  void signal();  // requires the mutex
  void attend(uint64_t id);

  void run();
  int wait(bool soon, epoll_event* events, int most);
  void run_inbox();
  void accept_all(uint64_t listener_id);
  void check(double now);
  void drop_everything();

  void add(ChannelPtr channel, double timeout_s);
  void watch(const ChannelPtr& channel, int fd);
  void start_connect(const ControlAddress& address, const ControlEndpoint& endpoint, double timeout_s, OnOpen on_open,
                     std::function<void(Result<ChannelPtr>)> done);
  void on_event(uint64_t id, uint32_t happened);
  void read_some(const ChannelPtr& channel);
  void take(const ChannelPtr& channel, std::string_view bytes);
  bool take_handshake(const ChannelPtr& channel, std::string_view& bytes);
  void take_frames(const ChannelPtr& channel, std::string_view bytes);
  void become_open(const ChannelPtr& channel);
  void hand_over(const ChannelPtr& channel);
  void linger(const ChannelPtr& channel);
  void shut_when_sent(Channel::Impl& c);
  void fail(const ChannelPtr& channel, const std::string& reason);
  void end(const ChannelPtr& channel, const std::string& reason);
  void tell_closed(Channel::Impl& c, const std::string& reason);
};

}  // namespace xpyd::disagg
