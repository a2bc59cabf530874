// Tests the cost of steps: closed forms against the counted work, terms that are learned from steps, and pipelines.
#include <algorithm>

#include "base/random.h"
#include "experiments/cpp_chunks.h"
#include "experiments/mooncake_cost.h"
#include "experiments/pipeline_time.h"
#include "model/cost/cost_model.h"
#include "model/cost/step_cost.h"
#include "model/llama/llama_step.h"
#include "tests/catch.h"

namespace xpyd::testing::cost_test {

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

TEST_CASE("cost_model: closed forms equal the counted work of a step", "[model][cost_model]") {
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

TEST_CASE("cost_model: a mixture of experts reads the experts that its batch is expected to use",
          "[model][cost_model]") {
  CostModel cost{.config = load_model_config("experiments/models/mixtral-8x7b").value()};
  const ModelConfig& c = cost.config;
  CHECK(double(c.parameters()) / 1e9 == Approx(46.70).margin(0.01));  // published: 46.7 and 12.9
  CHECK(double(c.active_parameters()) / 1e9 == Approx(12.88).margin(0.01));
  for (auto [tokens, cached] : {std::pair(1, 0), {9, 3}, {40, 100}}) {
    check_equal(cost.prefill(tokens, cached), counted(cost, 1, tokens, cached, true));
    check_equal(cost.prefill(tokens, cached, false), counted(cost, 1, tokens, cached, false));
  }
  check_equal(cost.decode(5, 33), counted(cost, 5, 1, 32, true));
  // A token costs two FLOPs for each active parameter that is not a norm or an embedding, and its attention.
  const double norms = (2.0 * c.n_layers + 1) * c.hidden, table = double(c.vocab) * c.hidden;
  const double attention = 4.0 * c.n_layers * c.n_heads * c.head_dim;
  CHECK(cost.decode(1, 1).flops == Approx(2 * (double(c.active_parameters()) - norms - table) + attention));
  // Expected distinct experts by enumeration: two tokens, each with one of the 28 pairs of eight experts.
  double distinct = 0;
  for (int a = 0; a < 8; ++a)
    for (int b = 0; b < a; ++b)
      for (int x = 0; x < 8; ++x)
        for (int y = 0; y < x; ++y) distinct += 4 - (a == x) - (a == y) - (b == x) - (b == y);
  CHECK(c.experts.touched(1) == Approx(2));
  CHECK(c.experts.touched(2) == Approx(distinct / (28 * 28)));
  CHECK(c.experts.touched(1e6) == Approx(8));
  const double expert = 3.0 * c.hidden * c.experts.intermediate * 2 * c.n_layers;  // bytes
  CHECK(cost.decode(2, 1).bytes - cost.decode(1, 1).bytes ==
        Approx(expert * (c.experts.touched(2) - 2)).epsilon(0.001));
}

TEST_CASE("cost_model: Mooncake's published break-even points are reproduced", "[model][cost_model]") {
  // FAST'25 section 2.2: 320 KB a token. For a prefix of 8192 tokens, 6 GB/s on 8 x A800 and 19 GB/s on 8 x H800.
  CHECK(kMooncakeLlama70b.kv_token_bytes() == 327680);
  CHECK(1e-9 * kMooncakeLlama70b.break_even_bytes_per_s(8192, 8 * 312e12) == Approx(5.86).margin(0.01));
  CHECK(1e-9 * kMooncakeLlama70b.break_even_bytes_per_s(8192, 8 * 989e12) == Approx(18.57).margin(0.01));
}

TEST_CASE("step cost: a prompt's cost is the sum of its chunks' costs", "[cost]") {
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

// Steps of a machine whose terms differ from the prior's, with up to 5 % noise.
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

TEST_CASE("step cost: observed steps correct a prior that is off by a factor of three", "[cost]") {
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
  CHECK(after.mape() < 0.03);                        // the noise alone has a mean of 2.5 %
  for (size_t i = 0; i < machine.truth.size(); ++i)  // gamma is below 1 % of any step, within the noise
    if (i != 2) CHECK(cost.terms()[i] == Approx(machine.truth[i]).epsilon(0.1));
}

TEST_CASE("step cost: unobserved terms keep the prior's values, and no term becomes negative", "[cost]") {
  const StepCost::Terms prior = {1e-3, 3e-5, 2e-8, 1.5e-10, 2e-5, 3e-8};
  StepCost cost(prior);
  for (int i = 0; i < 500; ++i) cost.saw({.decodes = 8, .decode_context = 8000}, 1e-4);  // far less than the prior's c
  CHECK(cost.terms()[1] == prior[1]);
  CHECK(cost.terms()[3] == prior[3]);
  CHECK(cost.seconds({.decodes = 8, .decode_context = 8000}) == Approx(1e-4).epsilon(0.02));
  for (double term : cost.terms()) CHECK(term >= 0);
  cost.saw({.decodes = 8}, 0);  // a step of zero duration is ignored
}

TEST_CASE("step cost: equal steps are predicted at their mean, whatever their spread", "[cost]") {
  StepCost cost;
  const StepShape s = {.decodes = 8, .decode_context = 8000};
  for (int i = 0; i < 1000; ++i) cost.saw(s, i % 2 ? 1e-3 : 3e-3);
  CHECK(cost.seconds(s) == Approx(2e-3).epsilon(0.05));  // weighted by the observed time it would be 1.2 ms
}

using namespace experiments;

const ChunkCost kCost{.stage_s = 5e-4, .c = 0.04, .b = 3.2e-4, .g = 1e-7, .a = 3e-9};

TEST_CASE("chunks: they tile a prompt, and equal-time chunks take the same time", "[pipeline]") {
  Random random(7);
  for (int trial = 0; trial < 100; ++trial) {
    const double cached = double(random.below(100000)), tokens = double(1 + random.below(100000));
    const int stages = 1 + int(random.below(8));
    const double T = 0.1 + random.uniform();
    for (const ChunkRule& rule : {fixed_chunks(2048), equal_time_chunks(kCost, T, stages)}) {
      double at = cached;
      for (const Chunk& chunk : cut(cached, tokens, rule)) {
        CHECK(chunk.L == at);
        CHECK(chunk.x > 0);
        at += chunk.x;
      }
      CHECK(at == cached + tokens);
    }
    const double x = kCost.tokens(cached, T, stages);
    if (x > 0) CHECK(kCost.seconds(cached, x, stages) == Approx(T).epsilon(1e-9));
  }
}

using experiments::pipeline_seconds, experiments::pipeline_times, experiments::PipelineChunk,
    experiments::PipelineTimes;

TEST_CASE("pipeline time: the closed form equals the recurrence when all stages take the same time", "[pipeline]") {
  Random random(3);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<double> seconds(1 + random.below(60));
    for (double& t : seconds) t = trial % 3 == 0 ? random.exponential() : 0.01 + random.uniform();
    const int n_stages = 1 + int(random.below(16));
    std::vector<PipelineChunk> chunks;
    for (double t : seconds) chunks.push_back({std::vector<double>(size_t(n_stages), t)});
    const PipelineTimes times = pipeline_times(chunks, 0);
    CHECK(times.end() == Approx(pipeline_seconds(seconds, n_stages)).epsilon(1e-12));
  }
}

}  // namespace xpyd::testing::cost_test
