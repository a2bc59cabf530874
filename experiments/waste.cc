// waste: where the bytes of a full KV pool go, and how many sequences fit in it.
//
// The real engine, policy and KV memory, over a model that computes nothing. Every step, while
// requests wait, each token of the pool is one of:
//   useful    holds KV
//   reserved  will hold KV before its sequence ends (PagedAttention: reservation)
//   internal  belongs to a sequence that will never fill it (internal fragmentation)
//   free      belongs to nobody, and yet nobody could be admitted (external; vLLM's watermark)
//
// Arithmetic. sharegpt: OPT-13B on 40 GB has 12 GiB of KV of 819,200 bytes a token, 15,728 tokens:
// 7 slots of 2,048, or 98 % of the pool in blocks. A sequence holds prompt + half its output on
// average over its life, weighted by its output: about 450 tokens, so slots use 450 / 2048 * 7 *
// 2048 / 15728 = 20 % (PagedAttention Fig. 2, Orca (Max): 20.4 %), and blocks hold about 4.5 times
// the sequences (section 6.2: 4.3 times). A block of b tokens wastes b / 2 a sequence: 16 / 2 / 450
// = 2 %, 256 / 2 / 450 = 22 %. mooncake: Llama-3-70B on 8 x 80 GB has about 400 GiB of KV of
// 327,680 bytes a token: 10 slots of 131,072. Sequences of about 12,300 tokens use 9 %; blocks hold
// ten times as many.
//
// slots (TurboMind) are those slots again: what they keep of ended sequences is not counted here. token: blocks of one.
// vattention: a row is a page group in each of 2 * layers tensors: of OPT-13B's 80 a group of 64 KiB holds 6.4 tokens
// and one of 2 MiB 205; of Llama-3-70B's 160, 2 KiB a token, 32 and 1,024. Waste is half a row a sequence: 3 / 450 =
// 0.7 % and 102 / 450 = 18 % (as a share of what is held); 16 / 12,300 and 512 / 12,300 = 4 %.
#include <algorithm>
#include <map>

#include "allocator/kv_plan.h"
#include "base/clock.h"
#include "base/random.h"
#include "batch/engine.h"
#include "experiments/lengths.h"
#include "experiments/null_model.h"
#include "experiments/tally.h"

namespace xpyd::experiments::waste_experiment {
namespace {

constexpr int kVocab = 64;  // a request's number is its prompt's first three tokens, base 64

struct Scene {
  int max_len, pool_tokens;
  double token_bytes;
  const char* model;
};
Scene scene_of(const std::string& dataset) {
  if (dataset == "sharegpt") return {2048, 15728, 819200, "OPT-13B, 12 GiB of KV"};
  return {131072, 1310720, 327680, "Llama-3-70B, 400 GiB of KV"};
}

// `row_tokens`: of a page group of 4 KiB in each of two tensors.
ModelConfig shape_of_nothing(int max_len, int row_tokens) {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = c.n_heads = c.n_kv_heads = 1;
  c.head_dim = 4096 / row_tokens / 2;
  c.hidden = c.intermediate = 8;
  c.vocab = kVocab;
  c.max_position = max_len;
  return c;
}

// Sees every step: which sequences hold KV, and how much of it.
class Watcher final : public Model {
 public:
  Watcher(const ModelConfig& config, const KvMemory& memory, const std::vector<Lengths>& requests)
      : null_(make_null_model(config)), memory_(memory), requests_(requests) {}
  const Engine* engine = nullptr;

  const ModelConfig& config() const override { return null_->config(); }
  void forward(const StepInput& step, float* logits) override {
    null_->forward(step, logits);
    const KvStats kv = memory_.stats();
    double useful = 0, later = 0;
    for (size_t s = 0; s < step.views.size(); ++s) {
      // A sequence is known by its first block, which it keeps until it ends or is preempted; then
      // it comes back with its whole prompt.
      const KvView& view = step.views[s];
      const int32_t first = view.contiguous() ? view.slot : view.block_table[0];
      const int32_t* ids = step.token_ids.data() + step.q_offsets[s];
      if (step.q_offsets[s + 1] - step.q_offsets[s] > 1)
        final_tokens_[first] = tokens_of(requests_[size_t(ids[0] + kVocab * (ids[1] + kVocab * ids[2]))]);
      const int now = step.kv_lengths[s], end = final_tokens_.at(first);
      const int held = (now + kv.block_tokens - 1) / kv.block_tokens * kv.block_tokens;
      useful += now;
      later += std::max(0, std::min(held, end) - now);
    }
    batch_peak = std::max(batch_peak, int(step.views.size()));
    if (engine->waiting() == 0) return;
    const double held = double(kv.active) * kv.block_tokens;
    if (useful + later > held) wrong = "sequences hold more tokens than their blocks";
    ++steps;
    batch += double(step.views.size());
    useful_tokens += useful;
    reserved_tokens += later;
    internal_tokens += held - useful - later;
  }
  Work work(const StepInput&) const override { return {}; }
  size_t weight_bytes() const override { return 0; }
  size_t scratch_bytes() const override { return 0; }

