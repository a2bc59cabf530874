#include <map>
#include <nlohmann/json.hpp>

#include "base/random.h"
#include "disagg/order.h"
#include "disagg/simulate/cluster.h"
#include "tests/catch.h"

namespace xpyd::testing::simulated_cluster_test {
namespace {

// Prompts of some conversations that go on, and answers of many lengths.
Trace some_load(uint64_t seed, int n, double rate) {
  Random random(seed);
  Trace trace{.block_tokens = 64};
  double at_s = 0;
  for (int i = 0; i < n; ++i) {
    at_s += random.exponential() / rate;
    TraceRequest request{.arrival_s = at_s,
                         .prompt_tokens = 1 + int(random.below(3000)),
                         .output_tokens = 1 + int(random.below(random.below(5) == 0 ? 600 : 60))};
    const uint64_t conversation = random.below(8);
    for (int b = 0; b * 64 < request.prompt_tokens; ++b)
      request.blocks.push_back(b < 12 ? conversation * 1000 + uint64_t(b) : 1000000 + uint64_t(i) * 1000 + uint64_t(b));
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

SimulationOptions options(const std::string& topology) {
  SimulationOptions o{.hardware = find_hardware("a800x8").value(),
                      .model = find_simulated_model("llama-3-70b").value()};
  o.topology = topology;
  o.block_tokens = 64;
  o.kv_tokens = 200000;
  o.engine = {.policy = find_batch_policy("chunked"), .max_batch = 32, .step_tokens = 512};
  o.conductor.placement = find_placement_policy("prefix_aware");
  o.conductor.disagg = find_disagg_policy("prefill_first");
  o.conductor.max_model_len = 8192;
  o.conductor.max_queue_bytes = INT64_MAX;
  o.conductor.chunk_tokens = 512;
  return o;
}

nlohmann::json numbers(const SimulationOptions& o, const Trace& trace) {
  const Result<Simulation> run = simulate(o, trace);
  REQUIRE(run.ok());
  return nlohmann::json::parse(result_json(run.value(), kNoObjectives, 0));
}

TEST_CASE("simulation: everybody is served, whatever the topology", "[simulate]") {
  const Trace trace = some_load(1, 300, 8);
  for (const char* topology : {"1C", "3C", "1P1D", "2P3D", "1C1P1D"}) {
    INFO(topology);
    const nlohmann::json got = numbers(options(topology), trace);
    CHECK(got["completed"] == 300);
    CHECK(got["failed"] == 0);
    CHECK(got["hit_tokens"] > 0);
  }
}

TEST_CASE("simulation: steps played at once are those that would have been played", "[simulate]") {
  for (const char* topology : {"1C", "2C", "1P1D", "2P2D"})
    for (const char* placement : {"least_loaded", "least_tokens", "mooncake", "llm_d"})
      for (uint64_t seed : {1, 2}) {
        INFO(topology << " " << placement << " " << seed);
        const Trace trace = some_load(seed, 120, 12);
        SimulationOptions o = options(topology);
        o.conductor.placement = find_placement_policy(placement);
        if (seed == 2) o.kv_tokens = 30000;  // too little: sequences lose their memory
        const nlohmann::json at_once = numbers(o, trace);
        o.each_step = true;
        const nlohmann::json each = numbers(o, trace);
        CHECK(at_once["events"] < each["events"]);
        for (const char* column : {"completed", "hit_tokens"}) CHECK(at_once[column] == each[column]);
        for (const char* column : {"ttft_mean_s", "ttft_p99_s", "tbt_p50_s", "tbt_p99_s", "tbt_worst_tenth_p99_s"})
          CHECK(at_once[column].get<double>() == Approx(each[column].get<double>()).epsilon(1e-9));
      }
}

TEST_CASE("simulation: the same seed, the same times", "[simulate]") {
  const Trace trace = some_load(3, 200, 10);
  SimulationOptions o = options("2P2D");
  o.conductor.placement = find_placement_policy("random");
  const std::string hash = numbers(o, trace)["log_hash"];
  CHECK(numbers(o, trace)["log_hash"] == hash);
  o.conductor.seed = 9;
  CHECK(numbers(o, trace)["log_hash"] != hash);
}

TEST_CASE("simulation: one request alone takes what its steps take", "[simulate]") {
  Trace trace{.block_tokens = 64};
  trace.requests.push_back({.prompt_tokens = 1000, .output_tokens = 3});
  for (int b = 0; b < 16; ++b) trace.requests[0].blocks.push_back(uint64_t(b));
  SimulationOptions o = options("1C");
  const StepCost cost = step_cost(o.model, o.hardware);
  StepShape first, second, decode, last;
  first.add_prompt(512, 0), second.add_prompt(488, 512), decode.add_decodes(1, 1001), last.add_decodes(1, 1002);
  const Result<Simulation> run = simulate(o, trace);
  REQUIRE(run.ok());
  const TokenTimes& times = run.value().records[0].times;
  // A message there, and one back.
  CHECK(times.first_s == Approx(cost.seconds(first) + cost.seconds(second) + 2 * o.message_s));
  REQUIRE(times.gaps.size() == 2);
  CHECK(times.gaps[0] == Approx(cost.seconds(decode)).epsilon(1e-5));
  CHECK(times.gaps[1] == Approx(cost.seconds(last)).epsilon(1e-5));
}

TEST_CASE("simulation: in a closed loop a turn waits for the one before it", "[simulate]") {
  Trace trace{.block_tokens = 64, .closed_loop = true};
  for (int i = 0; i < 3; ++i)
    trace.requests.push_back({.prompt_tokens = 64, .output_tokens = 10, .blocks = {7}, .after = i - 1, .think_s = 2});
  const Result<Simulation> run = simulate(options("1C"), trace);
  REQUIRE(run.ok());
  for (size_t i = 1; i < 3; ++i)
    CHECK(run.value().records[i].arrival_s == Approx(run.value().records[i - 1].last_s + 2));
}

TEST_CASE("simulation: what is refused is counted, and keeps the others within their objectives", "[simulate]") {
  const Trace trace = some_load(4, 400, 40);
  SimulationOptions o = options("1P1D");
  o.conductor.objectives = {5, 0.5};
  const nlohmann::json all = numbers(o, trace);
  CHECK(all["ttft_p90_s"] > 5);
  for (const char* policy : {"late", "early", "early_in_flight", "predicted", "reserve"}) {
    INFO(policy);
    o.conductor.admission = find_admission_policy(policy);
    const nlohmann::json some = numbers(o, trace);
    CHECK(some["rejected_early"] > 0);
    CHECK(some["completed"].get<int>() + some["rejected_early"].get<int>() + some["rejected_late"].get<int>() == 400);
    CHECK(some["ttft_p90_s"] < 6);
  }
}

}  // namespace
}  // namespace xpyd::testing::simulated_cluster_test
