#include "model/cost_model.h"

#include <numeric>

#include "experiments/mooncake_cost.h"
#include "model/llama_step.h"
#include "tests/catch.h"

namespace xpyd::testing::cost_model_test {
namespace {

// The work of the same step, counted sequence by sequence and position by position.
Work counted(const CostModel& cost, int batch, int tokens, int cached, bool logits) {
  const int length = cached + tokens;
  KvLayout layout{kv_shape(cost.config, cost.kv), KvOrder::layer_major, length, batch};
  std::vector<int32_t> ids(size_t(batch * tokens), 1), offsets{0}, lengths(size_t(batch), length), rows;
  std::vector<KvView> views;
  for (int s = 0; s < batch; ++s) {
    offsets.push_back((s + 1) * tokens);
    if (logits) rows.push_back((s + 1) * tokens - 1);
    views.push_back({nullptr, &layout, nullptr, s});
  }
  StepInput step{.token_ids = ids, .q_offsets = offsets, .kv_lengths = lengths, .views = views, .logit_rows = rows};
  return llama_work(step, cost.config, cost.weights, cost.activations);
}

void check_equal(const Work& a, const Work& b) {
  CHECK(a.flops == Approx(b.flops).epsilon(1e-12));
  CHECK(a.bytes == Approx(b.bytes).epsilon(1e-12));
}

CostModel llama_70b() {
  CostModel cost;
  cost.config.n_layers = 80;
  cost.config.hidden = 8192;
  cost.config.intermediate = 28672;
  cost.config.n_heads = 64;
  cost.config.n_kv_heads = 8;
  cost.config.head_dim = 128;
  cost.config.vocab = 128256;
  return cost;
}

}  // namespace

TEST_CASE("cost_model: closed forms are the counted work of a step", "[model][cost_model]") {
  for (auto [name, kv] :
       {std::pair("llama31", Dtype::bf16), {"qwen2", Dtype::int8}, {"qwen3", Dtype::int4}, {"mistral", Dtype::f32}}) {
    CostModel cost{.config = load_model_config(testing::data_path("models/" + std::string(name))).value(),
                   .weights = Dtype::f32,
                   .activations = Dtype::f32,
                   .kv = kv};
    for (int window : {0, 1, 5, 64})
      for (int from : {0, 1}) {
        cost.config.sliding_window = window;
        cost.config.window_from_layer = from;
        for (auto [tokens, cached] : {std::pair(1, 0), {7, 0}, {1, 30}, {9, 3}, {40, 100}}) {
          INFO(name << " window " << window << " from " << from << " tokens " << tokens << " cached " << cached);
          check_equal(cost.prefill(tokens, cached), counted(cost, 1, tokens, cached, true));
          check_equal(cost.prefill(tokens, cached, false), counted(cost, 1, tokens, cached, false));
        }
        check_equal(cost.decode(5, 33), counted(cost, 5, 1, 32, true));
      }
  }
}

TEST_CASE("cost_model: Mooncake's published break-even points", "[model][cost_model]") {
  // FAST'25 section 2.2: 320 KB a token; 6 GB/s on 8 x A800 and 19 GB/s on 8 x H800 for a prefix of
  // 8192.
  CHECK(kMooncakeLlama70b.kv_token_bytes() == 327680);
  CHECK(1e-9 * kMooncakeLlama70b.break_even_bytes_per_s(8192, 8 * 312e12) == Approx(5.86).margin(0.01));
  CHECK(1e-9 * kMooncakeLlama70b.break_even_bytes_per_s(8192, 8 * 989e12) == Approx(18.57).margin(0.01));
}

TEST_CASE("cost_model: the model's real widths differ from Mooncake's constants by what is known",
          "[model][cost_model]") {
  const CostModel cost = llama_70b();
  CHECK(cost.kv_token_bytes() == 327680);
  // Short prefix: matrices alone, 2 * 855.6M weights a layer of which the last counts its K and V
  // projections only: 25.5 d^2 for 22. Long: causal attention is half of a = 4.
  CHECK(cost.prefill(16, 0, false).flops / kMooncakeLlama70b.flops(16) == Approx(25.5 / 22).epsilon(0.02));
  CHECK(cost.prefill(1 << 24, 0, false).flops / kMooncakeLlama70b.flops(1 << 24) == Approx(0.5).epsilon(0.02));
  // A split prefill costs what the whole costs.
  CHECK(cost.prefill(1000, 0, false).flops + cost.prefill(24, 1000, false).flops ==
        Approx(cost.prefill(1024, 0, false).flops));
}

TEST_CASE("cost_model: a step takes the slower of its two bounds", "[model][cost_model]") {
  CHECK(seconds({.bytes = 10, .flops = 100}, {.flops_per_s = 100, .bytes_per_s = 100}) == 1);
  CHECK(seconds({.bytes = 1000, .flops = 100}, {.flops_per_s = 100, .bytes_per_s = 100}) == 10);
}

}  // namespace xpyd::testing::cost_model_test
