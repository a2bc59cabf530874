// Several conductors that do not know of each other, as routers of one simulated cluster, with views that may be stale.
// Requests go to them in turn. A router knows the load that it has placed itself. Events of prefix caches reach a
// router after a delay, or are lost. One router without delay and loss is the conductor alone.
//
// Thread safety: none; the timeline's thread.
#pragma once

#include <memory>
#include <vector>

#include "base/random.h"
#include "disagg/conductor/conductor.h"
#include "experiments/simulate/timeline.h"

namespace xpyd::disagg {

struct RouterOptions {
  int routers = 1;
  double event_delay_s = 0, event_loss = 0;  // for each block stored or removed, at each router
};

class Routers {
 public:
  Routers(const RouterOptions& options, const ConductorOptions& each, Timeline& timeline, MessageBus& bus);

  InstanceId new_id();
  void joined(const InstanceInfo& info, const std::shared_ptr<InstanceProbe>& probe);
  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink);
  void receive(InstanceId from, Message&& message);
  ConductorStats totals() const;  // summed over the routers

 private:
  // Instances see the attempts of all routers, so numbers must not collide: attempt a of router r of n is a n + r
  // there.
  struct Router final : MessageBus {
    Router(Routers& owner, int which, const ConductorOptions& options)
        : all(owner), number(which), random(~options.seed), conductor(options, owner.timeline_.clock, *this) {}
    void send(InstanceId from, InstanceId to, Message message) override;

    Routers& all;
    const int number;
    Random random;
    Conductor conductor;
  };
  void heard(Router& router, InstanceId from, CacheReport report);

  const RouterOptions options_;
  Timeline& timeline_;
  MessageBus& bus_;
  std::vector<std::unique_ptr<Router>> routers_;
  size_t next_ = 0;
};

}  // namespace xpyd::disagg
