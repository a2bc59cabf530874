// Layered prefill in virtual time, against its arithmetic: one long prompt beside 32 sequences that decode.
#include <algorithm>

#include "disagg/order.h"
#include "experiments/simulate/cluster.h"
#include "tests/catch.h"

namespace xpyd::testing::simulated_layers_test {
namespace {

constexpr int kDecodes = 32, kPrompt = 8192, kChunk = 512;

struct Seen {
  double first_s;            // the prompt's, after its arrival
  std::vector<double> gaps;  // of a decoding sequence, while the prompt is computed
};

Seen play(const char* batching, StepCost& cost) {
  SimulationOptions o{.hardware = find_hardware("a800x8").value(),
                      .model = find_simulated_model("llama-3-70b").value(),
                      .topology = "1C"};
  o.block_tokens = 64;
  o.engine = {.policy = find_batch_policy(batching), .max_batch = 64, .step_tokens = kChunk};
  if (o.engine.policy->layered) o.engine.step_tokens = 2 * kPrompt, o.engine.chunk_tokens = kChunk;
  o.conductor.placement = find_placement_policy("least_loaded");
  o.conductor.disagg = find_disagg_policy("prefill_first");
  o.conductor.max_model_len = 2 * kPrompt;
  o.conductor.max_queue_bytes = INT64_MAX;
  cost = step_cost(o.model, o.hardware, 1);
  Trace trace{.block_tokens = 64};
  for (int i = 0; i < kDecodes; ++i)
    trace.requests.push_back({.prompt_tokens = 8, .output_tokens = 1000, .blocks = {uint64_t(i)}});
  trace.requests.push_back({.arrival_s = 2, .prompt_tokens = kPrompt, .output_tokens = 1});
  for (uint64_t b = 0; b < kPrompt / 64; ++b) trace.requests.back().blocks.push_back(1000 + b);
  const Result<Simulation> run = simulate(o, trace);
  REQUIRE(run.ok());
  const SimulatedRecord &prompt = run.value().records.back(), &other = run.value().records[0];
  Seen seen{.first_s = prompt.times.first_s - prompt.arrival_s, .gaps = {}};
  double at_s = other.times.first_s;
  for (float gap : other.times.gaps) {
    at_s += gap;
    if (at_s - gap > prompt.arrival_s && at_s < prompt.times.first_s + 1e-4) seen.gaps.push_back(gap);
  }
  return seen;
}

// A step that computes x tokens of the prompt after L, in that share of the layers.
double step_s(const StepCost& cost, double x, double L, double share) {
  const auto [c, b, gamma, a, s, k] = cost.terms();
  const double context = 8 + 2.0 / 0.0115;  // of a decoding sequence by then: a thousandth of a step
  return c + share * (b * x + gamma * L + a * (2 * L * x + x * x)) + kDecodes * (s + k * context);
}

TEST_CASE("simulation: a layered prompt takes its share of each step, and decodes all of theirs",
          "[simulate][layered]") {
  StepCost cost;
  const Seen chunked = play("chunked", cost), layered = play("layered", cost);
  // The decodes have their tokens of each chunk: 17 chunks of 480 and one of 32. Groups have all of the prompt's.
  std::vector<double> chunks, groups(kPrompt / kChunk, step_s(cost, kPrompt, 0, double(kChunk) / kPrompt));
  for (int done = 0; done < kPrompt; done += kChunk - kDecodes)
    chunks.push_back(step_s(cost, std::min(kChunk - kDecodes, kPrompt - done), done, 1));
  REQUIRE(chunks.size() == 18);
  for (const auto& [seen, steps] : {std::pair(&chunked, &chunks), {&layered, &groups}}) {
    REQUIRE(seen->gaps.size() == steps->size());
    double sum = 0;
    for (size_t i = 0; i < steps->size(); ++i) {
      CHECK(seen->gaps[i] == Approx((*steps)[i]).epsilon(2e-3));
      sum += seen->gaps[i];
    }
    // It waits for the step that is under way when it comes.
    CHECK(seen->first_s > sum);
    CHECK(seen->first_s < sum + step_s(cost, 0, 0, 1) + 1e-3);
  }
  const auto largest = [](const Seen& seen) { return *std::ranges::max_element(seen.gaps); };
  CHECK(largest(layered) < largest(chunked));
  CHECK(layered.first_s < chunked.first_s);
}

}  // namespace
}  // namespace xpyd::testing::simulated_layers_test
