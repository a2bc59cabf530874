// CUDA as a Device: memory and queues. Included by CUDA sources only.
#pragma once

#include <memory>

#include "base/cuda/cuda.h"
#include "base/device/device.h"

namespace xpyd {

// How instances share the card.
struct CudaSharing {
  bool priorities = true;              // decode before prefill, where both have blocks waiting
  std::shared_ptr<cuda::Split> split;  // part 0 for prefill, part 1 for decode; null: all of the card for all
};
// One card for the whole process. Queues are streams.
std::unique_ptr<Device> make_cuda_device(CudaSharing sharing = {});

// Physical memory of the card, in groups (base/device/page_groups_cuda.cu). Error `invalid_argument`:
// group_bytes is no multiple of what the card maps; `unavailable`: not that much, or no such calls.
Result<std::shared_ptr<PageGroups>> make_cuda_page_groups(const PageGroupOptions& options);

// Memory of the card that other processes can map: MemoryExporter's calls, of this device.
Result<std::shared_ptr<std::byte>> make_cuda_exported(size_t bytes, int& file);
Result<std::shared_ptr<std::byte>> import_cuda_memory(int file, size_t bytes);

// The stream behind a queue of that device: models enqueue their kernels there.
cuda::Stream& stream_of(DeviceQueue& queue);

}  // namespace xpyd
