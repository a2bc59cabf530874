// How peers of the shm wire meet: over a Unix socket of an abstract, random name, between processes
// of one user (SO_PEERCRED), on which the descriptors of the owner's memory cross. The socket stays
// open: the kernel closes it when the last thread of the peer has ended, and that is the proof that
// it writes no more.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

#include "base/os.h"
#include "disagg/transport/transport.h"

namespace xpyd::shm {

constexpr size_t kMaxRegions = 64;
constexpr uint64_t kHelloMagic = 0x3230'6f6c'6c65'6878;  // "xhello02"

struct Hello {
  uint64_t magic = kHelloMagic;
};
// With the descriptors of the table and of the regions.
struct Welcome {
  uint64_t magic = kHelloMagic;
  int32_t line = 0, n_regions = 0;
  uint64_t n_ranges = 0;  // of the table
  struct {
    uint64_t offset, bytes;
  } regions[kMaxRegions] = {};
};

bool same_user(int socket);
bool hung_up(int socket);
socklen_t abstract_address(const std::string& name, sockaddr_un& address);

}  // namespace xpyd::shm
