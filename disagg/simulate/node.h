// One instance of a simulated cluster: the server's Instance, over a model that computes nothing and takes the seconds
// that a real one takes, by a clock of its own that runs ahead of the cluster's while a step lasts. Steps that are
// alike (Engine::alike) are played at once, and cut short at the step in which something comes.
//
// Thread safety: none; the timeline's thread.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "disagg/cluster.h"
#include "disagg/instance.h"
#include "disagg/simulate/timeline.h"

namespace xpyd::disagg {

// What the engine moves: one layer, four bytes a token. Its own model has this shape.
ModelConfig small_shape();
inline KvShape small_kv() { return kv_shape(small_shape(), Dtype::bf16); }

// An instance's own time, and when its last step began.
struct NodeTime {
  VirtualClock clock;
  double began_s = 0;
};

class Node {
 public:
  // `each_step`: nothing is played at once.
  Node(Timeline& timeline, const StepCost& cost, double message_s, bool each_step)
      : timeline_(timeline), cost_(cost), message_s_(message_s), each_step_(each_step) {}

  DeviceQueue& queue() { return *queue_; }
  NodeTime& time() { return time_; }
  std::unique_ptr<Model> make_model();
  void start(std::unique_ptr<Instance> instance) { instance_ = std::move(instance); }
  Instance& instance() { return *instance_; }
  const Instance& instance() const { return *instance_; }

  // Something has come for it: a turn, as soon as its step ends.
  void wake();
  bool in_turn() const { return in_turn_; }  // then what it says is said by its own clock
  // By `now`.
  Unsaid unsaid(double now) const;

 private:
  struct Said {
    std::vector<double> ends_s;
    int decodes;
  };
  void turn();
  void begin_run();
  void end_run(uint64_t number);
  void plan_end();

  Timeline& timeline_;
  const StepCost cost_;
  const double message_s_;
  const bool each_step_;
  NodeTime time_;
  std::unique_ptr<DeviceQueue> queue_ = make_null_queue();
  static std::unique_ptr<DeviceQueue> make_null_queue();
  std::unique_ptr<Instance> instance_;
  bool planned_ = false, in_turn_ = false;
  StepRun run_;
  std::vector<double> ends_s_;  // of its steps
  uint64_t runs_ = 0;           // plans of an end: the last one counts
  mutable std::deque<Said> said_;
};

// The conductor sees it as it sees a live one; its prefix cache by its reports.
class NodeProbe final : public InstanceProbe {
 public:
  NodeProbe(const Node& node, const Timeline& timeline) : node_(node), timeline_(timeline) {}
  InstanceStats stats() const override { return node_.instance().stats(); }
  KvStats kv() const override { return node_.instance().memory().stats(); }
  std::optional<int> promise(std::span<const int32_t>, uint64_t) const override { return {}; }
  Unsaid unsaid() const override { return node_.unsaid(timeline_.now()); }
  uint64_t version() const override { return node_.instance().published(); }

 private:
  const Node& node_;
  const Timeline& timeline_;
};

}  // namespace xpyd::disagg
