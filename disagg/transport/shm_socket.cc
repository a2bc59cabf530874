#include "disagg/transport/shm_socket.h"

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace xpyd::shm {

bool same_user(int socket) {
  ucred user{};
  socklen_t length = sizeof user;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &user, &length) == 0 && user.uid == geteuid();
}

bool hung_up(int socket) {
  char byte;
  const ssize_t n = recv(socket, &byte, 1, MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace xpyd::shm
