#include "disagg/transport/tcp_loop.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "disagg/transport/tcp_frames.h"

namespace xpyd::disagg::tcp {
namespace {

alignas(64) const std::byte kZeros[64 << 10] = {};

}  // namespace

ssize_t read_now(int fd, iovec* where, int n) {
  while (true) {
    const ssize_t got = readv(fd, where, n);
    if (got > 0) return got;
    if (got == 0) return -1;
    if (errno == EAGAIN) return 0;
    if (errno != EINTR) return -1;
  }
}

ssize_t send_now(int fd, std::vector<iovec>& from) {
  msghdr message{};
  message.msg_iov = from.data(), message.msg_iovlen = std::min<size_t>(from.size(), kFrameRanges);
  while (true) {
    const ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno == EAGAIN) return 0;
    if (errno != EINTR) return -1;
  }
}

Link::Link(Fd socket) : socket_(std::move(socket)) {
  const int on = 1;
  setsockopt(fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

void Sending::become_zeros() {
  size_t left = 0;
  for (size_t i = at_; i < ranges_.size(); ++i) left += ranges_[i].iov_len;
  ranges_.clear(), at_ = 0;
  for (; left > 0; left -= ranges_.back().iov_len)
    ranges_.push_back({const_cast<std::byte*>(kZeros), std::min(left, sizeof kZeros)});
}

}  // namespace xpyd::disagg::tcp
