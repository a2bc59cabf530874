// A stage of an instance as a process of its own: joins the instance's head, loads its layers, allocates their KV, and
// computes the waves that the head tells of, in order, each when its activations have come from the stage before.
// What it computes with are the threads' StageRanks (model/llama/llama_rank.h): tensor ranks of a stage share its
// process.
//
// Threads: run() is the caller's, which is tensor rank 0 and the wire's; a thread for each other rank; the channel's.
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
#include "disagg/transport/fault.h"
#include "model/llama/llama_rank.h"

namespace xpyd::disagg::ranks {

inline constexpr int kSlots = 2;  // residual streams, or logits, of a stage that wait until they have left

struct StageOptions {
  int stage = 0;
  std::string join;                        // the head's address; or
  std::function<std::string()> find_head;  // where it is now; empty: nowhere
  ClusterKey key;
  uint64_t fingerprint = 0;             // NodeIdentity
  double retry_s = 0.2, give_up_s = 0;  // WorkerOptions
  double silence_s = 3;                 // ChannelLimits
  ModelConfig config;
  Dtype dtype = Dtype::f32;
  std::string transport_host = "127.0.0.1";
  std::optional<FaultOptions> faults;  // of the activations' wire, on purpose
  struct Built {
    std::unique_ptr<StageRanks> ranks;
    size_t weight_bytes = 0;
  };
  // For steps of so many tokens; keeps two residual streams.
  std::function<Result<Built>(const KvShards& shards, int stage, int step_tokens)> make_ranks;
};

// Whether these arrays are a step of this model on blocks that are there: they come from another process.
Status check_wave(const Wave& wave, const Start& start, const ModelConfig& config);

class Stage {
 public:
  Stage(StageOptions options, Clock& clock) : options_(std::move(options)), clock_(clock) {}
  // Serves one life of an instance after the other. Until stop(), or without a head for give_up_s.
  Status run();
  void stop();  // any thread

 private:
  struct Frame {
    uint16_t type;
    std::string bytes;
  };
  struct Parts;
  Status serve();
  void set_up(Parts& p);
  void copy(const Parts& p, const Copies& copies);
  Status compute(Parts& p, const Wave& wave);
  template <class T>
  T expect();
  Frame next(std::function<bool()> is_busy = nullptr);
  template <class Done>
  void wait_until(Done done);
  bool over();

  const StageOptions options_;
  Clock& clock_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Frame> inbox_;
  bool stopped_ = false, served_ = false;
  std::optional<std::string> closed_;       // why
  std::atomic<KvPoster*> poster_{nullptr};  // of the channel's thread
};

}  // namespace xpyd::disagg::ranks
