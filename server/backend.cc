#include <algorithm>
#include <thread>
#include <vector>

#include "base/peak/peak.h"
#include "base/table.h"
#include "server/build.h"

namespace xpyd::server {
namespace {

#ifndef XPYD_CUDA
Error no_cuda() {
  return {ErrorCode::unavailable,
          "--device cuda: this build has no CUDA support; it is compiled in if nvcc (12.4 to 13) and a card are found, "
          "or by `make cuda`"};
}
Result<std::unique_ptr<Backend>> open_no_cuda(const Build&) { return no_cuda(); }
Result<DevicePeak> peak_of_no_cuda() { return no_cuda(); }
#endif

// ---- The CPU: a team of threads per instance over one copy of the weights.

// Threads of an instance: a team, or one team per rank.
int total_threads(const ShardOptions& o) { return o.shards.n_ranks() * o.threads_per_rank; }

class CpuBackend final : public Backend {
 public:
  CpuBackend(const Build& build, std::shared_ptr<const Weights> weights, std::vector<ShardOptions> instances)
      : weights_(std::move(weights)),
        max_step_tokens_(build.max_step_tokens()),
        max_batch_(build.options.max_batch),
        kernels_(build.backend_options.kernels),
        instances_(std::move(instances)) {
    for (const ShardOptions& o : instances_)
      teams_.push_back(o.shards.n_ranks() == 1 ? std::make_unique<ThreadTeam>(o.threads_per_rank) : nullptr);
    ThreadTeam one(1);
    flops_of_thread_ = 1e9 * PeakProbe(0).fma_gflops(one);  // about 10 ms
  }
  Device& device() override { return cpu_device(); }
  Result<std::unique_ptr<Model>> make_model(int instance, DeviceQueue&) override {
    const ShardOptions& o = instances_[size_t(instance)];
    if (o.shards.n_ranks() > 1) return make_sharded_llama(weights_, o, max_step_tokens_, max_batch_, kernels_);
    return make_llama(weights_, *teams_[size_t(instance)], max_step_tokens_, max_batch_, kernels_);
  }
  double peak_flops(int instance) const override {
    return flops_of_thread_ * total_threads(instances_[size_t(instance)]);
  }

 private:
  std::shared_ptr<const Weights> weights_;
  int max_step_tokens_, max_batch_;
  Kernels kernels_;
  std::vector<ShardOptions> instances_;
  double flops_of_thread_;                          // measured
  std::vector<std::unique_ptr<ThreadTeam>> teams_;  // of instances with one rank
};

// ---- The rows.

constexpr DeviceRow kDevices[] = {
    {"cpu", open_cpu_backend, nullptr, 64 << 10},
#ifdef XPYD_CUDA
    {"cuda", open_cuda_backend, cuda_device_peak, 2 << 20},
#else
    {"cuda", open_no_cuda, peak_of_no_cuda, 2 << 20},
#endif
};

}  // namespace

std::span<const DeviceRow> devices() { return kDevices; }

const DeviceRow* find_device(const std::string& name) { return find_row(kDevices, name); }

Dtype find_dtype(const std::string& name) {
  for (int i = 0; i <= int(kLastDtype); ++i)
    if (name == dtype_name(Dtype(i))) return Dtype(i);
  XPYD_CHECK(false, name);  // the options table has no other names
  return {};
}

Result<std::shared_ptr<const Weights>> load_host_weights(const Build& build) {
  ThreadTeam loaders(std::max(1, int(std::thread::hardware_concurrency())));
  return load_weights(build.model_dir, build.config, build.backend_options.load, loaders);
}

Result<std::unique_ptr<Backend>> open_cpu_backend(const Build& build) try {
  const std::vector<Role>& instances = build.options.topology;
  const int cores = std::max(1, int(std::thread::hardware_concurrency()));
  int threads = build.backend_options.threads;
  if (threads == 0) threads = std::max(1, cores / int(instances.size()));
  // Ranks share an instance's threads; each has at least one.
  std::vector<ShardOptions> of_instances;
  for (Role role : instances) {
    const KvShards shards = build.options.shards(role);
    of_instances.push_back({.shards = shards,
                            .threads_per_rank = std::max(1, threads / shards.n_ranks()),
                            .window = build.options.pipeline_window,
                            .whole_experts = build.backend_options.whole_experts(role)});
  }
  return std::unique_ptr<Backend>(
      std::make_unique<CpuBackend>(build, need(load_host_weights(build)), std::move(of_instances)));
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::server
