// The head of an instance whose pipeline stages are processes (stage.h). To its engine it is a Model, as
// model/llama/pipeline.h is for stages that are threads. It sends each wave to all stages at once and computes nothing.
// Activations go from stage to stage, and logits from the last stage to the head. The KV of a rank is memory of its
// stage's process. On one host the head maps it too, so block copies and the instance's transport work on it
// as on local memory.
//
// A stage that ends, is silent, or cannot go on ends the whole instance. `broken` is then called once. It must keep
// other instances from hearing this one, because waves in flight now end with wrong results.
//
// Thread safety: as Model. The channels' I/O thread or the engine's thread calls `broken`.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "allocator/schemes.h"
#include "base/mailbox.h"
#include "base/wait_word.h"
#include "disagg/chunked_pp/boundary.h"
#include "disagg/chunked_pp/messages.h"
#include "disagg/net/channel.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg::ranks {

// The stage processes that the head has started for one instance. The destructor ends them.
class Processes {
 public:
  virtual ~Processes() = default;
  virtual Status run() = 0;  // ok while all of them run; the error names the one that has ended
};

struct HeadOptions {
  std::string listen = "unix:@";  // "unix:@": a new random name for each instance
  bool far = false;               // the stages are on other hosts and share no memory with the head
  ClusterKey key;
  uint64_t fingerprint = 0;
  // Starts the stages, which then join at `address`. If it is not set or returns null, somebody else starts them.
  std::function<Result<std::unique_ptr<Processes>>(const std::string& address, int stages)> start;
  double silence_s = 3;  // ChannelLimits::silence_timeout_s
  ModelConfig config;
  Dtype dtype = Dtype::f32;
  std::function<bool()> given_up;  // true ends the wait for stages
  std::function<void(const std::string& why)> broken;

  // build_instance() sets these:
  int32_t instance = 0;
  int window = 0;  // ShardOptions::window: most waves in flight
  int step_tokens = 0, max_logits = 0;
  const TransportRow* transport = nullptr;
  std::string transport_host;
};

class RemotePipeline final : public Model {
 public:
  // Waits until all stages serve. Error `unavailable`: another try may succeed. Other errors are final.
  static Result<std::unique_ptr<RemotePipeline>> make(HeadOptions options, const PoolPlan& plan, Clock& clock);
  ~RemotePipeline() override;

  // [n_ranks]. For stages on other hosts: reserved addresses without memory, which far_kv.h translates.
  const std::vector<std::shared_ptr<std::byte>>& kv_memory() const { return kv_memory_; }
  bool far() const { return options_.far; }
  struct KvAddress {
    int stage, rank;  // rank: tensor-parallel rank in the stage
    uint64_t at;      // offset in that rank's memory
  };
  KvAddress find(const std::byte* address) const;  // Requires: `address` is inside kv_memory()
  template <class T>
  bool tell(int stage, const T& message) {
    return say_to(stages_[size_t(stage)].channel, message);
  }
  struct KvNews {
    int stage;
    Outcome what;
  };
  Mailbox<KvNews>& kv_news() { return kv_news_; }

  const ModelConfig& config() const override { return options_.config; }
  int window() const override { return window_; }
  int stages() const override { return shards_.pp; }
  void begin(const StepInput& step, std::span<const Draw> draws, float* logits) override;
  bool wait() override;
  bool ended() const override { return first_ != begun_ && (is_broken() || wave_of(first_).done.load() == shards_.pp); }
  void interrupt() override { news_.add(1); }
  int layers_written(int wave) const override { return wave_of(first_ + uint32_t(wave)).layers.load(); }
  void end(Chosen* chosen) override;
  std::span<const double> stage_seconds() const override { return stage_seconds_; }
  ExpertLoad expert_load() const override;
  xpyd::Work work(const StepInput& step) const override;

 private:
  struct UnderWay {
    bool watched = false;
    std::atomic<int> layers{0}, done{0};  // layers whose KV is written; stages that are done
    std::vector<double> seconds;          // [pp]
    float* logits = nullptr;
    size_t n_logits = 0;  // rows
  };
  struct StageEnd {
    ChannelPtr channel;
    std::string address;                   // of its transport; empty: the stage is not ready
    std::optional<Connected> connected;
    ExpertLoad experts;
  };

  RemotePipeline(HeadOptions options, const PoolPlan& plan, Clock& clock);
  Status set_up(const PoolPlan& plan);
  template <class There>
  Status wait_for(const char* what, There there);
  ChannelEvents on_open(const ChannelPtr& channel);
  Status on_frame(int stage, uint16_t type, std::string_view bytes);
  Status on_ready(int stage, const Ready& ready);
  void on_progress(int stage, const Progress& made);
  void break_up(const std::string& why);
  bool is_broken() const { return broken_.load(std::memory_order_acquire); }
  UnderWay& wave_of(uint32_t number) { return waves_[number % places_]; }
  const UnderWay& wave_of(uint32_t number) const { return waves_[number % places_]; }

  const HeadOptions options_;
  Clock& clock_;
  const KvShards shards_;
  const int window_;
  const uint32_t places_;         // a power of two, because wave numbers wrap at 2^32
  std::vector<UnderWay> waves_;   // [places]
  std::optional<BoundaryIn> in_;  // takes the logits
  std::unique_ptr<KvTransport> transport_;
  std::vector<RemoteKey> registrations_;  // [places]
  Mailbox<KvNews> kv_news_;               // from stages on other hosts
  std::vector<std::shared_ptr<std::byte>> kv_memory_;
  std::vector<size_t> kv_bytes_;  // [n_ranks]

  mutable std::mutex mutex_;  // guards the members up to serves_; stages_, but for their experts, only during set_up()
  std::condition_variable changed_;
  std::vector<StageEnd> stages_;
  std::string failed_;
  bool serves_ = false;  // set_up() has succeeded; a later failure sets broken_
  std::atomic<bool> broken_{false}, closing_{false};

  WaitWord news_;                      // wakes the engine's thread
  uint32_t begun_ = 0, first_ = 0;     // numbers of waves; only the engine's thread uses them
  uint32_t seen_ = 0;                  // value of news_ at the last wait()
  std::vector<double> stage_seconds_;  // [pp]
  std::unique_ptr<Processes> processes_;
  std::unique_ptr<ControlLoop> loop_;  // last: its thread ends first
};

}  // namespace xpyd::disagg::ranks
