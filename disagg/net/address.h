// Addresses of channels: "HOST:PORT", "[IPv6]:PORT", "unix:/path", or "unix:@name" (abstract: no file).
//
// Thread safety: plain functions. The system resolves host names, which may block.
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
  bool is_local() const;  // a Unix socket or a loopback address
};

// Parses an address. With `numeric` no host name is resolved, so the call does not block.
Result<ControlAddress> parse_control_address(const std::string& text, bool numeric = false);

// Returns a bound, listening, non-blocking socket, and its real address in `bound` (port 0 becomes a number). Only this
// user may open a Unix socket. A socket file that a dead process of this user has left is replaced. Any other file is
// left alone.
Result<int> listen_at(const ControlAddress& address, std::string* bound);
// Closes a listening socket and removes the file of a Unix socket.
void close_listener(int fd, const std::string& address);

// Returns a non-blocking socket that is connecting to `address`. When it becomes writable it has connected or failed.
Result<int> connect_to(const ControlAddress& address);

// Returns whether the process at the other end of a Unix socket is this user's or root's.
bool of_user_or_root(int fd);

}  // namespace xpyd::disagg
