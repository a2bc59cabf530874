// What an instance says of itself: counters, a map of its blocks, and changes of its prefix cache.
//
// Thread safety: stats(), block_map() and published() from any thread; the rest from the instance's.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "disagg/instance/instance_options.h"
#include "disagg/instance/kv_exchange.h"
#include "disagg/instance/step_costs.h"

namespace xpyd::disagg {

class InstanceStatus {
 public:
  InstanceStatus(const InstanceOptions& options, InstanceParts& parts, const Engine& engine, const KvExchange& kv)
      : options_(options), parts_(parts), engine_(engine), kv_(kv) {
    published_.name = options.name;
  }

  InstanceStats stats() const;
  // Where its blocks are; null: not known yet. It is drawn between two steps, for the next seconds every 0.1 s at most,
  // and in a fiftieth of the time. Where nobody asks, nothing is.
  std::shared_ptr<const BlockMap> block_map() const;
  const std::atomic<uint64_t>& published() const { return count_; }  // times that stats() have changed

  // Before a step: what others than the engine hold now they have until the next turn.
  void charge_transfers();
  void saw(const StepCosts::Took& took);  // of the step: how well it was predicted
  // After a step: the changes of the prefix cache go to the conductor, if it is time.
  void report_cache();
  void publish(const StepCost::Terms& cost);
  void draw_map();
  // True: it is idle, and was not at the last call. The conductor hears then that the last answer's KV is not held any
  // more.
  bool became_idle(bool idle) { return !std::exchange(idle_, idle) && idle; }

 private:
  const InstanceOptions& options_;
  InstanceParts& parts_;
  const Engine& engine_;
  const KvExchange& kv_;
  double transfer_block_s_ = 0, charged_s_ = 0;  // Spent::transfer_gb_s, until then (Clock)
  size_t moving_blocks_ = 0;                     // … and since
  bool idle_ = true;
  double reported_s_ = 0;  // Clock: the last CacheReport
  double next_map_s_ = 0;  // Clock: not before

  mutable std::mutex mutex_;  // guards the next two
  InstanceStats published_;
  std::shared_ptr<const BlockMap> map_;
  std::atomic<uint64_t> count_{0};
  mutable std::atomic<double> watched_until_s_{0};  // Clock; 0: nobody looks at the map
};

}  // namespace xpyd::disagg
