// The cluster: instances as threads of this process, and the conductor that places requests on them.
//
// Thread safety: the Service calls from any thread.
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
#include "disagg/transport/fault.h"
#include "disagg/transport/handoff/handoff_pool.h"

namespace xpyd::disagg {

// "1P1D", "2P3D", "1C", "2C1P1D" -> roles, C first, then P, then D. P without D, or D without P, is an error.
Result<std::vector<Role>> parse_topology(const std::string& text, int most = 64);  // of each letter

struct ClusterOptions : ConductorOptions {
  std::vector<Role> topology;
  const KvScheme* kv_scheme = nullptr;
  KvOptions kv;                        // of one instance; a shared pool has pool_bytes times the number of instances
  int prefill_tp = 1, prefill_pp = 1;  // ranks of a prefill or colocated instance
  int decode_tp = 1, decode_pp = 1;    // … of a decode instance
  int pipeline_window = 0;             // waves under way on several stages; 0: two for each
  std::optional<ranks::HeadOptions> ranks;  // several stages are processes; nothing: threads
  KvShards shards(Role role) const {
    const bool decode = role == Role::decode;
    return {.n_layers = kv.shape.n_layers,
            .n_kv_heads = kv.shape.n_kv_heads,
            .tp = decode ? decode_tp : prefill_tp,
            .pp = decode ? decode_pp : prefill_pp};
  }
  const BatchPolicy* batching = nullptr;
  const AdmissionRule* admit = nullptr;  // null: the policy's own
  ChunkOptions chunks;                   // but for what follows from the role's shards
  SpeculationOptions speculation;
  const TransportRow* transport = nullptr;
  KvEventsOptions kv_events;            // an instance adds its number to the rank
  std::optional<FaultOptions> faults;   // of the transport, on purpose
  std::string wire_host = "127.0.0.1";  // where wires that listen do
  std::vector<std::string> nics;        // rdma: TransportOptions
  bool kv_checksum = false;             // of all KV that crosses
  int max_batch = 64;                   // sequences per instance
  int vocab = INT_MAX;                  // token ids
  bool ahead = true;                    // engines plan a step while the model computes the one before, where it can
  bool kv_by_layer = true;              // EngineOptions::by_layer
  std::vector<int> eos_tokens;
  const Tokenizer* tokenizer = nullptr;  // may be null
  Device* device = &cpu_device();
  // Cores of each instance of the topology, on which it computes and whose NUMA node its memory is of; empty: any.
  std::vector<std::vector<int>> cpus;
  // One model per instance, of its role's shards(); `instance` counts from 0. Its work goes to `queue`, of `device`.
  std::function<Result<std::unique_ptr<Model>>(int instance, DeviceQueue& queue)> make_model;
  // FLOP/s that its threads can do, 0 where it is not known; null: of none.
  std::function<double(int instance)> peak_flops;
};

// Sequences that hold KV in one memory at once: those of a batch, and as many prompts that are being sent away.
constexpr int max_sequences(int max_batch) { return 2 * max_batch; }

KvOptions kv_options(const ClusterOptions& options);  // of one instance's memory
ConductorOptions conductor_options(const ClusterOptions& options);
// Whether the instances can draw from one pool, where the wire wants that.
Status check_shared_pool(const ClusterOptions& options, bool processes);
// That of processes; null where the wire wants none.
Result<std::unique_ptr<HandoffPool>> make_handoff_pool(const ClusterOptions& options);
std::string instance_name(Role role, int index);  // "P0"
std::vector<std::string> instance_names(const std::vector<Role>& topology);

// Memory that an instance leaves to the next one of its process, with the prefix cache in it.
struct InstanceMemory {
  Role role = Role::colocated;
  bool local = false;                  // Welcome's
  std::unique_ptr<DeviceQueue> queue;  // its copies go there
  std::shared_ptr<KvPool> pool;        // null: it cannot be left, as others have it too
  std::shared_ptr<KvMemory> memory;
  std::shared_ptr<std::string> name;     // of the instance whose it is now
  std::shared_ptr<PrefixLog> cache_log;  // hears of it; null: not wanted
  std::shared_ptr<KvEvents> events;      // hears of it; null: it tells nobody
};
// An instance, as a thread of this process or in a process of its own. `model_index`: what
// options.make_model is asked for. `pool`: null for one of its own; else of options.kv.n_memories
// instances. `left`: by an instance of the same options that is gone; taken where it is of this role.
// join_pool() is for a process: what Welcome names.
struct BuiltInstance {
  InstanceMemory memory;
  std::unique_ptr<Instance> instance;
};
Result<BuiltInstance> build_instance(const ClusterOptions& options, const Welcome& as, int model_index,
                                     std::shared_ptr<KvPool> pool, Clock& clock, Post& post, InstanceMemory left = {});
Result<JoinedPool> join_pool(const ClusterOptions& options, const Welcome& as);

class Cluster final : public Runtime, private Post {
 public:
  // Allocates and touches all KV memory. The error names the option that cannot be met.
  static Result<std::unique_ptr<Cluster>> create(ClusterOptions options, Clock& clock);
  ~Cluster() override;

  Status start() override;  // starts the threads; not under a virtual clock
  bool turn();              // turns every instance once, on the caller's thread, when not started
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

  uint64_t logits_hash() const override { return conductor_.logits_hash(); }
  void clear_prefix_caches() override;
  const Conductor& conductor() const { return conductor_; }
  const std::vector<std::unique_ptr<Instance>>& instances() const { return instances_; }

 private:
  Cluster(const ClusterOptions& options, Clock& clock);
  void send(InstanceId from, InstanceId to, Message message) override;

  Conductor conductor_;
  std::vector<InstanceMemory> memories_;  // one per instance
  std::vector<std::unique_ptr<Instance>> instances_;
  std::vector<std::vector<int>> cpus_;  // ClusterOptions
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false};
  std::mutex stop_mutex_;
  std::condition_variable stopping_;
};

// An instance of this process, asked directly.
class LocalProbe final : public InstanceProbe {
 public:
  explicit LocalProbe(const Instance& instance) : instance_(instance) {}
  InstanceStats stats() const override { return instance_.stats(); }
  KvStats kv() const override { return instance_.memory().stats(); }
  std::shared_ptr<const BlockMap> block_map() const override { return instance_.block_map(); }
  std::optional<int> promise(std::span<const int32_t> tokens, uint64_t salt) const override {
    return instance_.memory().promise(tokens, salt);
  }
  const std::atomic<uint64_t>* version() const override { return &instance_.published(); }

 private:
  const Instance& instance_;
};

}  // namespace xpyd::disagg
