// block_latency: what the size of a block does to requests, by how much of a block stays empty.
//
// PagedAttention (SOSP'23) Fig. 18b: OPT-13B on an A100 of 40 GB; latency for each output token by the block size,
// ShareGPT and Alpaca, a fixed pool. Published: on ShareGPT blocks of 16 to 128 are best; Alpaca's sequences are
// shorter than a large block: 16 and 32 are good, larger ones much worse.
//
// The real engine, policy and paged memory in virtual time: a step takes what the cost model says
// at half the FLOP/s and 0.8 of the bandwidth of an A100. What small blocks cost the kernel is not
// in it: that is experiment paged_attention, 1.0 to 1.3 times for blocks of 1.
//
// Arithmetic. 12 GB of KV at 0.8 MB a token are 15,000 tokens. ShareGPT: a sequence holds 161 + 338
// / 2 = 330 tokens over its life, and half a block. Blocks of 16: 44 sequences, a step reads 26 +
// 12 GB, 31 ms: 1,440 tokens/s, 4.2 requests/s, with 27 ms for each prompt 3.8. Blocks of 256 hold
// 330 of 458: 0.72 of the batch, steps of 27 ms: 0.82 of the tokens. At 3.3 requests/s blocks of 16
// keep up and those of 256 are at the edge: 1 to 5 times the latency; of 128 (0.84 of the batch)
// 0.95 to 1.6. Alpaca: 48 tokens over a life. Blocks of 16 hold 256 sequences, the most: some 75
// requests/s. Blocks of 256 hold 60: steps of 23 ms, 45 requests/s and less with the prompts. At 60
// a second the queue grows for as long as requests come, 33 s: 2 to 12 times; blocks of 32: 0.95
// to 1.2.
#include "base/random.h"
#include "batch/engine.h"
#include "experiments/lengths.h"
#include "experiments/tally.h"
#include "experiments/timed_model.h"

namespace xpyd::experiments::block_latency_experiment {
namespace {

constexpr Rates kRates = {312e12 * 0.5, 1.555e12 * 0.8};
constexpr int kPoolTokens = 15000;

ModelConfig opt_13b() {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = 40;
  c.hidden = 5120;
  c.intermediate = 13653;  // a gated MLP with as many parameters as OPT's 20,480
  c.n_heads = c.n_kv_heads = 40;
  c.head_dim = 128;
  c.vocab = 50272;
  c.max_position = 2048;
  return c;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* dataset : {"sharegpt", "alpaca"})
    for (int block : {1, 2, 4, 8, 16, 32, 64, 128, 256})
      for (int draw = 0; draw < kDraws; ++draw)
        all.push_back({{"dataset", dataset}, {"block", block}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string dataset = point["dataset"];
  const int n = setting.tiny ? 60 : dataset == "alpaca" ? 2000 : 1000;
  const double rate = dataset == "alpaca" ? 60 : 3.3;
  Result<LengthSet> lengths = request_lengths(dataset, n, setting, point["sample"]);
  if (!lengths) return lengths.error();
  KvOptions kv{.shape = kv_shape(shape_of_nothing(), Dtype::bf16),
               .block_tokens = point["block"],
               .max_sequence_tokens = 2048,
               .prefix_cache = false};
  kv.pool_bytes = size_t(kPoolTokens) * kv.shape.token_bytes();
  Result<std::shared_ptr<KvPool>> pool = make_block_pool("paged", kv);
  if (!pool) return pool.error();
  std::unique_ptr<KvMemory> memory = find_kv_scheme("paged")->make(pool.value(), kv);
  VirtualClock clock;
  TimedModel model({.config = opt_13b()}, kRates, clock);
  Engine engine(model, *memory, {.policy = find_batch_policy("prefill_first"), .max_batch = 256, .step_tokens = 2048},
                clock, nullptr);
  auto sink = std::make_shared<Tally>();
  sink->end_s.resize(size_t(n));
  Random random(seed_of(setting, point["sample"]));
  std::vector<double> arrivals;
  double due = 0;
  int64_t expected = 0;
  for (size_t i = 0; i < size_t(n) || !engine.idle();) {
    for (; i < size_t(n) && due <= clock.seconds; ++i, due += random.exponential() / rate) {
      const Lengths& wanted = lengths.value().requests[i];
      auto request = std::make_shared<Request>();
      request->id = i;
      request->prompt.assign(size_t(wanted.prompt), 1);
      request->sampling.temperature = 0;
      request->max_tokens = wanted.output;
      request->ignore_eos = true;
      request->arrival_s = due;
      arrivals.push_back(due);
      expected += wanted.output;
      engine.submit(make_sequence(request, {}, sink, std::make_shared<std::atomic<bool>>(false), nullptr));
    }
    if (engine.step()) continue;
    if (i == size_t(n)) return Finding{{}, "the engine stands still"};
    clock.seconds = due;
  }
  memory->check_invariants();
  if (sink->tokens != expected || sink->ended != n) return Finding{{}, "not every request got its tokens"};
  double normalised = 0;
  for (size_t i = 0; i < size_t(n); ++i)
    normalised += (sink->end_s[i] - arrivals[i]) / lengths.value().requests[i].output / n;
  return Finding{{{{"requests_per_s_offered", rate},
                   {"latency_per_token_s", normalised},
                   {"batch_mean", model.sequences / model.steps},
                   {"preemptions", engine.stats().preemptions},
                   {"lengths", lengths.value().source}}},
                 ""};
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("block_latency", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::block_latency_experiment
