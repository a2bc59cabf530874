#include "disagg/roles.h"

#include "experiments/simulate/cluster.h"
#include "tests/catch.h"

namespace xpyd::testing::roles_test {
namespace {

// Two of each, each of which can do 100 tokens/s.
RolesView seen(double prompt_tokens_s, double output_tokens_s) {
  return {.now_s = 100,
          .prefill = 2,
          .decode = 2,
          .prompt_tokens_s = prompt_tokens_s,
          .output_tokens_s = output_tokens_s,
          .prefill_velocity = 100,
          .decode_velocity = 100};
}

RoleChange decide(const char* policy, const RolesView& view, const RolesOptions& options = {}) {
  return find_roles_policy(policy)->decide(view, options);
}

TEST_CASE("roles: velocity gives an instance to the role that is short of them", "[roles]") {
  CHECK(decide("velocity", seen(190, 50)) == RoleChange::to_prefill);  // 0.95 over 0.25; then 0.5 for D
  CHECK(decide("velocity", seen(50, 190)) == RoleChange::to_decode);
  CHECK(decide("fixed", seen(190, 50)) == RoleChange::none);
  CHECK(decide("velocity", seen(130, 10)) == RoleChange::none);   // 0.65: nobody is short
  CHECK(decide("velocity", seen(190, 160)) == RoleChange::none);  // 0.95 over 0.80: within the band
  CHECK(decide("velocity", seen(190, 100)) == RoleChange::none);  // the one that is left would have 1.00
  CHECK(decide("velocity", seen(190, 90)) == RoleChange::to_prefill);
}

TEST_CASE("roles: a bound, a cool-down, and nothing before anything is known", "[roles]") {
  RolesView view = seen(190, 20);
  CHECK(decide("velocity", view, {.at_least = 2}) == RoleChange::none);
  view.changed_s = 71;
  CHECK(decide("velocity", view) == RoleChange::none);
  CHECK(decide("velocity", view, {.cool_down_s = 29}) == RoleChange::to_prefill);
  view = seen(190, 20);
  view.decode_velocity = 0;
  CHECK(decide("velocity", view) == RoleChange::none);
}

TEST_CASE("roles: what comes is a rate that fades, and means", "[roles]") {
  Demand demand;
  for (int i = 0; i < 300; ++i) demand.placed(1000, 4000, i);  // one a second
  CHECK(demand.requests_s(299) == Approx(1).epsilon(0.03));
  CHECK(demand.prompt_tokens_s(299) == Approx(1000).epsilon(0.03));
  CHECK(demand.requests_s(329) == Approx(std::exp(-1)).epsilon(0.03));
  CHECK(demand.uncached() == Approx(1000));
  for (int i = 0; i < 200; ++i) demand.ended(i < 100 ? 10 : 200);
  CHECK(demand.output() == Approx(200).epsilon(0.01));
  CHECK(demand.context() == Approx(4100).epsilon(0.01));
}

// 1P5D, and prompts for which three P are just enough: 2 of 8,192 tokens a second.
TEST_CASE("roles: a simulated cluster finds its ratio", "[roles][simulate]") {
  Trace trace{.block_tokens = 512};
  for (int i = 0; i < 600; ++i) {
    TraceRequest request{.arrival_s = i * 0.5, .prompt_tokens = 8192, .output_tokens = 20};
    for (int b = 0; b < 16; ++b) request.blocks.push_back(uint64_t(i) * 100 + uint64_t(b));
    trace.requests.push_back(std::move(request));
  }
  SimulationOptions o{.hardware = find_hardware("a800x8").value(),
                      .model = find_simulated_model("llama-3-70b").value(),
                      .topology = "1P5D"};
  o.engine = {.policy = find_batch_policy("chunked"), .max_batch = 64, .step_tokens = 2048};
  o.conductor.placement = find_placement_policy("mooncake");
  o.conductor.disagg = find_disagg_policy("prefill_first");
  o.conductor.max_model_len = 16384;
  o.conductor.max_queue_bytes = INT64_MAX;
  o.conductor.step_tokens = 2048;
  const Result<Simulation> as_it_is = simulate(o, trace);
  o.conductor.roles = find_roles_policy("velocity");
  const Result<Simulation> elastic = simulate(o, trace);
  REQUIRE((as_it_is.ok() && elastic.ok()));
  const auto last_ttft = [&](const Simulation& run) {
    CHECK(std::ranges::count(run.records, SimulatedEnd::completed, &SimulatedRecord::end) == 600);
    return run.records.back().times.first_s - run.records.back().arrival_s;
  };
  CHECK(last_ttft(as_it_is.value()) > 100);
  CHECK(last_ttft(elastic.value()) < 3);
  CHECK(elastic.value().conductor.role_changes >= 2);
  CHECK(elastic.value().conductor.role_changes <= 4);
}

}  // namespace
}  // namespace xpyd::testing::roles_test
