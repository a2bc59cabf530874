// kv_dtype: What does KV in fewer bits gain: tokens per GiB, and requests a second?
// Paper: lmdeploy, docs/en/quantization/kv_quant.md.
// Set-up: the gain of KV with fewer bits, in tokens per GiB and requests per second. Real engine, policy and paged
//   memory in virtual time: an A100 of 80 GB at half its FLOP/s and .8 of its bandwidth, 90 % of it for weights and KV;
//   2,000 requests of ShareGPT's lengths at once, 256 sequences, prompts in steps of their own. /logits: the demo model
//   reads 800 tokens of facts and answers; its greedy token at every position is compared with that over f32 KV.
// Command: make exp-kv_dtype (seconds; computed, virtual, counted).
// Expected: a row of 128 is 256 bytes in f16, 132 in int8, 68 in int4, so 1.94 and 3.76 times the tokens; fp8 twice.
//   Llama-2-7B: a step reads 13.5 GB of weights and 60 of KV: 46 ms, 28 in int8, 18 in int4; with prompts 1.2 to 1.6
//   and 1.4 to 2.1 times the requests. Llama-3-8B (GQA): products hide the KV: 1 to 1.1. The claim keeps 1.03 to 1.25
//   and 1.05 to 1.35, which forgot the products. logits: an int8 value is off by .0045 of a deviation, int4 by .077,
//   e4m3 by .026, e5m2 by twice that.
// Found: 1.94 and 3.76 times the tokens. Llama-2-7B gains 1.44 (published 1.27) in int8; GQA hardly gains. int4 keeps
//   90 % of the tokens.
#include <algorithm>
#include <cmath>

#include "batch/engine/engine.h"
#include "experiments/demo_facts.h"
#include "experiments/demo_model.h"
#include "experiments/lengths.h"
#include "experiments/tally.h"
#include "experiments/timed_model.h"

