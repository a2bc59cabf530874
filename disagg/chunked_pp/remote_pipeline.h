// The head of an instance whose stages are processes (stage.h): a Model for its engine, as model/llama/pipeline.h is
// over threads. It tells all stages of a wave at once and computes nothing; activations go from stage to stage, logits
// from the last one here. The KV of each rank is memory of its stage's process, which this one maps, too, on one host:
// block copies, checksums and the instance's wire work on it as on memory of their own.
//
// A stage that ends, falls silent, or cannot go on ends the whole instance: `broken` is told once, and must keep from
// others what the instance says from then on, because waves under way now end as they are.
//
// Thread safety: as Model says; channels have a thread of their own, on which `broken` may be called.
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
#include "disagg/transport/fault.h"

namespace xpyd::disagg::ranks {

// Processes that this one has started for one life of an instance. Ended with their owner.
class Processes {
 public:
  virtual ~Processes() = default;
  virtual Status run() = 0;  // all of them do; the error says who has ended
};

struct HeadOptions {
  std::string listen = "unix:@";  // "unix:@": a name of its own, for each life
  bool far = false;               // stages are on other hosts, which share no memory with this one
  ClusterKey key;
  uint64_t fingerprint = 0;
  // Starts them, to join at the address; without, or where it returns null, they come by themselves.
  std::function<Result<std::unique_ptr<Processes>>(const std::string& address, int stages)> start;
  double silence_s = 3;  // ChannelLimits
  ModelConfig config;
  Dtype dtype = Dtype::f32;
  std::function<bool()> given_up;  // asked while stages are waited for
  std::function<void(const std::string& why)> broken;

  // build_instance()'s:
  int32_t instance = 0;
  int window = 0;  // ShardOptions
  int step_tokens = 0, max_logits = 0;
  bool checksum = false;
  const TransportRow* transport = nullptr;
  std::string transport_host;
};

class RemotePipeline final : public Model {
 public:
  // Waits until all stages serve. Errors: `unavailable`, the same may succeed later; others, it may not.
  static Result<std::unique_ptr<RemotePipeline>> make(HeadOptions options, const PoolPlan& plan, Clock& clock);
  ~RemotePipeline() override;

  // [n_ranks]. Of stages that are far: addresses with nothing behind them, for far_kv.h.
  const std::vector<std::shared_ptr<std::byte>>& kv_memory() const { return kv_memory_; }
  bool far() const { return options_.far; }
  struct KvAddress {
    int stage, rank;  // of its tensor ranks
    uint64_t at;      // in that rank's memory
  };
  KvAddress find(const std::byte* address) const;  // before: inside of kv_memory()
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
  xpyd::Work work(const StepInput& step) const override;
  size_t weight_bytes() const override { return weight_bytes_; }
  size_t scratch_bytes() const override { return scratch_bytes_; }

 private:
  struct UnderWay {
    bool watched = false;
    std::atomic<int> layers{0}, done{0};  // stages
    std::vector<double> seconds;          // [pp]
    float* logits = nullptr;
    size_t n_logits = 0;  // rows
  };
  struct StageEnd {
    ChannelPtr channel;
    std::string address;                   // of its wire; empty: it is not ready
    std::vector<RemoteKey> registrations;  // [places]
    bool connected = false;
    uint32_t next_done = 0;  // the wave that it ends next: the channels' thread's
  };

  RemotePipeline(HeadOptions options, const PoolPlan& plan, Clock& clock);
  Status set_up(const PoolPlan& plan);
  template <class There>
  Status wait_for(const char* what, There there);
  ChannelEvents on_open(const ChannelPtr& channel);
  Status on_frame(int stage, uint16_t type, std::string_view bytes);
  Status on_ready(int stage, const Ready& ready);
  Status on_progress(int stage, const Progress& made);
  void break_up(const std::string& why);
  bool is_under_way(int stage, uint32_t wave) const;
  bool is_broken() const { return broken_.load(std::memory_order_acquire); }
  UnderWay& wave_of(uint32_t number) { return waves_[number % places_]; }
  const UnderWay& wave_of(uint32_t number) const { return waves_[number % places_]; }

  const HeadOptions options_;
  Clock& clock_;
  const KvShards shards_;
  const int window_;
  const uint32_t places_;         // a power of two: numbers of waves begin anew after 2^32
  std::vector<UnderWay> waves_;   // [places]
  std::optional<BoundaryIn> in_;  // logits
  std::unique_ptr<KvTransport> transport_;
  std::vector<RemoteKey> registrations_;  // [places]
  Mailbox<KvNews> kv_news_;               // of stages that are far
  std::vector<std::shared_ptr<std::byte>> kv_memory_;
  std::vector<size_t> kv_bytes_;  // [n_ranks]
  size_t weight_bytes_ = 0, scratch_bytes_ = 0;

  std::mutex mutex_;  // guards what follows; stages_ only while they are set up
  std::condition_variable changed_;
  std::vector<StageEnd> stages_;
  std::string failed_;
  bool serves_ = false;  // set up; then broken_
  std::atomic<bool> broken_{false}, closing_{false};

  WaitWord news_;                      // for the engine's thread
  uint32_t begun_ = 0, first_ = 0;     // waves: the engine's thread alone
  std::atomic<uint32_t> said_{0};      // waves that stages have been told of
  uint32_t seen_ = 0;                  // news
  std::vector<double> stage_seconds_;  // [pp]
  std::unique_ptr<Processes> processes_;
  std::unique_ptr<ControlLoop> loop_;  // last: its thread ends first
};

}  // namespace xpyd::disagg::ranks
