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

// Threads of one instance: a team, or one for each rank.
struct Threads {
  int n_ranks = 1, of_rank = 1;
  int first_cpu = 0;
  int total() const { return n_ranks * of_rank; }
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(const BackendOptions& o, std::shared_ptr<const Weights> weights, std::vector<Threads> threads, bool pin)
      : weights_(std::move(weights)),
        max_step_tokens_(o.max_step_tokens),
        max_batch_(o.max_batch),
        shards_(o.shards),
        kernels_{variant(gemm_variants(), o.options.text("gemm")),
                 variant(attention_variants(), o.options.text("attention"))},
        threads_(std::move(threads)),
        pin_(pin) {
    for (const Threads& t : threads_)
      teams_.push_back(t.n_ranks == 1 ? std::make_unique<ThreadTeam>(t.of_rank, cpus(t)) : nullptr);
  }
  Device& device() override { return cpu_device(); }
  Result<std::unique_ptr<Model>> make_model(int instance, DeviceQueue&) override {
    const Threads& t = threads_[size_t(instance)];
    if (t.n_ranks > 1)
      return make_sharded_llama(weights_,
                                {.shards = shards_[size_t(instance)], .threads_per_rank = t.of_rank, .cpus = cpus(t)},
                                max_step_tokens_, max_batch_, kernels_);
    return make_llama(weights_, *teams_[size_t(instance)], max_step_tokens_, max_batch_, kernels_);
  }

 private:
  std::vector<int> cpus(const Threads& t) const {
    std::vector<int> cpus;
    for (int i = 0; pin_ && i < t.total(); ++i) cpus.push_back(t.first_cpu + i);
    return cpus;
  }

  std::shared_ptr<const Weights> weights_;
  int max_step_tokens_, max_batch_;
  std::vector<KvShards> shards_;
  Kernels kernels_;
  std::vector<Threads> threads_;
  bool pin_;
  std::vector<std::unique_ptr<ThreadTeam>> teams_;  // of instances on one rank
};

}  // namespace

Result<std::unique_ptr<Backend>> open_cpu_backend(const BackendOptions& o) {
  int cores = std::max(1, int(std::thread::hardware_concurrency()));
  int threads = int(o.options.integer("threads"));
  if (threads == 0) threads = std::max(1, cores / o.n_instances);
  // Ranks share an instance's threads; each has one at least.
  std::vector<Threads> of_instances;
  int total = 0;
  for (int i = 0; i < o.n_instances; ++i) {
    Threads t;
    t.n_ranks = o.shards.empty() ? 1 : o.shards[size_t(i)].n_ranks();
    t.of_rank = std::max(1, threads / t.n_ranks);
    t.first_cpu = total;
    total += t.total();
    of_instances.push_back(t);
  }
  bool pin = o.options.text("pin") == "on";
  if (pin && total > cores)
    return invalid("--pin on: " + std::to_string(o.n_instances) + " instances need " + std::to_string(total) +
                   " threads, more than the " + std::to_string(cores) + " cores here");
  Result<std::shared_ptr<const Weights>> weights = load_host_weights(o);
  if (!weights) return weights.error();
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(o, weights.value(), std::move(of_instances), pin));
}

}  // namespace xpyd
