// Steps that a simulation plays at once (Engine::alike) against the same cluster that plays each of them: over clusters
// of every topology, policy, order, batch rule and admission row, mostly with too little memory, whatever any client
// sees, and every column of the result, is the same.
#include <nlohmann/json.hpp>

#include "base/random.h"
#include "disagg/order.h"
#include "experiments/simulate/cluster.h"
#include "tests/catch.h"

namespace xpyd::testing::simulated_steps_test {
namespace {

// Prompts that begin like others, some of them the same; some wait for another one's end.
Trace some_trace(Random& random) {
  Trace trace{.block_tokens = 64};
  const int n = 20 + int(random.below(41));
  const double rate = double(1 << random.below(7));
  const uint64_t longest = 200 << random.below(5);
  trace.closed_loop = random.below(4) == 0;
  double at_s = 0;
  for (int i = 0; i < n; ++i) {
    at_s += random.exponential() / rate;
    TraceRequest request{.arrival_s = at_s,
                         .prompt_tokens = 1 + int(random.below(longest)),
                         .output_tokens = 1 + int(random.below(random.below(5) == 0 ? 600 : 60))};
    const uint64_t conversation = random.below(6) * 1000, own = 1000000 + uint64_t(i) * 1000, shared = random.below(20);
    for (uint64_t b = 0; b * 64 < uint64_t(request.prompt_tokens); ++b)
      request.blocks.push_back((b < shared ? conversation : own) + b);
    if (i > 0 && random.below(3) == 0) {
      request.after = int(random.below(uint64_t(i)));
      request.think_s = random.uniform();
    }
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

template <class Rows>
auto one_of(Random& random, const Rows& rows) {
  return std::data(rows)[random.below(std::size(rows))];
}
template <class Row>
const Row* any(Random& random, std::span<const Row> rows) {
  return &rows[random.below(rows.size())];
}

SimulationOptions some_cluster(Random& random) {
  SimulationOptions o{
      .hardware = find_hardware(one_of(random, std::array{"a800x8", "h20x4", "a800x2"})).value(),
      .model = find_simulated_model("llama-3-8b").value(),
      .topology = one_of(random, std::array{"1C", "3C", "1P1D", "2P1D", "1P2D", "2P3D", "1C1P1D", "2C1D1P"})};
  o.scheme = one_of(random, std::array{"paged", "paged", "contiguous"});
  o.block_tokens = 16 << random.below(4);
  o.kv_tokens = double(5000 + random.below(random.below(2) == 0 ? 50000 : 3000));
  if (random.below(3) == 0) o.host_tokens = double(random.below(40000));
  o.fetch = random.below(2) == 0;
  o.engine = {.policy = batch::find_batch_policy(
                  one_of(random, std::array{"chunked", "chunked", "persistent", "prefill_first", "static"})),
              .max_batch = 2 + int(random.below(40)),
              .step_tokens = 64 << random.below(5)};
  if (random.below(2) == 0) o.engine.admission = any(random, batch::admission_rules());
  ConductorOptions& c = o.conductor;
  c.placement = any(random, placement_policies());
  c.disagg = any(random, disagg_policies());
  c.disagg_options.pull = random.below(4) == 0;
  c.disagg_options.max_local_prefill_tokens = 500;
  c.stream_kv = StreamKv(random.below(3));
  c.escrow = random.below(2) == 0;
  c.admission = any(random, admission_policies());
  c.objectives = {random.below(2) == 0 ? 0.5 : 0.0, random.below(2) == 0 ? 0.03 : 0.0};
  c.max_model_len = 5000;
  c.max_queue_bytes = INT64_MAX;
  c.patience_s = kNever;
  c.step_tokens = o.engine.step_tokens;
  c.seed = random.next();
  return o;
}

TEST_CASE("simulation: steps played at once are those that would have been played", "[simulate]") {
  int64_t events[2] = {0, 0};
  int completed = 0, preempted = 0, refused = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    const Trace trace = some_trace(random);
    SimulationOptions o = some_cluster(random);
    INFO("seed " << seed << ": " << o.topology << " " << o.scheme << " " << o.conductor.placement->name << " "
                 << o.conductor.disagg->name << " " << o.conductor.admission->name << " " << o.engine.policy->name);
    nlohmann::json results[2];
    for (const bool each : {false, true}) {
      o.each_step = each;
      const Result<Simulation> run = simulate(o, trace);
      REQUIRE(run.ok());
      events[each] += run.value().events;
      preempted += run.value().preemptions > 0;
      results[each] = nlohmann::json::parse(result_json(run.value(), {1, 0.05}, 0));
      results[each].erase("events");
    }
    for (const auto& [column, value] : results[0].items()) {
      INFO(column << " " << value << " " << results[1][column]);
      if (value.is_number_float())  // sums of what happens at one time, in either order
        CHECK(value.get<double>() == Approx(results[1][column].get<double>()).epsilon(1e-12));
      else
        CHECK(value == results[1][column]);
    }
    completed += results[0]["completed"].get<int>();
    refused += results[0]["rejected_early"].get<int>() + results[0]["rejected_late"].get<int>();
  }
  CHECK(completed > 8000);
  CHECK(preempted > 10);
  CHECK(refused > 500);
  CHECK(events[0] * 3 < events[1]);
}

}  // namespace
}  // namespace xpyd::testing::simulated_steps_test
