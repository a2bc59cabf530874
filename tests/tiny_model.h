// A small dummy model and a cluster around it, for tests that need the whole path and no meaning.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "disagg/instance/cluster.h"
#include "model/config.h"
#include "model/model.h"

namespace xpyd::testing {

// 2 layers (or 4), 4 query heads on 2 KV heads of 8, hidden 32, vocabulary 96, context 512. Made once.
const ModelConfig& tiny_config(int layers = 2);
// Made once for each; quantised rows have 16 inputs to a scale.
std::shared_ptr<const Weights> tiny_weights(int layers = 2, Dtype dtype = Dtype::f32);
// The same shape with experts of 20: "mixtral", 2 of 5; "qwen3_moe", 3 of 9, and a dense MLP in layer 1.
std::shared_ptr<const Weights> tiny_experts(const std::string& family, int layers = 2, Dtype dtype = Dtype::f32);

// The settings of one run. Only the model, its dtypes and `exact` may change the logits.
struct TinySetup {
  int layers = 2;
  std::string family = "llama";  // or one of tiny_experts()
  std::string topology = "1C", scheme = "paged", batching = "chunked", placement = "least_loaded", transport = "local";
  std::string disagg = "prefill_first";
  DisaggOptions disagg_options;
  KvOrder order = KvOrder::layer_major;
  Dtype kv_dtype = Dtype::f32, weight_dtype = Dtype::f32;
  bool exact = false;
  StreamKv stream_kv = StreamKv::layer;
  bool reserve_blocks = false;
  int decode_copies = 1;
  int block_tokens = 16;
  size_t page_group_bytes = 4096;
  bool prefix_cache = true, radix = false;
  KvShare share = KvShare::off;
  int step_tokens = 512;
  std::string chunk_policy = "fixed";
  SpeculationOptions speculation = {};
  int threads = 1;
  // Ranks of prefill and colocated instances, and of decode instances.
  int prefill_tp = 1, prefill_pp = 1, decode_tp = 1, decode_pp = 1;
  bool prefill_whole = false, decode_whole = false;  // whole experts on their tensor ranks
  int window = 0;                                    // waves of several stages
  int max_batch = 16;
  size_t pool_bytes = 1 << 20;
  bool ahead = true;
  OffloadOptions tiers;
  std::string admission = "none", fetch = "never";
  Objectives objectives = {};
  std::shared_ptr<EventLog> log = {};
  // Another device than the CPU, and the tiny model on it.
  Device* device = &cpu_device();
  std::function<Result<std::unique_ptr<Model>>(const TinySetup&, DeviceQueue&)> make_model;
  std::string describe() const;
};

// Collects the events of any number of requests.
class Recorder final : public EventSink {
 public:
  struct Choice {
    std::vector<int32_t> tokens;
    FinishReason finish = FinishReason::none;
    int ends = 0;  // events with finish != none
    uint64_t logits_hash = 0;
    int cached_tokens = 0;
    std::string error;
  };
  void on_event(TokenEvent event) override;
  Choice choice(uint64_t request, int index = 0) const;
  int ended() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<uint64_t, int>, Choice> choices_;
};

class TinyCluster {
 public:
  explicit TinyCluster(const TinySetup& setup,
                       Result<std::unique_ptr<KvTransport>> (*transport)(const TransportOptions&) = nullptr);
  // Submits one request, whose events go to `recorder`.
  Status submit(std::shared_ptr<const Request> request);
  // Turns all instances on this thread until nothing moves.
  void run();

  RealClock clock;
  std::vector<std::unique_ptr<ThreadTeam>> teams;
  TransportRow transport_row;
  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>();
  std::unique_ptr<Cluster> cluster;
};

std::shared_ptr<Request> tiny_request(uint64_t id, std::vector<int32_t> prompt, int max_tokens);
// Ragged prompts, some with a common beginning; lengths around the edges of blocks and tiles.
std::vector<std::vector<int32_t>> ragged_prompts();

// Runs those prompts through a cluster of this kind, six greedy tokens each. Requires that each one ends and that the
// memories' invariants hold.
struct RaggedRun {
  uint64_t hash = 0;       // of all logits
  int64_t hit_tokens = 0;  // of prompts, found in a prefix cache
  int64_t draft_tokens = 0, accepted_tokens = 0;
  std::vector<std::vector<int32_t>> tokens;
};
RaggedRun run_ragged(const TinySetup& setup);

}  // namespace xpyd::testing