namespace xpyd::experiments::kv_dtype_experiment {
namespace {

constexpr Rates kRates = {312e12 * 0.5, 2.04e12 * 0.8};
constexpr double kMemory = 0.9 * 80e9;

Dtype dtype_named(const std::string& name) {
  return *std::find_if(std::begin(kKvDtypes), std::end(kKvDtypes),
                       [&](Dtype dtype) { return name == dtype_name(dtype); });
}

ModelConfig shape_named(const std::string& model) {
  const bool gqa = model == "llama-3-8b";
  ModelConfig c;
  c.family = "llama";
  c.n_layers = 32;
  c.hidden = 4096;
  c.intermediate = gqa ? 14336 : 11008;
  c.n_heads = 32;
  c.n_kv_heads = gqa ? 8 : 32;
  c.head_dim = 128;
  c.vocab = gqa ? 128256 : 32000;
  c.max_position = 2048;
  return c;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* model : {"llama-2-7b", "llama-3-8b"})
    for (Dtype dtype : kKvDtypes)
      for (int draw = 0; draw < kDraws; ++draw)
        if (dtype != Dtype::fp8_e5m2)  // the bytes are those of e4m3
          all.push_back({{"model", model}, {"dtype", dtype_name(dtype)}, {"sample", draw}});
  return all;
}

Result<Finding> serve(const Values& point, const Setting& setting) {
  const CostModel cost{.config = shape_named(point["model"]), .kv = dtype_named(point["dtype"])};
  const int n = setting.tiny ? 100 : 2000;
  Result<LengthSet> lengths = request_lengths("sharegpt", n, setting, point["sample"]);
  if (!lengths) return lengths.error();
  const double weights = double(cost.config.parameters()) * 2;
  const int pool_tokens = int((kMemory - weights) / cost.kv_token_bytes() / (setting.tiny ? 16 : 1));
  KvOptions kv{.shape = kv_shape(shape_of_nothing(), Dtype::bf16),
               .block_tokens = 16,
               .max_sequence_tokens = 2048,
               .prefix_cache = false};
  kv.pool_bytes = size_t(pool_tokens) * kv.shape.token_bytes();
  Result<std::shared_ptr<KvPool>> pool = make_block_pool("paged", kv);
  if (!pool) return pool.error();
  std::unique_ptr<KvMemory> memory = find_kv_scheme("paged")->make(pool.value(), kv);
  VirtualClock clock;
  TimedModel model(cost, kRates, clock);
  Engine engine(model, *memory, {.policy = find_batch_policy("prefill_first"), .max_batch = 256, .step_tokens = 2048},
                clock, nullptr);
  auto sink = std::make_shared<Tally>();
  int64_t expected = 0;
  for (const Lengths& r : lengths.value().requests) {
    auto request = std::make_shared<Request>();
    request->id = uint64_t(expected) + 1;
    request->prompt.assign(size_t(r.prompt), 1);
    request->sampling.temperature = 0;
    request->max_tokens = r.output;
    request->ignore_eos = true;
    expected += r.output;
    engine.submit(
        make_sequence(request, {.stands_for = request->n}, sink, std::make_shared<std::atomic<bool>>(false), nullptr));
  }
  while (!engine.idle())
    if (!engine.step()) return Finding{{}, "the engine makes no progress"};
  memory->check_invariants();
  if (sink->tokens != expected) return Finding{{}, "some requests did not get all their tokens"};
  const double f16 = double(kv_shape(cost.config, Dtype::f16).token_bytes());
  return Finding{{{{"token_bytes", cost.kv_token_bytes()},
                   {"gain_over_f16", f16 / cost.kv_token_bytes()},
                   {"pool_tokens", pool_tokens},
                   {"batch_mean", model.sequences / model.steps},
                   {"requests_per_s", n / clock.seconds},
                   {"preemptions", engine.stats().preemptions},
                   {"lengths", lengths.value().source}}},
                 ""};
}

REGISTER_EXPERIMENT("kv_dtype", "cpu", points, each<serve>);

struct Demo : DemoModel {
  int draw = -1;  // number of the text
  std::vector<int32_t> text;
  std::vector<float> plain;  // logits over f32 KV, [position][vocab]
};

std::vector<float> logits_over(Demo& demo, Dtype dtype) {
  const int n = int(demo.text.size());
  KvLayout layout{kv_shape(demo.config, dtype), KvOrder::layer_major, n, 1};
  std::vector<std::byte> pool(layout.pool_bytes());
  KvView view{pool.data(), &layout, nullptr, 0};
  const int32_t offsets[] = {0, n}, lengths[] = {n};
  std::vector<int32_t> rows;
  for (int i = 0; i < n; ++i) rows.push_back(i);
  std::vector<float> logits(size_t(n) * size_t(demo.config.vocab));
  compute_step(*make_llama(demo.weights, demo.team, n, n), {demo.text, offsets, lengths, {&view, 1}, rows},
               logits.data());
  return logits;
}

std::vector<Values> dtype_points(const Setting&) {
  std::vector<Values> all;
  for (int draw = 0; draw < kDraws; ++draw)
    for (Dtype dtype : kKvDtypes)
      if (dtype != Dtype::f32) all.push_back({{"dtype", dtype_name(dtype)}, {"sample", draw}});
  return all;
}

Measure open_logits(const Setting& setting) {
  auto demo = std::make_shared<Demo>();
  return [demo, setting](const Values& point) -> Result<Finding> {
    if (Status loaded = demo->load(); !loaded) return loaded.error();
    if (const int draw = point["sample"]; demo->draw != draw) {
      demo->draw = draw;
      Random random(seed_of(setting, draw) + 1);
      demo->text = demo->tokenizer->encode(facts_and_answers(random, setting.tiny ? 6 : 60, setting.tiny ? 3 : 20));
      demo->plain = logits_over(*demo, Dtype::f32);
    }
    const std::vector<float> got = logits_over(*demo, dtype_named(point["dtype"]));
    const size_t vocab = size_t(demo->config.vocab), n = demo->text.size();
    size_t agree = 0;
    double squares = 0, size = 0;
    for (size_t i = 0; i < n; ++i) {
      const float *p = demo->plain.data() + i * vocab, *q = got.data() + i * vocab;
      agree += std::max_element(p, p + vocab) - p == std::max_element(q, q + vocab) - q;
      double mean = 0;
      for (size_t v = 0; v < vocab; ++v) {
        if (!std::isfinite(q[v])) return Finding{{}, "a logit is not finite"};
        squares += (double(q[v]) - double(p[v])) * (double(q[v]) - double(p[v]));
        mean += double(p[v]) / double(vocab);
      }
      for (size_t v = 0; v < vocab; ++v) size += (double(p[v]) - mean) * (double(p[v]) - mean);
    }
    return Finding{{{{"positions", n},
                     {"greedy_agreement", double(agree) / double(n)},
                     {"error_over_size", std::sqrt(squares / size)}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("kv_dtype/logits", "cpu", dtype_points, open_logits);

}  // namespace
}  // namespace xpyd::experiments::kv_dtype_experiment
