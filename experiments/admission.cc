// admission: what it is worth to look ahead before a sequence is admitted.
//
// The real engine, policy and KV memory in virtual time: a step takes what the cost model says for
// LLaMA-7B in 16 bit at half the FLOP/s and 0.8 of the bandwidth of an A800. 2,000 requests of
// ShareGPT's lengths at 200 a second, as lightllm's benchmark (1.9 times the requests of vLLM
// 0.1.2, 188.85 s against 361.79 s: two whole systems, of which the admission rule is one part).
// `cap` is max_tokens over what is generated: 1 where it is known, 2 where users ask for twice.
//
// Arithmetic. 80 GB less 13.5 GB of weights, 0.5 MB a token: 117,000 tokens. A sequence holds 161 + 338 / 2 = 330
// tokens over its life, a little more weighted by its output (450): 260 to 350 at once. `prompt` admits until prompts
// fill the pool, and everybody then grows by 338 tokens on average: hundreds are preempted and compute some 400 tokens
// again, 14 GFLOP each at 156 TFLOP/s = 36 ms; 300 to 3,000 of them are 11 to 108 s beside some 2,700 decode steps of
// 50 ms = 140 s. peak_tokens preempts nobody and runs as many: 1.02 to 1.7 times the requests a second. `longest` holds
// prompt + cap for all: 450 / 620 of the batch, and steps of fewer sequences are little shorter (13.5 GB of 70 GB are
// weights): 1.02 to 1.4. With caps twice as long, peak_tokens holds back what nobody uses.
#include "batch/admission.h"

#include <map>

#include "base/random.h"
#include "batch/engine.h"
#include "experiments/lengths.h"
#include "experiments/tally.h"
#include "experiments/timed_model.h"

namespace xpyd::experiments::admission_experiment {
namespace {

constexpr int kVocab = 64;  // a request's number is its prompt's first three tokens, base 64
constexpr int kEnd = kVocab - 1;
constexpr int kPoolTokens = 117000;
constexpr Rates kRates = {312e12 * 0.5, 2.0e12 * 0.8};

ModelConfig llama_7b() {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = 32;
  c.hidden = 4096;
  c.intermediate = 11008;
  c.n_heads = c.n_kv_heads = 32;
  c.head_dim = 128;
  c.vocab = 32000;
  c.max_position = 2048;
  return c;
}

// Ends each sequence where the trace does.
class Ending final : public TimedModel {
 public:
  Ending(const std::vector<Lengths>& requests, VirtualClock& clock)
      : TimedModel({.config = llama_7b()}, kRates, clock), requests_(requests) {}

  void forward(const StepInput& step, float* logits) override {
    TimedModel::forward(step, logits);
    for (size_t s = 0; s < step.views.size(); ++s) {
      // A sequence keeps its first block until it ends or comes back with its whole prompt.
      const int n = step.q_offsets[s + 1] - step.q_offsets[s];
      const int32_t* ids = step.token_ids.data() + step.q_offsets[s];
      int& request = request_[step.views[s].block_table[0]];
      if (step.kv_lengths[s] == n) request = ids[0] + kVocab * (ids[1] + kVocab * ids[2]);
    }
    size_t s = 0;
    for (size_t r = 0; r < step.logit_rows.size(); ++r) {
      while (step.q_offsets[s + 1] <= step.logit_rows[r]) ++s;
      const Lengths& wanted = requests_[size_t(request_.at(step.views[s].block_table[0]))];
      const bool ends = step.kv_lengths[s] + 1 == wanted.prompt + wanted.output;
      logits[r * kVocab + kEnd] = ends ? 1e6f : -1e6f;
    }
  }

 private:
  const std::vector<Lengths>& requests_;
  std::map<int32_t, int> request_;  // by first block
};

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const AdmissionRule& rule : admission_rules())
    for (const char* allocator : {"token", "paged"})
      for (int cap : {1, 2})
        for (int draw = 0; draw < kDraws; ++draw)
          all.push_back({{"rule", rule.name}, {"allocator", allocator}, {"cap", cap}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const int n = setting.tiny ? 150 : 2000;
  Result<LengthSet> lengths = request_lengths("sharegpt", n, setting, point["sample"]);
  if (!lengths) return lengths.error();
  const std::vector<Lengths>& requests = lengths.value().requests;
  KvOptions kv{.shape = kv_shape(shape_of_nothing(), Dtype::bf16),
               .block_tokens = 16,
               .max_sequence_tokens = 4096,
               .prefix_cache = false};
  kv.pool_bytes = size_t(kPoolTokens) / (setting.tiny ? 16 : 1) * kv.shape.token_bytes();
  const std::string allocator = point["allocator"], rule = point["rule"];
  Result<std::shared_ptr<KvPool>> pool = make_block_pool(allocator, kv);
  if (!pool) return pool.error();
  std::unique_ptr<KvMemory> memory = find_kv_scheme(allocator)->make(pool.value(), kv);
  VirtualClock clock;
  Ending model(requests, clock);
  Engine engine(model, *memory,
                {.policy = find_batch_policy("prefill_first"),
                 .admission = find_admission_rule(rule),
                 .max_batch = 1024,
                 .step_tokens = 8192,
                 .eos_tokens = {kEnd}},
                clock, nullptr);
  auto sink = std::make_shared<Tally>();
  Random random(seed_of(setting, point["sample"]));
  double due = 0;
  int64_t expected = 0;
  for (size_t i = 0; i < requests.size();) {
    for (; i < requests.size() && due <= clock.seconds; ++i, due += random.exponential() / 200) {
      auto request = std::make_shared<Request>();
      request->id = i + 1;
      request->prompt.assign(size_t(requests[i].prompt), 1);
      for (size_t digit = 0, rest = i; digit < 3; ++digit, rest /= kVocab)
        request->prompt[digit] = int32_t(rest % kVocab);
      request->sampling.temperature = 0;
      request->max_tokens = int(point["cap"]) * requests[i].output;
      request->arrival_s = due;
      expected += requests[i].output;
      engine.submit(make_sequence(request, {.stands_for = request->n}, sink, std::make_shared<std::atomic<bool>>(false),
                                  nullptr));
    }
    if (!engine.step()) clock.seconds = due;
  }
  while (!engine.idle())
    if (!engine.step()) return Finding{{}, "the engine stands still"};
  memory->check_invariants();
  if (sink->tokens != expected || sink->ended_by(FinishReason::stop) != int(requests.size()))
    return Finding{{}, "not every request got its tokens"};
  double prompts = 0;
  for (const Lengths& r : requests) prompts += r.prompt;
  return Finding{{{{"seconds", clock.seconds},
                   {"requests_per_s", n / clock.seconds},
                   {"preemptions", engine.stats().preemptions},
                   {"recomputed_share", model.tokens / (prompts + double(expected) - n) - 1},
                   {"batch_mean", model.sequences / model.steps},
                   {"mean_latency_s", sink->latency_s / n},
                   {"lengths", lengths.value().source}}},
                 ""};
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("admission", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::admission_experiment
