// The cost of an instance's steps: a model fitted to measured steps (model/cost/step_cost.h). The engine's chunk policy
// uses it.
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
  // Requires: it is called once in each Instance::turn(). Returns the duration of that call's step, if there was one.
  std::optional<Took> turn();
  // `moved`: the last Instance::turn() did something, so the next one follows without sleep.
  void back_to_back(bool moved) { back_to_back_ = moved; }
  StepCost::Terms terms() const { return cost_.terms(); }

 private:
  const InstanceOptions& options_;
  Engine& engine_;
  Clock& clock_;
  StepCost cost_;
  EngineStats counted_;  // the counters at the last fit
  double fitted_s_ = 0;  // Clock: the last fit; 0: the last turn() had no step
  bool back_to_back_ = false;
};

}  // namespace xpyd::disagg
