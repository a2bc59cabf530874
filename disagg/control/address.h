// Where control channels are: "HOST:PORT", "[IPv6]:PORT" or "unix:/path".
//
// Thread safety: plain functions. Names are resolved by the system, which may block.
#pragma once

#include <sys/socket.h>

#include <string>

#include "base/status.h"

namespace xpyd {

struct ControlAddress {
  std::string text;  // as given
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  bool is_unix() const { return storage.ss_family == AF_UNIX; }
  bool is_local() const;  // this host only: a Unix socket or a loopback address
};

Result<ControlAddress> parse_control_address(const std::string& text);

// A bound, listening, non-blocking socket. `bound` is where: port 0 has become a number. A Unix
// socket may be opened by this user alone; one of this user's that a dead process left behind is
// replaced, and nothing else that may have the name.
Result<int> listen_at(const ControlAddress& address, std::string* bound);
// Closes it; the name of a Unix socket goes with it.
void close_listener(int fd, const std::string& address);

// A non-blocking socket on its way to `address`: connected, or failed, once it can be written.
Result<int> connect_to(const ControlAddress& address);

// Of a socket that was accepted from a Unix socket: whether this user, or root, is at its other
// end.
bool of_user_or_root(int fd);

}  // namespace xpyd
