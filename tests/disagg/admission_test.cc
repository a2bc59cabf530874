#include "disagg/admission.h"

#include <vector>

#include "tests/catch.h"

namespace xpyd::testing::admission_test {
namespace {

// A step takes 10 ms, 1 ms a sequence and 1 us a token of KV; TBT may be 50 ms, TTFT 2 s. The prompt has 5000 tokens.
struct Case {
  model::StepCost cost{model::StepCost::Terms{0.010, 0, 0, 0, 0.001, 1e-6}};
  std::vector<DecodeView> decoding, coming;
  ClusterAdmission view{.now_s = 100,
                        .ttft_s = 1.5,
                        .objectives = {2.0, 0.050},
                        .prompt_tokens = 5000,
                        .max_tokens = 500,
                        .capacity_tokens = 100000,
                        .mean_s = 20,
                        .quantile_s = 40};
  AdmissionOptions options;
  Refusal arrives(const char* policy) { return ask(find_admission_policy(policy)->arrives); }
  Refusal joins(const char* policy) { return ask(find_admission_policy(policy)->joins); }

 private:
  Refusal ask(Refusal (*rule)(const ClusterAdmission&, const AdmissionOptions&)) {
    view.decoding = decoding, view.coming = coming, view.cost = &cost;
    return rule ? rule(view, options) : Refusal{};
  }
};

TEST_CASE("admission: none takes all; a TTFT beyond its objective is refused by all that look", "[admission]") {
  Case c;
  c.view.ttft_s = 2.5;
  CHECK_FALSE(c.arrives("none"));
  for (const char* policy : {"late", "early", "early_in_flight", "predicted", "reserve"}) {
    INFO(policy);
    const Refusal refusal = c.arrives(policy);
    CHECK(refusal.why == Refusal::ttft);
    CHECK(refusal.predicted == 2.5);
    CHECK(refusal.objective == 2.0);
    CHECK(refusal.retry_s == 0.5);
  }
  c.view.ttft_s = 2.0;
  for (const AdmissionPolicy& policy : admission_policies()) CHECK_FALSE(c.arrives(policy.name));
}

TEST_CASE("admission: late wastes the prefill, early looks at D now, in flight at who is on the way", "[admission]") {
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

TEST_CASE("admission: predicted adds who comes before, and takes away who will have ended", "[admission]") {
  Case c;
  for (int i = 0; i < 4; ++i) c.decoding.push_back({.joins_s = 81, .context = 5000});   // end at 101 by t_d
  for (int i = 0; i < 4; ++i) c.coming.push_back({.joins_s = 101, .context = 4000});    // join before 101.5
  for (int i = 0; i < 4; ++i) c.coming.push_back({.joins_s = 101.6, .context = 4000});  // after
  CHECK_FALSE(c.arrives("predicted"));                                                  // 10 + 5 + 21
  c.options.factor = 2;                                                                 // they end at 121: 10 + 9 + 41
  CHECK(c.arrives("predicted").predicted == Approx(0.060));
  c.options = {.decode = DecodeSeconds::quantile};
  CHECK(c.arrives("predicted").predicted == Approx(0.060));
  c.options = {.decode = DecodeSeconds::fixed, .fixed_s = 20.4};
  CHECK_FALSE(c.arrives("predicted"));
  c.options = {.decode = DecodeSeconds::oracle};
  for (DecodeView& s : c.decoding) s.ends_s = 130;
  CHECK(c.arrives("predicted").predicted == Approx(0.060));
  for (DecodeView& s : c.decoding) s.ends_s = 101.5;  // gone when it joins
  CHECK_FALSE(c.arrives("predicted"));
  c.options.factor = 1.01;  // 20.705 s from 81 on
  CHECK(c.arrives("predicted").predicted == Approx(0.060));
}

TEST_CASE("admission: probabilistic refuses by saturation^5, and only what may be shed", "[admission]") {
  Case c;
  std::vector<InstanceView> instances(2);
  instances[0] = {.queued = 1, .available_tokens = 900, .capacity_tokens = 1000};  // max(.2, .125)
  instances[1] = {.queued = 0, .available_tokens = 840, .capacity_tokens = 1000};  // max(0, .2): 300 * .2^5 = .096
  c.view.instances = instances;
  c.view.random = 0.095;
  CHECK(c.arrives("probabilistic").predicted == Approx(0.096));
  c.view.sheddable = false;
  CHECK_FALSE(c.arrives("probabilistic"));
  c.view.sheddable = true, c.view.random = 0.097;
  CHECK_FALSE(c.arrives("probabilistic"));
}

TEST_CASE("admission: reserve counts everybody at his longest, and refuses nothing late", "[admission]") {
  Case c;
  c.view.objectives.tbt_s = 1;
  for (int i = 0; i < 9; ++i) c.decoding.push_back({.context = 5000, .at_longest = 10000});
  CHECK_FALSE(c.arrives("reserve"));  // 90000 + 5500
  c.coming.push_back({.context = 4000, .at_longest = 4501});
  CHECK(c.arrives("reserve").why == Refusal::room);
  CHECK(c.arrives("reserve").predicted == 100001);
  CHECK_FALSE(c.arrives("early_in_flight"));  // 45000 + 4000 + 5000 have room now
  CHECK_FALSE(c.joins("reserve"));
  CHECK(find_admission_policy("reserve")->joins == nullptr);
  CHECK(find_admission_policy("no") == nullptr);
}

}  // namespace
}  // namespace xpyd::testing::admission_test
