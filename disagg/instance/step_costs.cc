#include "disagg/instance/step_costs.h"

namespace xpyd::disagg {

StepCosts::StepCosts(const InstanceOptions& options, Engine& engine, Clock& clock)
    : options_(options), engine_(engine), clock_(clock), cost_(options.cost) {
  engine_.know_cost(cost_.terms());
}

// For two steps in a row, the second is charged the time between their ends, which includes messages, tokens and
// transfers. For waves the charge is the time of the slowest stage, which is the interval between waves when stages are
// busy.
std::optional<StepCosts::Took> StepCosts::turn() {
  const EngineStats& engine = engine_.stats();
  if (engine.steps == counted_.steps) {
    fitted_s_ = 0;
    return {};
  }
  StepShape step = engine.work;
  step.add(counted_.work, -1);
  const double now = clock_.now();
  const bool from_the_last = back_to_back_ && fitted_s_ > 0 && !engine_.in_waves();
  const double seconds = from_the_last ? now - fitted_s_ : engine.step_seconds - counted_.step_seconds;
  const Took took{step, seconds, cost_.seconds(step), now};
  fitted_s_ = now;
  // The first step is not fitted: it touches memory and loads kernels for the first time.
  if (!options_.cost_known && counted_.steps > 0) {
    cost_.saw(step, seconds);
    engine_.know_cost(cost_.terms());
  }
  counted_ = engine;
  return took;
}

}  // namespace xpyd::disagg
