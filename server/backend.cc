#include <algorithm>
#include <thread>

#include "server/stack.h"

namespace xpyd {
namespace {

#ifndef XPYD_CUDA
Error no_cuda() {
  return {ErrorCode::unavailable,
          "--device cuda: this build has no CUDA: it is compiled in where nvcc (12.4 to 13) and a "
          "card are found, and by `make cuda`"};
}
Result<std::unique_ptr<Backend>> open_no_cuda(const Stack&) { return no_cuda(); }
Result<DevicePeak> peak_of_no_cuda() { return no_cuda(); }
Result<std::unique_ptr<Device>> no_cuda_alone() { return no_cuda(); }
#endif

constexpr DeviceRow kDevices[] = {
    {"cpu", open_cpu_backend, nullptr, 64 << 10, nullptr},
#ifdef XPYD_CUDA
    {"cuda", open_cuda_backend, cuda_device_peak, 2 << 20, open_cuda_alone},
#else
    {"cuda", open_no_cuda, peak_of_no_cuda, 2 << 20, no_cuda_alone},
#endif
};

}  // namespace

std::span<const DeviceRow> devices() { return kDevices; }

const DeviceRow* find_device(const std::string& name) {
  for (const DeviceRow& row : kDevices)
    if (name == row.name) return &row;
  return nullptr;
}

Dtype find_dtype(const std::string& name) {
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::int8, Dtype::int4})
    if (name == dtype_name(dtype)) return dtype;
  XPYD_CHECK(false, name);  // the options' table has no other
  return {};
}

Result<std::shared_ptr<const Weights>> load_host_weights(const Stack& stack) {
  ThreadTeam loaders(std::max(1, int(std::thread::hardware_concurrency())));
  return load_weights(stack.model_dir, stack.config, stack.backend_options.load, loaders);
}

}  // namespace xpyd
