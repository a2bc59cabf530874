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
Result<std::unique_ptr<Device>> no_cuda_alone() { return no_cuda(); }
#endif

// ---- The CPU: a team of threads per instance over one copy of the weights.

// Threads of one instance: a team, or one team per rank.
struct Threads {
  KvShards shards;
  int of_rank = 1;
  std::vector<int> cpus = {};  // [total()] to pin to, or empty
  int total() const { return shards.n_ranks() * of_rank; }
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(const Build& build, std::shared_ptr<const Weights> weights, std::vector<Threads> threads)
      : weights_(std::move(weights)),
        max_step_tokens_(build.max_step_tokens()),
        max_batch_(build.options.max_batch),
        window_(build.options.pipeline_window),
        kernels_(build.backend_options.kernels),
        threads_(std::move(threads)) {
    for (const Threads& t : threads_)
      teams_.push_back(t.shards.n_ranks() == 1 ? std::make_unique<ThreadTeam>(t.of_rank, t.cpus) : nullptr);
    ThreadTeam one(1);
    flops_of_thread_ = 1e9 * PeakProbe(0).fma_gflops(one);  // about 10 ms
  }
  Device& device() override { return cpu_device(); }
  Result<std::unique_ptr<Model>> make_model(int instance, DeviceQueue&) override {
    const Threads& t = threads_[size_t(instance)];
    if (t.shards.n_ranks() > 1)
      return make_sharded_llama(weights_,
                                {.shards = t.shards, .threads_per_rank = t.of_rank, .cpus = t.cpus, .window = window_},
                                max_step_tokens_, max_batch_, kernels_);
    return make_llama(weights_, *teams_[size_t(instance)], max_step_tokens_, max_batch_, kernels_);
  }
  double peak_flops(int instance) const override { return flops_of_thread_ * threads_[size_t(instance)].total(); }

 private:
  std::shared_ptr<const Weights> weights_;
  int max_step_tokens_, max_batch_, window_;
  Kernels kernels_;
  std::vector<Threads> threads_;
  double flops_of_thread_;                          // measured
  std::vector<std::unique_ptr<ThreadTeam>> teams_;  // of instances with one rank
};

// ---- The rows.

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
  std::vector<Threads> of_instances;
  int total = 0;
  for (size_t i = 0; i < instances.size(); ++i) {
    const KvShards shards = build.options.shards(instances[i]);
    const int n_cpus = build.options.cpus.empty() ? 0 : int(build.options.cpus[i].size());
    Threads& own = of_instances.emplace_back(
        Threads{shards, std::max(1, (n_cpus ? n_cpus : threads) / shards.n_ranks())});
    if (n_cpus && own.total() > n_cpus)
      return invalid("--cpus: " + std::to_string(n_cpus) + " cores for an instance of " +
                     std::to_string(shards.n_ranks()) + " ranks");
    if (n_cpus) own.cpus = build.options.cpus[i];
    for (int t = 0; build.backend_options.pin && !n_cpus && t < own.total(); ++t) own.cpus.push_back(total + t);
    total += own.total();
  }
  if (build.backend_options.pin && total > cores)
    return invalid("--pin on: " + std::to_string(instances.size()) + " instances need " + std::to_string(total) +
                   " threads, but there are only " + std::to_string(cores) + " cores here");
  return std::unique_ptr<Backend>(
      std::make_unique<CpuBackend>(build, need(load_host_weights(build)), std::move(of_instances)));
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::server
