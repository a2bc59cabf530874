// One instance of a simulated cluster: the server's Instance over a paced model (paced_model.h). It has a clock of its
// own, which runs ahead of the cluster's clock while a step lasts. With several waves under way the instance continues
// meanwhile, and is woken when a stage ends a wave.
//
// Thread safety: none; the timeline's thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "disagg/instance/cluster.h"
#include "disagg/instance/instance.h"
#include "experiments/simulate/paced_model.h"
#include "experiments/simulate/timeline.h"

namespace xpyd::disagg {

class Node {
 public:
  // `version` changes whenever the instance may report something new.
  Node(Timeline& timeline, std::atomic<uint64_t>& version);
  ~Node();

  Device& device() { return *device_; }
  DeviceQueue& queue() { return *queue_; }
  NodeTime& time() { return time_; }
  void start(std::unique_ptr<Instance> instance) { instance_ = std::move(instance); }
  Instance& instance() { return *instance_; }
  const Instance& instance() const { return *instance_; }

  // Schedules a turn, as soon as the current step ends. Called when something has arrived for the instance.
  void wake();
  // Like wake(), and the turn begins by calling `what`.
  void first(std::function<void()> what) { first_.push_back(std::move(what)), wake(); }
  // Puts the KV of `tokens` into the prefix cache and returns how many of them were not there. Requires: the instance
  // is in its turn.
  int store(std::span<const int32_t> tokens);
  const std::atomic<uint64_t>& version() const { return version_; }
  bool in_turn() const { return in_turn_; }  // true: its messages carry the time of its own clock
  // The integral over time of the blocks that sequences and transfers hold. Blocks that a step takes or frees count as
  // changed before the step.
  double held_block_s() const { return held_block_s_; }

 private:
  void turn();
  void hold(double seconds);

  Timeline& timeline_;
  std::atomic<uint64_t>& version_;
  NodeTime time_;
  const std::unique_ptr<Device> device_;
  const std::unique_ptr<DeviceQueue> queue_;
  std::vector<std::function<void()>> first_;
  std::unique_ptr<Instance> instance_;
  bool planned_ = false, in_turn_ = false;
  double wave_planned_s_ = 0;           // the last end of a wave for which a wake is scheduled
  double held_ = 0, held_block_s_ = 0;  // blocks held since the last turn, and their integral
};

}  // namespace xpyd::disagg
