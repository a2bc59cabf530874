#include "disagg/transport/tcp_socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

namespace xpyd::tcp {
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

void prepare(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

void Sending::become_zeros() {
  size_t left = 0;
  for (size_t i = at_; i < ranges_.size(); ++i) left += ranges_[i].iov_len;
  ranges_.clear(), at_ = 0;
  for (; left > 0; left -= ranges_.back().iov_len)
    ranges_.push_back({const_cast<std::byte*>(kZeros), std::min(left, sizeof kZeros)});
}

Error unreachable(const std::string& address, const std::string& why) {
  return {ErrorCode::unavailable, "tcp: " + address + ": " + why};
}

Result<Address> parse_address(const std::string& text) {
  const auto bad = [&] { return unreachable(text, "not an address of a tcp transport (tcp:HOST:PORT:TOKEN)"); };
  const size_t token_at = text.rfind(':');
  if (!text.starts_with("tcp:") || token_at <= 4) return bad();
  const size_t port_at = text.rfind(':', token_at - 1);
  if (port_at == std::string::npos || port_at <= 4) return bad();
  Address address{text.substr(4, port_at - 4), text.substr(port_at + 1, token_at - port_at - 1)};
  const std::string token = text.substr(token_at + 1);
  if (token.size() != 2 * address.token.size() || address.port.empty()) return bad();
  for (size_t i = 0; i < address.token.size(); ++i) {
    const char* at = token.data() + 2 * i;
    if (auto [end, error] = std::from_chars(at, at + 2, address.token[i], 16); error != std::errc() || end != at + 2)
      return bad();
  }
  if (address.host.size() > 2 && address.host.front() == '[' && address.host.back() == ']')
    address.host = address.host.substr(1, address.host.size() - 2);
  return address;
}

AddressInfo look_up(const std::string& host, const std::string& port, int flags) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM, hints.ai_flags = AI_NUMERICSERV | flags;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) found = nullptr;
  return {found, freeaddrinfo};
}

}  // namespace xpyd::tcp
