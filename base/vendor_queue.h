// What some queues are besides: the stream of a device whose vendor's libraries enqueue on it
// themselves. A DeviceQueue that is one is found by dynamic_cast; the CPU's is none.
#pragma once

#include <memory>

#include "base/device.h"

namespace xpyd {

// Thread safety: as DeviceQueue.
class VendorQueue {
 public:
  virtual ~VendorQueue() = default;
  virtual void* handle() = 0;  // CUDA: the cudaStream_t
  // Another one, a VendorQueue itself, on the same device and in no order with this one. It does
  // not copy(), and making it allocates no memory.
  virtual std::unique_ptr<DeviceQueue> make_beside() = 0;
};

}  // namespace xpyd
