// Host memory that other processes can map: memfds, sealed so that nobody can cut them short under
// a process that has them mapped.
//
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <memory>

#include "base/device/device.h"
#include "base/os.h"
#include "base/status.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg {

// Zeroed, touched, in huge pages where the system gives them to shared memory, freed with the last
// owner. Its file is remembered: shared_file() finds it. Error `unavailable`: not that much.
Result<std::shared_ptr<std::byte>> shared_pool_memory(size_t bytes);

// The same of a file that another process has so made. Errors as map_shared_file()'s.
Result<std::shared_ptr<std::byte>> shared_pool_memory(Fd file, size_t bytes);

// The CPU, but what it allocates is shared_pool_memory(): give it to the KvMemory of an instance whose wire is shm.
Device& shared_memory_device();

struct SharedFile {
  int fd = -1;        // of the pool; valid while the memory is
  size_t offset = 0;  // of the range in the file
};
// Error `invalid_argument`: the range is not inside memory of shared_pool_memory().
Result<SharedFile> shared_file(MemoryRange range);

// A file of another process, mapped whole. Error `io`: it is shorter than `bytes`, or not sealed.
Result<std::shared_ptr<std::byte>> map_shared_file(int fd, size_t bytes);

// A new sealed file, mapped: what shared_pool_memory() is made of.
Result<std::shared_ptr<std::byte>> make_shared_file(const char* name, size_t bytes, Fd& file);

}  // namespace xpyd::disagg
