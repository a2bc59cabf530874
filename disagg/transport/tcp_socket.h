// What both ends of the tcp wire do with a socket, and the addresses that they meet at.
//
// Thread safety: functions and plain values.
#pragma once

#include <netdb.h>
#include <sys/uio.h>

#include <memory>
#include <string>
#include <vector>

#include "base/os.h"
#include "disagg/transport/tcp_frames.h"

namespace xpyd::tcp {

// What was moved without blocking; 0: nothing now; -1: the connection has ended.
ssize_t read_now(int fd, iovec* where, int n);
ssize_t send_now(int fd, std::vector<iovec>& from);
void prepare(int fd);

// What of a list of ranges is still to be sent.
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
  // As many bytes, none of them ours: the other side was promised a length.
  void become_zeros();

 private:
  std::vector<iovec> ranges_;
  size_t at_ = 0;
};

// tcp:HOST:PORT:TOKEN, the token in hexadecimal.
struct Address {
  std::string host, port;
  TcpToken token{};
};
Result<Address> parse_address(const std::string& text);
Error unreachable(const std::string& address, const std::string& why);

using AddressInfo = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
AddressInfo look_up(const std::string& host, const std::string& port, int flags);

}  // namespace xpyd::tcp
