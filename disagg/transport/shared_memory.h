// Host memory that other processes can map. Each piece is a memfd, sealed so that nobody can shorten it under a process
// that has it mapped.
//
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/device/device.h"
#include "base/os.h"
#include "base/status.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg {

// Returns zeroed, touched memory, in huge pages if the system grants them. It is freed with its last owner.
// shared_file() finds its file. Error `unavailable`: there is not enough memory.
Result<std::shared_ptr<std::byte>> shared_pool_memory(size_t bytes);

// Returns such memory for a file that another process has made in this way. Errors as for map_shared_file().
Result<std::shared_ptr<std::byte>> shared_pool_memory(const std::string& name, size_t bytes);

// Returns the CPU device, with shared_pool_memory() as its allocator. An instance with shm must keep its KV there.
Device& shared_memory_device();

struct SharedFile {
  std::string name;   // of the pool's file; valid as long as the memory
  size_t offset = 0;  // of the range in the file
};
// Error `invalid_argument`: the range is not inside memory of shared_pool_memory().
Result<SharedFile> shared_file(MemoryRange range);

// Maps a whole file of another process. Error `io`: it is shorter than `bytes`, or not sealed, or this process may not
// open it: only the owner's user may.
Result<std::shared_ptr<std::byte>> map_shared_file(const std::string& name, size_t bytes);

// The name of an open file of this process for the other processes of its host: "/proc/PID/fd/N".
std::string name_for_others(int fd);

// Makes and maps a new sealed file. shared_pool_memory() uses it.
Result<std::shared_ptr<std::byte>> make_shared_file(const char* name, size_t bytes, Fd& file);

}  // namespace xpyd::disagg
