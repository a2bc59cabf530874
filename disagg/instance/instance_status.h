// InstanceStatus publishes an instance's state: counters, and the changes of its prefix cache.
//
// Thread safety: any thread may call stats() and published(); the rest is for the instance's thread.
#pragma once

#include <atomic>
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
  const std::atomic<uint64_t>& published() const { return count_; }  // counts the changes of stats()

  // Before a step: charges the KV held outside the engine, which stays charged until the next call.
  void charge_transfers();
  void saw(const StepCosts::Took& took);  // records how well the step was predicted
  // After a step: sends the changes of the prefix cache to the conductor, if a report is due.
  void report_cache();
  void publish(const StepCost::Terms& cost);
  // Returns true if the instance is idle and was not at the last call. The conductor then gets a report, which shows
  // that the last answer's KV is free.
  bool became_idle(bool idle) { return !std::exchange(idle_, idle) && idle; }

 private:
  const InstanceOptions& options_;
  InstanceParts& parts_;
  const Engine& engine_;
  const KvExchange& kv_;
  double transfer_block_s_ = 0, charged_s_ = 0;  // block seconds, up to then (Clock)
  size_t moving_blocks_ = 0;                     // blocks charged since then
  bool idle_ = true;
  double reported_s_ = 0;  // Clock: the last CacheReport

  mutable std::mutex mutex_;  // guards the next one
  InstanceStats published_;
  std::atomic<uint64_t> count_{0};
};

}  // namespace xpyd::disagg
