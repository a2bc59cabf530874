// A device as the rooms above see it: memory that KV lives in, and queues that work on it in order. The CPU is one;
// base/device/device_cuda.cu is another. Kernels and models of a device know its own headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/copy.h"
#include "base/device/page_groups.h"
#include "base/status.h"

namespace xpyd {

// A file that stands for memory of a device, from which network cards can be given access to it
// (Linux dma-buf). Closed with its owner; whoever imported it keeps what it needs.
struct DmaBuf {
  DmaBuf(int file, uint64_t at) : fd(file), offset(at) {}
  DmaBuf(DmaBuf&& from) noexcept : fd(from.fd), offset(from.offset) { from.fd = -1; }
  DmaBuf& operator=(DmaBuf&& from) noexcept;
  ~DmaBuf();
  int fd = -1;
  uint64_t offset = 0;  // of the memory asked for, inside the file
};

// The work of one instance, in order: what is enqueued later sees what was enqueued before. On the
// CPU a call has done its work when it returns. Thread safety: one thread, its instance's.
class DeviceQueue {
 public:
  virtual ~DeviceQueue() = default;
  // Between memories of this queue's device; the copies do not overlap. `read_soon`: by this queue,
  // so that a cache is the right place for them.
  virtual void copy(std::span<const Copy> copies, bool read_soon) = 0;
  // A point in the order; reached() says without blocking whether everything before it is done.
  virtual int64_t mark() = 0;
  virtual bool reached(int64_t mark) = 0;
  virtual void wait() = 0;  // until everything enqueued is done
  // Empty: memory of this queue's device is host memory, which network cards reach as it is. Error
  // `unavailable`: it is not, and the driver exports none of it.
  virtual Result<std::optional<DmaBuf>> dma_buf(std::span<std::byte> memory) {
    (void)memory;
    return std::optional<DmaBuf>();
  }
};

// Thread safety: any thread.
class Device {
 public:
  virtual ~Device() = default;
  virtual const char* name() const = 0;
  // Zeroed, ready for use (touched, pinned), freed with the last owner. Error `unavailable`: not that much.
  virtual Result<std::shared_ptr<std::byte>> allocate(size_t bytes) = 0;
  // Error `unavailable`: not that much, or not on this device.
  virtual Result<std::shared_ptr<PageGroups>> make_page_groups(const PageGroupOptions& options) {
    (void)options;
    return Error{ErrorCode::unavailable, std::string("page groups on ") + name() + ": not there yet"};
  }
  // `phase` is what the instance mostly does: a device may give each its own priority or part of itself.
  enum class Phase { prefill, decode, both };
  virtual std::unique_ptr<DeviceQueue> make_queue(Phase phase = Phase::both) = 0;
  // Host memory that this device's copies reach at full speed (pinned where there is such a thing).
  // Zeroed, touched, page aligned, freed with the last owner. Error `unavailable`: not that much.
  virtual Result<std::shared_ptr<std::byte>> allocate_host(size_t bytes);
  // A queue for copies between this device and allocate_host()'s memory, which run while the caller
  // and other queues go on. `gbps`: copies take at least bytes / gbps (the CPU's; 0: no limit).
  virtual std::unique_ptr<DeviceQueue> make_copy_queue(double gbps) {
    (void)gbps;
    return make_queue();
  }
};

Device& cpu_device();
DeviceQueue& cpu_queue();  // has no state: any thread may use it

// What some queues are besides: the stream of a device whose vendor's libraries enqueue on it
// themselves. A DeviceQueue that is one is found by dynamic_cast; the CPU's is none.
//
// Thread safety: as DeviceQueue.
class VendorQueue {
 public:
  virtual ~VendorQueue() = default;
  virtual void* handle() = 0;  // CUDA: the cudaStream_t
  // Another one, a VendorQueue itself, on the same device and in no order with this one. It does
  // not copy(), and making it allocates no memory.
  virtual std::unique_ptr<DeviceQueue> make_beside() = 0;
};

// Memory of a device that other processes can map: a file descriptor stands for it, and is passed
// on over a Unix socket. What a Device also is where its driver can do that (a card:
// base/device/page_groups_cuda.cu); host memory needs none of it, a memfd is one already.
//
// Thread safety: any thread.
class MemoryExporter {
 public:
  virtual ~MemoryExporter() = default;
  virtual Status exports() = 0;  // error `unavailable`: not this card's. Before all others
  // Which card: the same text in every process that uses it.
  virtual std::string identity() = 0;
  // Zeroed. `file` is the caller's to close; the memory is freed when nobody has it mapped and no
  // process has such a file open. Errors `unavailable`: not that much; `io`: the driver does not.
  virtual Result<std::shared_ptr<std::byte>> allocate_exported(size_t bytes, int& file) = 0;
  // Memory of another process, of so many bytes when it was allocated, on this card. Errors as allocate_exported()'s.
  virtual Result<std::shared_ptr<std::byte>> import(int file, size_t bytes) = 0;
};

}  // namespace xpyd