  // Sums over the steps with somebody waiting.
  double steps = 0, batch = 0, useful_tokens = 0, reserved_tokens = 0, internal_tokens = 0;
  int batch_peak = 0;
  std::string wrong;

 private:
  // The last token's KV is never written.
  static int tokens_of(const Lengths& r) { return r.prompt + r.output - 1; }

  std::unique_ptr<Model> null_;
  const KvMemory& memory_;
  const std::vector<Lengths>& requests_;
  std::map<int32_t, int> final_tokens_;  // by first block
};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* dataset : {"sharegpt", "mooncake"}) {
    std::vector<std::pair<const char*, int>> pools = {{"contiguous", 0}, {"slots", scene_of(dataset).max_len}};
    for (int row : dataset == std::string("sharegpt") ? std::vector{6, 204} : std::vector{32, 1024})
      pools.push_back({"vattention", row});
    pools.push_back({"token", 1});
    for (int block : setting.tiny ? std::vector{1, 16} : std::vector{1, 2, 4, 8, 16, 32, 64, 128, 256})
      pools.push_back({"paged", block});
    for (int draw = 0; draw < kDraws; ++draw)
      for (auto [allocator, block] : pools)
        all.push_back({{"dataset", dataset}, {"allocator", allocator}, {"block", block}, {"sample", draw}});
  }
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string dataset = point["dataset"];
  const int n = setting.tiny ? 400 : 2000;
  Result<LengthSet> lengths = request_lengths(dataset, n, setting, point["sample"]);
  if (!lengths) return lengths.error();
  const std::vector<Lengths>& requests = lengths.value().requests;
  const Scene scene = scene_of(dataset);
  const std::string allocator = point["allocator"];
  const bool groups = allocator == "vattention";
  ModelConfig config = shape_of_nothing(scene.max_len, groups ? int(point["block"]) : 2048);
  KvOptions kv{.shape = kv_shape(config, Dtype::bf16),
               .block_tokens = std::max(1, int(point["block"])),
               .max_sequence_tokens = scene.max_len,
               .prefix_cache = false,  // memory alone, not reuse
               .vattention = {.page_group_bytes = 4096, .max_sequences = 256, .map_ahead = false}};
  kv.pool_bytes = size_t(scene.pool_tokens) * kv.shape.token_bytes();
  Result<std::shared_ptr<KvPool>> pool = make_block_pool(allocator, kv);
  if (!pool) return pool.error();
  std::unique_ptr<KvMemory> memory = find_kv_scheme(allocator)->make(pool.value(), kv);
  Watcher model(config, *memory, requests);
  VirtualClock clock;
  Engine engine(model, *memory, {.policy = find_batch_policy("chunked"), .max_batch = 4096, .step_tokens = 1 << 24},
                clock, nullptr);
  model.engine = &engine;
  auto sink = std::make_shared<Tally>();
  Random random(seed_of(setting, point["sample"]));
  int64_t expected = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    auto request = std::make_shared<Request>();
    request->id = i + 1;
    request->prompt.resize(size_t(requests[i].prompt));
    for (int32_t& t : request->prompt) t = int32_t(random.below(kVocab));
    for (size_t digit = 0, rest = i; digit < 3; ++digit, rest /= kVocab)
      request->prompt[digit] = int32_t(rest % kVocab);
    request->sampling.temperature = 0;
    request->max_tokens = requests[i].output;
    request->ignore_eos = true;
    expected += requests[i].output;
    engine.submit(
        make_sequence(request, {.stands_for = request->n}, sink, std::make_shared<std::atomic<bool>>(false), nullptr));
  }
  while (!engine.idle())
    if (!engine.step()) return Finding{{}, "the engine stands still"};
  memory->check_invariants();
  if (!model.wrong.empty()) return Finding{{}, model.wrong};
  if (sink->tokens != expected || sink->ended_by(FinishReason::length) != int(requests.size()))
    return Finding{{}, "not every request got its tokens"};
  if (model.steps == 0) return invalid("the pool was never full: nobody waited");

  const double pool_tokens = model.steps * scene.pool_tokens;
  auto share = [&](double tokens) { return tokens / pool_tokens; };
  const double free = pool_tokens - model.useful_tokens - model.reserved_tokens - model.internal_tokens;
  const double wasted = pool_tokens - model.useful_tokens;
  return Finding{{{{"useful_share", share(model.useful_tokens)},
                   {"reserved_share", share(model.reserved_tokens)},
                   {"internal_share", share(model.internal_tokens)},
                   {"free_share", share(free)},
                   {"wasted_gib", share(wasted) * scene.pool_tokens * scene.token_bytes / (1 << 30)},
                   {"batch_mean", model.batch / model.steps},
                   {"batch_peak", model.batch_peak},
                   {"preemptions", engine.stats().preemptions},
                   {"requests", requests.size()},
                   {"lengths", lengths.value().source},
                   {"scene", scene.model}}},
                 ""};
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("waste", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::waste_experiment
