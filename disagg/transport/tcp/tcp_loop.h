// The I/O threads of the tcp transport. A Loop is one thread with an edge-triggered epoll set of links. It runs ready
// links one after another. The file also has the socket helpers of initiator and owner.
//
// Thread safety: any thread may call Loop's public functions. Only its loop's thread runs a link.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/os.h"
#include "base/status.h"
#include "disagg/transport/tcp/tcp_frames.h"

namespace xpyd::disagg::tcp {

// ---- sockets

// read_now() and send_now() return the bytes that they moved without blocking, 0 if the socket would block, or -1 if
// the connection has ended.
inline ssize_t read_now(int fd, iovec* where, int n) {
  while (true) {
    const ssize_t got = readv(fd, where, n);
    if (got > 0) return got;
    if (got == 0) return -1;
    if (errno == EAGAIN) return 0;
    if (errno != EINTR) return -1;
  }
}

inline ssize_t send_now(int fd, std::vector<iovec>& from) {
  msghdr message{};
  message.msg_iov = from.data(), message.msg_iovlen = std::min<size_t>(from.size(), kFrameRanges);
  while (true) {
    const ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno == EAGAIN) return 0;
    if (errno != EINTR) return -1;
  }
}

// The rest of a list of ranges that is being sent.
class Sending {
 public:
  void set(std::vector<iovec> ranges) { ranges_ = std::move(ranges), at_ = 0; }
  bool empty() const { return at_ == ranges_.size(); }
  void append_to(std::vector<iovec>& out) const {
    out.insert(out.end(), ranges_.begin() + ptrdiff_t(at_), ranges_.end());
  }
  void advance(size_t& sent) {
    while (sent > 0 && !empty()) {
      iovec& from = ranges_[at_];
      const size_t n = std::min(sent, from.iov_len);
      from.iov_base = static_cast<char*>(from.iov_base) + n;
      from.iov_len -= n, sent -= n;
      at_ += from.iov_len == 0;
    }
  }
  // Replaces the rest by zeros of the same length, because the frame's head has promised the length to the peer.
  void become_zeros() {
    alignas(64) static const std::byte kZeros[64 << 10] = {};
    size_t left = 0;
    for (size_t i = at_; i < ranges_.size(); ++i) left += ranges_[i].iov_len;
    ranges_.clear(), at_ = 0;
    for (; left > 0; left -= ranges_.back().iov_len)
      ranges_.push_back({const_cast<std::byte*>(kZeros), std::min(left, sizeof kZeros)});
  }

 private:
  std::vector<iovec> ranges_;
  size_t at_ = 0;
};

// ---- links

constexpr int kTurn = 8;  // reads or writes of one link before the loop runs the next link

// One connection: a non-blocking socket and the state of its two directions.
class Link {
 public:
  explicit Link(Fd socket) : socket_(std::move(socket)) {
    const int on = 1;
    setsockopt(fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  }
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  int fd() const { return socket_.get(); }
  enum class Next { wait, again, close };
  // Reads and writes at most kTurn times each. Returns wait if the socket would block, again if there is more to do
  // now, and close if the connection has to end.
  virtual Next run() = 0;

 private:
  friend class Loop;
  const Fd socket_;
  bool ready_ = false;
};

class Loop {
 public:
  Loop() {
    XPYD_CHECK(epoll_.get() >= 0 && wake_.get() >= 0, "epoll or eventfd: out of descriptors");
    epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
    XPYD_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) == 0);
    thread_ = std::thread([this] { work(); });
  }
  ~Loop() { stop(); }

  void add(std::unique_ptr<Link> link) {
    {
      std::lock_guard lock(mutex_);
      added_.push_back(std::move(link));
    }
    kick();
  }
  // Runs every link once, because there may be new work for them.
  void kick() {
    if (!kicked_.exchange(true)) eventfd_write(wake_.get(), 1);
  }
  void stop() {  // ends the thread and closes all links
    if (!thread_.joinable()) return;
    stop_ = true;
    eventfd_write(wake_.get(), 1);
    thread_.join();
    links_.clear(), added_.clear();
  }

 private:
  void work() {
    epoll_event events[64];
    std::vector<Link*> ready, next;
    auto make_ready = [&](Link& link) {
      if (!std::exchange(link.ready_, true)) next.push_back(&link);
    };
    RealClock clock;
    double swept_s = clock.now();
    while (!stop_) {
      const int n = epoll_wait(epoll_.get(), events, 64, next.empty() ? 1000 : 0);
      for (int i = 0; i < n; ++i) {
        if (events[i].data.ptr) {
          make_ready(*static_cast<Link*>(events[i].data.ptr));
        } else {
          eventfd_t ignored;
          eventfd_read(wake_.get(), &ignored);
        }
      }
      // Every link runs about once a second, so that it sees that its session has died on another loop.
      const bool sweep = n == 0 && next.empty();
      if (sweep || kicked_.exchange(false) || clock.now() > swept_s + 1) {
        swept_s = clock.now();
        take_added();
        for (auto& link : links_) make_ready(*link);
      }
      ready.swap(next);
      for (Link* link : ready) {
        link->ready_ = false;
        const Link::Next then = link->run();
        if (then == Link::Next::again) make_ready(*link);
        if (then == Link::Next::close) std::erase_if(links_, [link](const auto& other) { return other.get() == link; });
      }
      ready.clear();
    }
  }
  void take_added() {
    std::lock_guard lock(mutex_);
    for (auto& link : added_) {
      epoll_event event{.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data = {.ptr = link.get()}};
      if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link->fd(), &event) == 0) links_.push_back(std::move(link));
    }
    added_.clear();
  }

  const Fd epoll_{epoll_create1(EPOLL_CLOEXEC)}, wake_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Link>> added_;
  std::vector<std::unique_ptr<Link>> links_;  // only the thread uses it
  std::atomic<bool> kicked_{false}, stop_{false};
  std::thread thread_;
};

}  // namespace xpyd::disagg::tcp
