// CUDA as a Device: memory and queues. For CUDA sources only. Thread safety: as device.h says.
#pragma once

#include <memory>

#include "base/cuda/cuda.h"
#include "base/device/device.h"

namespace xpyd {

// Makes the device of the process's one card. Queues are streams. priorities: thread blocks of decode run before those
// of prefill.
std::unique_ptr<Device> make_cuda_device(bool priorities = true);

// Makes page groups of the card's physical memory (base/device/page_groups_cuda.cu). Errors `invalid_argument`:
// group_bytes is not a multiple of what the card maps; `unavailable`: not enough memory, or the driver has no such
// calls.
Result<std::shared_ptr<PageGroups>> make_cuda_page_groups(const PageGroupOptions& options);

// The stream behind a queue of that device, on which models enqueue their kernels.
cuda::Stream& stream_of(DeviceQueue& queue);

}  // namespace xpyd
