// Cluster: instances as threads of this process, and the conductor that places requests on them.
//
// Thread safety: any thread may call the functions of Service.
#pragma once

#include <atomic>
#include <climits>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "disagg/chunked_pp/remote_pipeline.h"
#include "disagg/conductor/conductor.h"
#include "disagg/instance/instance.h"
#include "disagg/pool/kv_events.h"
#include "disagg/service.h"

namespace xpyd::disagg {

// Parses "1P1D", "2P3D", "1C" or "2C1P1D" into roles: first C, then P, then D. P without D and D without P are errors.
Result<std::vector<Role>> parse_topology(const std::string& text, int most = 64);  // `most` of each letter

struct ClusterOptions : ConductorOptions {
  std::vector<Role> topology;
  const KvScheme* kv_scheme = nullptr;
  KvOptions kv;                             // of one instance; a shared pool has pool_bytes for each instance
  int prefill_tp = 1, prefill_pp = 1;       // ranks of a prefill or colocated instance
  int decode_tp = 1, decode_pp = 1;         // … of a decode instance
  int pipeline_window = 0;                  // waves in flight on a pipeline; 0: two per stage
  std::optional<ranks::HeadOptions> ranks;  // stages are processes; empty: threads
  KvShards shards(Role role) const {
    const bool decode = role == Role::decode;
    return {.n_layers = kv.shape.n_layers,
            .n_kv_heads = kv.shape.n_kv_heads,
            .tp = decode ? decode_tp : prefill_tp,
            .pp = decode ? decode_pp : prefill_pp};
  }
  const BatchPolicy* batching = nullptr;
  const AdmissionRule* admit = nullptr;  // null: the batching policy's own
  const ChunkPolicy* chunks = nullptr;   // null: fixed
  SpeculationOptions speculation;
  const TransportRow* transport = nullptr;
  KvEventsOptions kv_events;                 // an instance adds its number to `rank`
  std::string transport_host = "127.0.0.1";  // address at which transports listen
  std::vector<std::string> nics;             // rdma: see TransportOptions
  int max_batch = 64;                        // sequences of an instance's batch
  int vocab = INT_MAX;                       // number of token ids
  bool ahead = true;                         // plan a step while the model computes the one before
  std::vector<int> eos_tokens;
  const Tokenizer* tokenizer = nullptr;  // may be null
  Device* device = &cpu_device();
  // Makes the model of instance number `instance` (from 0) for its role's shards(). Its work goes to `queue` of
  // `device`.
  std::function<Result<std::unique_ptr<Model>>(int instance, DeviceQueue& queue)> make_model;
  // Returns the peak FLOP/s of an instance's threads, or 0 if it is unknown; null: unknown for all.
  std::function<double(int instance)> peak_flops;
};

// Returns the most sequences that hold KV in one memory: a batch, and as many prompts that are being sent away.
constexpr int max_sequences(int max_batch) { return 2 * max_batch; }

KvOptions kv_options(const ClusterOptions& options);  // for one instance's memory
ConductorOptions conductor_options(const ClusterOptions& options);
// Returns an error if the transport needs one shared pool and these instances cannot share one.
Status check_shared_pool(const ClusterOptions& options);
std::string instance_name(Role role, int index);  // "P0"
std::vector<std::string> instance_names(const std::vector<Role>& topology);

// Memory that an instance leaves to the next instance of its process, with its prefix cache.
struct InstanceMemory {
  Role role = Role::colocated;
  bool local = false;                  // Welcome::local
  std::unique_ptr<DeviceQueue> queue;  // queue of its copies
  std::shared_ptr<KvPool> pool;        // null: cannot be left, because others share it or stages hold it
  std::shared_ptr<KvMemory> memory;
  std::shared_ptr<std::string> name;     // of the instance that uses it now
  std::shared_ptr<PrefixLog> cache_log;  // gets its changes for CacheReport; null: not wanted
  std::shared_ptr<KvEvents> events;      // publishes its changes; null: not wanted
};
// Builds an instance, for a thread of this process or for a process of its own. `model_index` is the argument of
// options.make_model. `pool` is shared by options.kv.n_memories instances; null: a pool of its own. `left` comes from
// an earlier instance with equal options and is used if the role matches.
struct BuiltInstance {
  InstanceMemory memory;
  std::unique_ptr<Instance> instance;
};
Result<BuiltInstance> build_instance(const ClusterOptions& options, const Welcome& as, int model_index,
                                     std::shared_ptr<KvPool> pool, Clock& clock, MessageBus& bus,
                                     InstanceMemory left = {});

class Cluster final : public Runtime, private MessageBus {
 public:
  // Allocates and touches all KV memory. The error names the option that cannot be met.
  static Result<std::unique_ptr<Cluster>> create(ClusterOptions options, Clock& clock);
  ~Cluster() override;

  Status start() override;  // starts the threads; not for a virtual clock
  bool turn();              // without threads: calls turn() of every instance on this thread
  void drain() override { conductor_.drain(); }
  bool wait_idle(double seconds) override { return conductor_.wait_idle(seconds); }
  void stop() override;

  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) override {
    return conductor_.submit(std::move(request), std::move(sink));
  }
  void abort(uint64_t request_id) override { conductor_.abort(request_id); }
  ServiceStats stats() const override { return conductor_.stats(); }
  ServicePicture picture() const override { return conductor_.picture(); }
  std::string trouble() const override { return conductor_.trouble(); }

  void clear_prefix_caches() override;
  const Conductor& conductor() const { return conductor_; }
  const std::vector<std::unique_ptr<Instance>>& instances() const { return instances_; }

 private:
  Cluster(const ClusterOptions& options, Clock& clock);
  void send(InstanceId from, InstanceId to, Message message) override;

  Conductor conductor_;
  std::vector<InstanceMemory> memories_;  // one for each instance
  std::vector<std::unique_ptr<Instance>> instances_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false};
  std::mutex stop_mutex_;
  std::condition_variable stopping_;
};

// Reads an instance of this process directly.
class LocalProbe final : public InstanceProbe {
 public:
  explicit LocalProbe(const Instance& instance) : instance_(instance) {}
  InstanceStats stats() const override { return instance_.stats(); }
  std::optional<int> matched_tokens(std::span<const int32_t> tokens, uint64_t salt) const override {
    return instance_.memory().matched_tokens(tokens, salt);
  }
  const std::atomic<uint64_t>* version() const override { return &instance_.published(); }

 private:
  const Instance& instance_;
};

}  // namespace xpyd::disagg
