// Where channels are: "HOST:PORT", "[IPv6]:PORT", "unix:/path", or "unix:@name", an abstract one that is no file.
//
// Thread safety: plain functions. Names are resolved by the system, which may block.
#pragma once

#include <sys/socket.h>

#include <string>

#include "base/status.h"

namespace xpyd::disagg {

struct ControlAddress {
  std::string text;  // as given
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  bool is_unix() const { return storage.ss_family == AF_UNIX; }
  bool is_file() const { return is_unix() && !text.starts_with("unix:@"); }
  bool is_local() const;  // this host only: a Unix socket or a loopback address
};

// `numeric`: no name is looked up, and so nothing blocks.
Result<ControlAddress> parse_control_address(const std::string& text, bool numeric = false);

// A bound, listening, non-blocking socket. `bound` is where: port 0 has become a number. A Unix
// socket may be opened by this user alone; one of this user's that a dead process left behind is
// replaced, and nothing else that may have the name.
Result<int> listen_at(const ControlAddress& address, std::string* bound);
// Closes it; the name of a Unix socket goes with it.
void close_listener(int fd, const std::string& address);

// A non-blocking socket on its way to `address`: connected, or failed, once it can be written. Error
// `unavailable`: there is no room at the door of a Unix socket now.
Result<int> connect_to(const ControlAddress& address);

// Of a Unix socket: whether this user, or (also) root, is at its other end.
bool of_user(int fd, bool or_root);

}  // namespace xpyd::disagg
