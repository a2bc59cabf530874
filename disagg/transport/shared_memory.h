// Host memory that other processes can map (memfds, sealed so that nobody can cut them short under
// a process that has them mapped), and the sockets on which the processes meet.
//
// Thread safety: any thread.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/device.h"
#include "base/os.h"
#include "base/status.h"
#include "disagg/transport/transport.h"

namespace xpyd {

// Zeroed, touched, in huge pages where the system gives them to shared memory, freed with the last
// owner. Its file is remembered: shared_file() finds it. Error `unavailable`: not that much.
Result<std::shared_ptr<std::byte>> shared_pool_memory(size_t bytes);

// The CPU, but what it allocates is shared_pool_memory(): give it to the KvMemory of an instance
// whose wire is shm.
Device& shared_memory_device();

struct SharedFile {
  int fd = -1;        // of the pool; valid while the memory is
  size_t offset = 0;  // of the range in the file
};
// Error `invalid_argument`: the range is not inside memory of shared_pool_memory().
Result<SharedFile> shared_file(MemoryRange range);

// A file of another process, mapped whole. Error `io`: it is shorter than `bytes`, or not sealed.
Result<std::shared_ptr<std::byte>> map_shared_file(int fd, size_t bytes);

// A new sealed file, mapped: what shared_pool_memory() is made of. `fd` is the caller's to close.
Result<std::shared_ptr<std::byte>> make_shared_file(const char* name, size_t bytes, int& fd);

}  // namespace xpyd

namespace xpyd::shm {

// How peers of the shm wire meet: over a Unix socket of an abstract, random name, between processes
// of one user (SO_PEERCRED), on which the descriptors of the owner's memory cross. The socket stays
// open: the kernel closes it when the last thread of the peer has ended, and that is the proof that
// it writes no more.

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
