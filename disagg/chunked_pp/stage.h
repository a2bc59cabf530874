// A pipeline stage of an instance as a process of its own. It joins the instance's head, loads its layers and allocates
// their KV. It computes the head's waves in order, each when its activations have arrived from the stage before. It
// uses the same StageRanks (model/llama/llama_rank.h) as stages that are threads. The tensor-parallel ranks of a stage
// are threads of its process.
//
// Threads: the caller of run() is rank 0 and uses the activations' transport; each other rank has a thread; so has the
// channel. Thread safety: any thread may call stop().
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "disagg/chunked_pp/boundary.h"
#include "disagg/chunked_pp/far_kv.h"
#include "disagg/chunked_pp/messages.h"
#include "disagg/net/channel.h"
#include "model/llama/llama_rank.h"

namespace xpyd::disagg::ranks {

inline constexpr int kSlots = 2;  // buffers of a stage for residual streams or logits that are computed or leave

struct StageOptions {
  int stage = 0;
  std::string join;                        // the head's address, if find_head is not set
  std::function<std::string()> find_head;  // returns the head's current address, "" if there is none
  ClusterKey key;
  uint64_t fingerprint = 0;             // NodeIdentity::fingerprint
  double retry_s = 0.2, give_up_s = 0;  // as in WorkerOptions
  double silence_s = 3;                 // ChannelLimits::silence_timeout_s
  ModelConfig config;
  Dtype dtype = Dtype::f32;
  std::string transport_host = "127.0.0.1";
  // Makes the stage's ranks, for steps of at most step_tokens tokens and with kSlots residual streams.
  std::function<Result<std::unique_ptr<StageRanks>>(const KvShards& shards, int stage, int step_tokens)> make_ranks;
};

class Stage {
 public:
  Stage(StageOptions options, Clock& clock) : options_(std::move(options)), clock_(clock) {}
  // Serves the head's instances, one after the other. Returns after stop(), after give_up_s without a head, or with an
  // error that another try cannot mend.
  Status run();
  void stop();

 private:
  struct Frame {
    uint16_t type;
    std::string bytes;
  };
  struct Parts;
  Status serve();
  void set_up(Parts& p);
  void copy(const Parts& p, const Copies& copies);
  void compute(Parts& p, const Wave& wave);
  template <class T>
  T expect();
  Frame next(std::function<bool()> is_busy = nullptr);
  template <class Done>
  void wait_until(Done done);
  bool over();

  const StageOptions options_;
  Clock& clock_;
  std::mutex mutex_;  // guards the members up to closed_
  std::condition_variable changed_;
  std::deque<Frame> inbox_;
  bool stopped_ = false, served_ = false;
  std::optional<std::string> closed_;       // why the channel has closed
  std::atomic<KvPoster*> poster_{nullptr};  // only the channel's I/O thread calls it
};

}  // namespace xpyd::disagg::ranks
