#include "disagg/net/address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace xpyd::disagg {
namespace {

Error failed(const ControlAddress& address, const std::string& what, int error) {
  return {ErrorCode::io, address.text + ": " + what + ": " + std::strerror(error)};
}

const sockaddr* of(const ControlAddress& address) { return reinterpret_cast<const sockaddr*>(&address.storage); }

std::string text_of(int fd, const ControlAddress& asked) {
  if (asked.is_unix()) return asked.text;
  sockaddr_storage storage{};
  socklen_t bytes = sizeof storage;
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &bytes) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&storage), bytes, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return asked.text;
  std::string name = host;
  return (name.find(':') == name.npos ? name : "[" + name + "]") + ":" + port;
}

// Removes the file of a Unix socket of this user that no process serves. Nothing else is removed: connect() returns
// ECONNREFUSED for regular files, too.
void remove_left_over(const ControlAddress& address) {
  const std::string path = address.text.substr(std::strlen("unix:"));
  struct stat file;
  if (lstat(path.c_str(), &file) != 0 || !S_ISSOCK(file.st_mode) || file.st_uid != geteuid()) return;
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const bool refused = fd >= 0 && connect(fd, of(address), address.bytes) != 0 && errno == ECONNREFUSED;
  if (fd >= 0) close(fd);
  if (refused) unlink(path.c_str());
}

}  // namespace

bool ControlAddress::is_local() const {
  if (storage.ss_family == AF_UNIX) return true;
  if (storage.ss_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr) >> 24 == 127;
  if (storage.ss_family == AF_INET6) {
    const in6_addr& a = reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(&a) || (IN6_IS_ADDR_V4MAPPED(&a) && a.s6_addr[12] == 127);
  }
  return false;
}

Result<ControlAddress> parse_control_address(const std::string& text, bool numeric) {
  auto bad = [&](const std::string& why) {
    return invalid("address '" + text + "': " + why + "; expected HOST:PORT or unix:/PATH");
  };
  ControlAddress address;
  address.text = text;
  if (text.find('\0') != text.npos) return bad("it has a zero byte");
  if (text.starts_with("unix:")) {
    std::string path = text.substr(5);
    sockaddr_un un{};
    if (path.empty()) return bad("it has no path");
    if (path.size() >= sizeof un.sun_path)
      return bad("its path has " + std::to_string(path.size()) + " bytes; expected at most " +
                 std::to_string(sizeof un.sun_path - 1));
    un.sun_family = AF_UNIX;
    address.storage.ss_family = AF_UNIX;
    std::memcpy(un.sun_path, path.data(), path.size());
    address.bytes = sizeof un;
    if (!address.is_file()) {  // an abstract name begins with a zero byte, shown as '@'
      un.sun_path[0] = 0;
      address.bytes = socklen_t(offsetof(sockaddr_un, sun_path) + path.size());
    }
    std::memcpy(&address.storage, &un, sizeof un);
    return address;
  }
  size_t colon = text.rfind(':');
  if (colon == text.npos) return bad("it has no port");
  std::string host = text.substr(0, colon), port = text.substr(colon + 1);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  else if (host.find(':') != host.npos)
    return bad("an IPv6 address needs brackets");
  if (host.empty()) return bad("it has no host");
  if (port.empty() || port.size() > 5 || port.find_first_not_of("0123456789") != port.npos || std::stoi(port) > 65535)
    return bad("the port is not from 0 to 65535");
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = numeric ? AI_NUMERICHOST | AI_NUMERICSERV : 0;
  if (int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found))
    return Error{ErrorCode::io, "address '" + text + "': " + gai_strerror(error)};
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.bytes = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

Result<int> listen_at(const ControlAddress& address, std::string* bound) {
  int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return failed(address, "socket", errno);
  auto fail = [&](const char* what) {
    Error error = failed(address, what, errno);
    close(fd);
    return error;
  };
  if (address.is_file()) {
    // Before the bind, so that no other user can connect at any moment.
    if (fchmod(fd, 0600) != 0) return fail("fchmod");
    remove_left_over(address);
  } else if (!address.is_unix()) {
    int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  }
  if (bind(fd, of(address), address.bytes) != 0) return fail("bind");
  if (listen(fd, 128) != 0) return fail("listen");
  if (bound) *bound = text_of(fd, address);
  return fd;
}

void close_listener(int fd, const std::string& address) {
  close(fd);
  Result<ControlAddress> at = parse_control_address(address);
  if (at && at.value().is_file()) remove_left_over(at.value());
}

Result<int> connect_to(const ControlAddress& address) {
  int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return failed(address, "socket", errno);
  if (connect(fd, of(address), address.bytes) != 0 && errno != EINPROGRESS) {
    Error error = failed(address, "connect", errno);
    close(fd);
    return error;
  }
  return fd;
}

bool of_user_or_root(int fd) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return false;
  return peer.uid == geteuid() || peer.uid == 0;
}

}  // namespace xpyd::disagg
