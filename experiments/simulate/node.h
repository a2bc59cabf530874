// One instance of a simulated cluster: the server's Instance, over a model that computes nothing and takes the seconds
// that a real one takes (paced_model.h), by a clock of its own that runs ahead of the cluster's while a step lasts; of
// waves, which are under way while it goes on, it is woken when a stage ends one.
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
  // `version`: another one whenever it has something else to say.
  Node(Timeline& timeline, std::atomic<uint64_t>& version);
  ~Node();

  Device& device() { return *device_; }
  DeviceQueue& queue() { return *queue_; }
  NodeTime& time() { return time_; }
  void start(std::unique_ptr<Instance> instance) { instance_ = std::move(instance); }
  Instance& instance() { return *instance_; }
  const Instance& instance() const { return *instance_; }

  // Something has come for it: a turn, as soon as its step ends.
  void wake();
  // … which begins with this.
  void first(std::function<void()> what) { first_.push_back(std::move(what)), wake(); }
  // These tokens' KV is in its prefix cache from now on; returns how many were not. In its turn.
  int store(std::span<const int32_t> tokens);
  const std::atomic<uint64_t>& version() const { return version_; }
  bool in_turn() const { return in_turn_; }  // then what it says is said by its own clock
  // The integral of the blocks that sequences and transfers hold. What begins or ends with a step does so before it.
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
  double wave_planned_s_ = 0;           // the last wake that a wave's end has got
  double held_ = 0, held_block_s_ = 0;  // blocks since the last turn
};

}  // namespace xpyd::disagg
