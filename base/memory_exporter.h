// Memory of a device that other processes can map: a file descriptor stands for it, and is passed
// on over a Unix socket. What a Device also is where its driver can do that (a card:
// base/exported_memory_cuda.cu); host memory needs none of it, a memfd is one already.
//
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/status.h"

namespace xpyd {

class MemoryExporter {
 public:
  virtual ~MemoryExporter() = default;
  virtual Status exports() = 0;  // error `unavailable`: not this card's. Before all others
  // Which card: the same text in every process that uses it.
  virtual std::string identity() = 0;
  // Zeroed. `file` is the caller's to close; the memory is freed when nobody has it mapped and no
  // process has such a file open. Errors `unavailable`: not that much;
  // `io`: the driver does not.
  virtual Result<std::shared_ptr<std::byte>> allocate_exported(size_t bytes, int& file) = 0;
  // Memory of another process, of so many bytes when it was allocated, on this card. Errors as
  // allocate_exported()'s.
  virtual Result<std::shared_ptr<std::byte>> import(int file, size_t bytes) = 0;
};

}  // namespace xpyd
