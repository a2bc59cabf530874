#include "disagg/conductor/admission.h"

#include <vector>

#include "tests/catch.h"
#include "tests/disagg/scene.h"

namespace xpyd::testing::admission_test {
namespace {

// A step takes 10 ms, and 1 ms more a sequence and 1 us more a token of KV. The objectives are 50 ms of TBT and 2 s of
// TTFT.
struct Case {
  model::StepCost cost{model::StepCost::Terms{0.010, 0, 0, 0, 0.001, 1e-6}};
  std::vector<DecodeView> decoding, coming;
  ClusterAdmission view{.now_s = 100,
                        .ttft_s = 1.5,
                        .objectives = {2.0, 0.050},
                        .prompt_tokens = 5000,
                        .max_tokens = 500,
                        .capacity_tokens = 100000,
                        .mean_s = 20};
  AdmissionOptions options;
  Refusal arrives(const char* policy) { return ask(find_admission_policy(policy)->arrives); }
  Refusal joins(const char* policy) { return ask(find_admission_policy(policy)->joins); }

 private:
  Refusal ask(Refusal (*rule)(const ClusterAdmission&, const AdmissionOptions&)) {
    view.decoding = decoding, view.coming = coming, view.cost = &cost;
    return rule ? rule(view, options) : Refusal{};
  }
};

TEST_CASE("admission: none admits every request, and policies that predict TTFT refuse one above its objective",
          "[admission]") {
  Case c;
  c.view.ttft_s = 2.5;
  CHECK_FALSE(c.arrives("none"));
  for (const char* policy : {"late", "early", "early_in_flight", "predicted", "reserve"}) {
    INFO(policy);
    const Refusal refusal = c.arrives(policy);
    CHECK(refusal.why == Refusal::ttft);
    CHECK(refusal.predicted == 2.5);
    CHECK(refusal.objective == 2.0);
  }
  c.view.ttft_s = 2.0;
  for (const AdmissionPolicy& policy : admission_policies()) CHECK_FALSE(c.arrives(policy.name));
}

TEST_CASE("admission: an idle server refuses no request for its queue or its step time", "[admission]") {
  Case c;
  c.view.ttft_s = 60, c.view.idle = true;
  c.view.objectives.tbt_s = 0.001;
  for (const char* policy : {"late", "early", "early_in_flight", "predicted", "reserve"}) {
    INFO(policy);
    CHECK_FALSE(c.arrives(policy));
    CHECK_FALSE(c.joins(policy));
  }
  c.view.capacity_tokens = 4000;  // a request that does not fit is still refused
  CHECK(c.arrives("early").why == Refusal::room);
}

TEST_CASE("admission: a request above its TTFT objective is admitted to an idle instance, and refused behind another",
          "[admission]") {
  SimOptions options;
  options.conductor.admission = find_admission_policy("early");
  options.conductor.objectives = {.ttft_s = 1e-6, .tbt_s = 1e9};
  Scene scene("1C", options);
  scene.ask(1, 60, 4, 1);
  CHECK(scene.recorder->choice(1).finish == FinishReason::none);
  scene.ask(2, 60, 4, 2);
  CHECK(scene.recorder->choice(2).finish == FinishReason::refused);
  scene.abort(2);
  scene.settle();
  scene.serve(3, 60, 4, 3);
}

TEST_CASE("admission: a prompt that is done does not count itself: an idle cluster decodes it, a busy one refuses it",
          "[admission]") {
  SimOptions options;
  options.conductor.admission = find_admission_policy("late");
  options.conductor.objectives = {.ttft_s = 1e9, .tbt_s = 1e-9};
  Scene scene("1P1D", options);
  scene.ask(1, 60, 40, 1);
  for (int i = 0; i < 300 && scene.n_tokens(1) < 3; ++i) scene.tick();
  scene.ask(2, 60, 4, 2);
  for (int i = 0; i < 1000 && scene.recorder->choice(2).ends == 0; ++i) scene.tick();
  CHECK(scene.recorder->choice(2).finish == FinishReason::refused);
  CHECK(scene.recorder->choice(1).ends == 0);
  scene.abort(2);
  scene.settle();
}

TEST_CASE(
    "admission: late refuses after the prefill, early by D's batch now, early_in_flight also by sequences on their way",
    "[admission]") {
  Case c;
  for (int i = 0; i < 5; ++i) c.decoding.push_back({.joins_s = 95, .context = 5000});
  CHECK_FALSE(c.joins("late"));  // 10 + 6 + 30 ms
  c.decoding.push_back({.joins_s = 95, .context = 3000});
  CHECK(c.joins("late").why == Refusal::none);  // 10 + 7 + 33 = 50
  c.decoding.push_back({.joins_s = 95, .context = 1000});
  CHECK_FALSE(c.arrives("late"));
  CHECK(c.joins("late").why == Refusal::tbt);
  CHECK(c.joins("late").predicted == Approx(0.052));
  CHECK(c.arrives("early").why == Refusal::tbt);
  c.decoding.resize(3);
  CHECK_FALSE(c.arrives("early"));
  for (int i = 0; i < 4; ++i) c.coming.push_back({.joins_s = 101, .context = 4000});
  CHECK_FALSE(c.arrives("early"));
  CHECK(c.arrives("early_in_flight").predicted == Approx(0.054));  // 10 + 8 + 36
}

TEST_CASE("admission: predicted adds the sequences that join first, and leaves out those that have ended by then",
          "[admission]") {
  Case c;
  for (int i = 0; i < 4; ++i) c.decoding.push_back({.joins_s = 81, .context = 5000});   // the mean ends them at 101
  for (int i = 0; i < 4; ++i) c.coming.push_back({.joins_s = 101, .context = 4000});    // they join before 101.5
  for (int i = 0; i < 4; ++i) c.coming.push_back({.joins_s = 101.6, .context = 4000});  // they join after 101.5
  CHECK_FALSE(c.arrives("predicted"));                                                  // 10 + 5 + 21
  c.options.factor = 2;                                                                 // they end at 121: 10 + 9 + 41
  CHECK(c.arrives("predicted").predicted == Approx(0.060));
}

TEST_CASE("admission: reserve counts every sequence at its longest, and refuses nothing after the prefill",
          "[admission]") {
  Case c;
  c.view.objectives.tbt_s = 1;
  for (int i = 0; i < 9; ++i) c.decoding.push_back({.context = 5000, .at_longest = 10000});
  CHECK_FALSE(c.arrives("reserve"));  // 90000 + 5500
  c.coming.push_back({.context = 4000, .at_longest = 4501});
  CHECK(c.arrives("reserve").why == Refusal::room);
  CHECK(c.arrives("reserve").predicted == 100001);
  CHECK_FALSE(c.arrives("early_in_flight"));  // 45000 + 4000 + 5000 fit now
  CHECK_FALSE(c.joins("reserve"));
}

}  // namespace
}  // namespace xpyd::testing::admission_test
