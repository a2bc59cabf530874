// What an instance's steps cost: a line that is fitted to them (model/cost/step_cost.h), which the engine's chunk
// policy is told, and by which a prefix in a tier is loaded or computed.
//
// Thread safety: the instance's thread.
#pragma once

#include <optional>

#include "batch/engine/engine.h"
#include "disagg/instance/instance_options.h"

namespace xpyd::disagg {

class StepCosts {
 public:
  StepCosts(const InstanceOptions& options, Engine& engine, Clock& clock);

  struct Took {
    StepShape step;
    double seconds, predicted_s;
    double end_s;  // Clock
  };
  // Requires: it is called once in each turn. Returns what the turn's step took, if it had one.
  std::optional<Took> turn();
  // The last turn moved, and the next one follows it at once.
  void back_to_back(bool moved) { back_to_back_ = moved; }
  // KvLoader::Worth. A load waits behind loads, and what is computed in its place behind what was: link and processor
  // work beside each other.
  bool loads(int from, int to, int tokens, double load_s);
  StepCost::Terms terms() const { return cost_.terms(); }

 private:
  const InstanceOptions& options_;
  Engine& engine_;
  Clock& clock_;
  StepCost cost_;
  EngineStats counted_;          // that cost_ has seen
  double fitted_s_ = 0;          // when it did, if the last turn had a step
  double computed_until_s_ = 0;  // what loads() has refused
  bool back_to_back_ = false;
};

}  // namespace xpyd::disagg
