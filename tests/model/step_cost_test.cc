#include "model/step_cost.h"

#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing::step_cost_test {
namespace {

TEST_CASE("step cost: a prompt's steps together are its chunks' steps", "[cost]") {
  const StepCost cost(StepCost::Terms{1e-3, 3e-5, 2e-8, 1.5e-10, 2e-5, 3e-8});
  for (auto [tokens, cached, chunk] :
       {std::tuple{5000, 0, 512}, {5000, 3000, 512}, {512, 0, 512}, {513, 7, 512}, {1, 0, 512}}) {
    double sum = 0;
    for (int done = 0; done < tokens; done += chunk) {
      StepShape step;
      step.add_prompt(std::min(chunk, tokens - done), cached + done);
      sum += cost.seconds(step);
    }
    CHECK(cost.seconds(prompt_steps(tokens, cached, chunk)) == Approx(sum));
  }
}

// Steps of a machine with other terms than the prior's, off by up to 5 %.
struct Machine {
  StepCost::Terms truth = {8e-4, 33e-6, 1e-8, 1.7e-10, 2e-5, 3e-8};
  StepCost real{truth};
  Random random{1};
  StepShape step() {
    StepShape s;
    if (random.uniform() < 0.5) s.add_prompt(1 + double(random.below(2048)), double(random.below(30000)));
    const double n = double(random.below(64));
    s.add_decodes(n, n * double(random.below(20000)));
    return s;
  }
  double seconds(const StepShape& s) { return real.seconds(s) * (0.95 + 0.1 * random.uniform()); }
};

TEST_CASE("step cost: steps correct a prior that is off by a factor of three", "[cost]") {
  Machine machine;
  StepCost cost(StepCost::Terms{2.4e-3, 11e-6, 3e-9, 0.6e-10, 6e-5, 1e-7});
  PredictionError before, after;
  for (int i = 0; i < 4000; ++i) {
    const StepShape s = machine.step();
    const double seconds = machine.seconds(s);
    (i < 10 ? before : after).add(cost.seconds(s), i >= 10 && i < 1000 ? cost.seconds(s) : seconds);
    cost.saw(s, seconds);
  }
  CHECK(before.mape() > 0.3);
  CHECK(after.mape() < 0.03);                        // the noise itself is 2.5 % in the mean
  for (size_t i = 0; i < machine.truth.size(); ++i)  // gamma is less than 1 % of any step, and drowns
    if (i != 2) CHECK(cost.terms()[i] == Approx(machine.truth[i]).epsilon(0.1));
}

TEST_CASE("step cost: what no step has said stays the prior's, and nothing becomes negative", "[cost]") {
  const StepCost::Terms prior = {1e-3, 3e-5, 2e-8, 1.5e-10, 2e-5, 3e-8};
  StepCost cost(prior);
  for (int i = 0; i < 500; ++i) cost.saw({.decodes = 8, .decode_context = 8000}, 1e-4);  // far less than the prior's c
  CHECK(cost.terms()[1] == prior[1]);
  CHECK(cost.terms()[3] == prior[3]);
  CHECK(cost.seconds({.decodes = 8, .decode_context = 8000}) == Approx(1e-4).epsilon(0.02));
  for (double term : cost.terms()) CHECK(term >= 0);
  cost.saw({.decodes = 8}, 0);  // a clock that stood says nothing
  CHECK(cost.steps_seen() == 500);
}

TEST_CASE("step cost: of equal steps it says the mean, whatever their spread", "[cost]") {
  StepCost cost;
  const StepShape s = {.decodes = 8, .decode_context = 8000};
  for (int i = 0; i < 1000; ++i) cost.saw(s, i % 2 ? 1e-3 : 3e-3);
  CHECK(cost.seconds(s) == Approx(2e-3).epsilon(0.05));  // relative to what was seen, it would be 1.2 ms
}

TEST_CASE("step cost: it follows a machine that becomes slower", "[cost]") {
  Machine machine;
  StepCost cost(machine.truth);
  for (int i = 0; i < 3000; ++i) {
    const StepShape s = machine.step();
    cost.saw(s, 2 * machine.seconds(s));
  }
  const StepShape s = machine.step();
  CHECK(cost.seconds(s) == Approx(2 * machine.real.seconds(s)).epsilon(0.05));
}

}  // namespace
}  // namespace xpyd::testing::step_cost_test
