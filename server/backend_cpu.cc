// The CPU: a team of threads per instance over one copy of the weights.
#include <algorithm>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "model/gemm.h"
#include "server/backend.h"

namespace xpyd {
namespace {

// The row of that name; null for "auto", which is the machine's default. The options table holds
// names of available rows only.
template <class Variant>
const Variant* variant(std::span<const Variant> rows, const std::string& name) {
  for (const Variant& row : rows) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(const BackendOptions& o, std::shared_ptr<const Weights> weights, int threads, bool pin)
      : weights_(std::move(weights)),
        max_step_tokens_(o.max_step_tokens),
        max_batch_(o.max_batch),
        kernels_{variant(gemm_variants(), o.options.text("gemm")),
                 variant(attention_variants(), o.options.text("attention"))} {
    for (int i = 0; i < o.n_instances; ++i) {
      std::vector<int> cpus;
      for (int t = 0; pin && t < threads; ++t) cpus.push_back(i * threads + t);
      teams_.push_back(std::make_unique<ThreadTeam>(threads, cpus));
    }
  }
  Device& device() override { return cpu_device(); }
  Result<std::unique_ptr<Model>> make_model(int instance, DeviceQueue&) override {
    return make_llama(weights_, *teams_[size_t(instance)], max_step_tokens_, max_batch_, kernels_);
  }

 private:
  std::shared_ptr<const Weights> weights_;
  int max_step_tokens_, max_batch_;
  Kernels kernels_;
  std::vector<std::unique_ptr<ThreadTeam>> teams_;
};

}  // namespace

Result<std::unique_ptr<Backend>> open_cpu_backend(const BackendOptions& o) {
  int cores = std::max(1, int(std::thread::hardware_concurrency()));
  int threads = int(o.options.integer("threads"));
  if (threads == 0) threads = std::max(1, cores / o.n_instances);
  bool pin = o.options.text("pin") == "on";
  if (pin && threads * o.n_instances > cores)
    return invalid("--pin on: " + std::to_string(o.n_instances) + " instances of " +
                   std::to_string(threads) + " threads need more than the " +
                   std::to_string(cores) + " cores here");
  Result<std::shared_ptr<const Weights>> weights = load_host_weights(o);
  if (!weights) return weights.error();
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(o, weights.value(), threads, pin));
}

}  // namespace xpyd
