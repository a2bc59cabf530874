// A device as the rooms above see it: memory in which KV lives, and queues that work on it in order. The CPU is one, a
// CUDA card (base/device/device_cuda.cu) is another. Kernels and models of a device include its own headers.
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

// A Linux dma-buf: a file descriptor for memory of a device, through which network cards get access to it. The owner
// closes it; an importer keeps what it needs.
struct DmaBuf {
  DmaBuf(int file, uint64_t at) : fd(file), offset(at) {}
  DmaBuf(DmaBuf&& from) noexcept : fd(from.fd), offset(from.offset) { from.fd = -1; }
  DmaBuf& operator=(DmaBuf&& from) noexcept;
  ~DmaBuf();
  int fd = -1;
  uint64_t offset = 0;  // the offset of the requested memory in the file
};

// The work of one instance, in order: work that is enqueued later sees the results of earlier work. On the CPU a call
// has done its work when it returns, except on make_copy_queue()'s queues. The destructor waits for all work. Memory
// that a queue uses must stay until the work is done. Thread safety: one thread, that of its instance.
class DeviceQueue {
 public:
  virtual ~DeviceQueue() = default;
  // Copies between memories of this queue's device; the copies must not overlap. `read_soon`: this queue reads them
  // next, so they should stay in a cache.
  virtual void copy(std::span<const Copy> copies, bool read_soon) = 0;
  // mark() is a point in the order. reached() returns without blocking whether everything before it is done.
  virtual int64_t mark() = 0;
  virtual bool reached(int64_t mark) = 0;
  virtual void wait() = 0;  // blocks until everything enqueued is done
  // Returns a dma-buf of `memory`, or nothing if the device's memory is host memory, which network cards reach
  // directly. Error `unavailable`: the driver exports no dma-buf.
  virtual Result<std::optional<DmaBuf>> dma_buf(std::span<std::byte> memory) {
    (void)memory;
    return std::optional<DmaBuf>();
  }
};

// A device: memory of it, page groups and queues. Thread safety: any thread.
class Device {
 public:
  virtual ~Device() = default;
  virtual const char* name() const = 0;
  // Allocates zeroed memory that is ready for use (touched, pinned) and is freed with its last owner. Error
  // `unavailable`: not enough memory.
  virtual Result<std::shared_ptr<std::byte>> allocate(size_t bytes) = 0;
  // Error `unavailable`: not enough memory, or not on this device.
  virtual Result<std::shared_ptr<PageGroups>> make_page_groups(const PageGroupOptions& options) {
    (void)options;
    return Error{ErrorCode::unavailable, std::string("page groups on ") + name() + ": not there yet"};
  }
  // `phase` is what the instance mostly does: a device may give each phase its own priority or part of itself.
  enum class Phase { prefill, decode, both };
  virtual std::unique_ptr<DeviceQueue> make_queue(Phase phase = Phase::both) = 0;
  // Allocates host memory that this device's copies reach at full speed (pinned, if the device pins): zeroed, touched,
  // page aligned, freed with its last owner. Error `unavailable`: not enough memory.
  virtual Result<std::shared_ptr<std::byte>> allocate_host(size_t bytes);
  // A queue for copies between this device and allocate_host()'s memory, which run while the caller and other queues go
  // on. `gbps` simulates a slower link on the CPU: its speed in GB/s (10^9 bytes), 0 for no limit. A card ignores it.
  virtual std::unique_ptr<DeviceQueue> make_copy_queue(double gbps) {
    (void)gbps;
    return make_queue();
  }
};

Device& cpu_device();
DeviceQueue& cpu_queue();  // stateless: any thread may use it

// The stream of a device whose vendor's libraries enqueue work themselves. A DeviceQueue that has one is found by
// dynamic_cast; the CPU's queue has none.
//
// Thread safety: as DeviceQueue.
class VendorQueue {
 public:
  virtual ~VendorQueue() = default;
  virtual void* handle() = 0;  // CUDA: the cudaStream_t
  // Makes another queue, also a VendorQueue, on the same device and not ordered with this one. It has no copy(), and
  // making it allocates no memory.
  virtual std::unique_ptr<DeviceQueue> make_beside() = 0;
};

}  // namespace xpyd
