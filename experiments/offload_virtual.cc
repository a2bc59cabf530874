// offload_virtual: What does a host tier gain with the costs of the machine on which it was published?
// Paper: light-vllm (wde), experiments 3 to 5.
// Set-up: wde's experiments 3 to 5 (RTX 4090, Qwen2.5-3B and -7B) with the real engine, policy, paged memory and tier
//   on a virtual clock: 150 TFLOP/s, .8 TB/s, 2.1 us or 12 GB/s for a copy of a block's layer. `plan`: planning takes
//   no time (none), or the time of an engine in Python, before each step (sync) or during the step before (async-2).
// Command: make exp-offload_virtual (seconds; virtual).
// Expected, hits: 200 prompts of 1,000 tokens, 24 out: 42 ms of computing, 9.4 of copies, 10 of decode: equal up to .8,
//   all / none 3.5 to 6. rounds: 10 documents of 10,240: none .8 /s, prefix cache 50, tier 10 to 13; an answer of o
//   tokens adds o / 2 steps of 19 ms. chunks: 2.5 ms of planning, derived from steps of 32 (1.30), and .4 more with a
//   tier; the rest follows: 1,024 tokens 2.38 /s in sync. planned: all hits 1.22 to 1.3, none known 1.03 to 1.08.
// Found: prefix cache / none 52 (55), tier / none 12.7 (10.1), both / prefix cache 1.00 (.99); async-2 / sync 1.31 at
//   32 tokens (1.30).
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "allocator/kv_pool.h"
#include "allocator/offload/offloaded_memory.h"
#include "base/device/device.h"
#include "base/random.h"
#include "batch/engine/engine.h"
#include "experiments/experiment.h"
#include "experiments/simulated.h"
#include "experiments/tally.h"
#include "experiments/timed_model.h"

namespace xpyd::experiments::offload_virtual_experiment {
namespace {

namespace engine {

constexpr Rates kRates = {150e12, 0.8e12};
constexpr double kCallS = 2.1e-6, kLinkBytesPerS = 12e9;
constexpr double kPlanS = 2.5e-3, kPlanCopiesS = .4e-3;  // per step; kPlanCopiesS: in addition with an offload tier
constexpr int kBlock = 16;

ModelConfig qwen(bool large) {  // the shapes of Qwen2.5-7B and -3B
  ModelConfig c;
  c.family = "qwen2";
  c.n_layers = large ? 28 : 36;
  c.hidden = large ? 3584 : 2048;
  c.intermediate = large ? 18944 : 11008;
  c.n_heads = large ? 28 : 16;
  c.n_kv_heads = large ? 4 : 2;
  c.head_dim = 128;
  c.vocab = large ? 152064 : 151936;
  c.max_position = 32768;
  return c;
}

// Copies that are done when the link would have done them.
class TimedCopies final : public DeviceQueue {
 public:
  TimedCopies(VirtualClock& clock, double block_s, size_t block_bytes)
      : clock_(clock), byte_s_(block_s / double(block_bytes)) {}
  void copy(std::span<const Copy> copies, bool) override {
    free_at_ = std::max(free_at_, clock_.seconds);
    for (const Copy& c : copies) {
      std::memcpy(c.destination, c.source, c.bytes);
      free_at_ += double(c.bytes) * byte_s_;
    }
  }
  int64_t mark() override {
    ends_.push_back(free_at_);
    return int64_t(ends_.size());
  }
  bool reached(int64_t mark) override { return mark == 0 || ends_[size_t(mark - 1)] <= clock_.seconds; }
  void wait() override { clock_.seconds = std::max(clock_.seconds, free_at_); }

 private:
  VirtualClock& clock_;
  const double byte_s_;
  double free_at_ = 0;
  std::vector<double> ends_;
};

class TimedDevice final : public Device {
 public:
  TimedDevice(VirtualClock& clock, double block_s, size_t block_bytes)
      : clock_(clock), block_s_(block_s), block_bytes_(block_bytes) {}
  const char* name() const override { return "cpu"; }
  Result<std::shared_ptr<std::byte>> allocate(size_t bytes) override { return cpu_device().allocate(bytes); }
  std::unique_ptr<DeviceQueue> make_queue(Phase phase) override { return cpu_device().make_queue(phase); }
  std::unique_ptr<DeviceQueue> make_copy_queue(double) override {
    return std::make_unique<TimedCopies>(clock_, block_s_, block_bytes_);
  }

 private:
  VirtualClock& clock_;
  const double block_s_;
  const size_t block_bytes_;
};

// One engine over one memory, on its own clock.
class Bench {
 public:
  static Result<std::unique_ptr<Bench>> create(bool large, const std::string& cache, const std::string& plan,
                                               int max_batch, int tokens, int documents, int chunk) {
    const bool tier = cache == "host" || cache == "both";
    std::unique_ptr<Bench> b(new Bench(large, plan, tier));
    KvOptions kv{.shape = kv_shape(shape_of_nothing(), Dtype::bf16),
                 .block_tokens = kBlock,
                 .max_sequence_tokens = 2 * tokens,
                 .prefix_cache = cache == "device" || cache == "both"};
    kv.pool_bytes = size_t(documents + 2) * size_t(tokens + 4 * kBlock) * kv.shape.token_bytes();
    if (max_batch > 2)
      kv.pool_bytes = std::max(kv.pool_bytes, size_t(max_batch) * 2 * size_t(tokens) * kv.shape.token_bytes());
    kv.clock = &b->clock_;
    const CostModel cost{.config = qwen(large)};
    const size_t block_bytes = kBlock * kv.shape.token_bytes();
    const double copies = 2. * cost.config.n_layers, copy_bytes = kBlock * cost.kv_token_bytes() / copies;
    b->device_ = std::make_unique<TimedDevice>(b->clock_, copies * std::max(kCallS, copy_bytes / kLinkBytesPerS),
                                               block_bytes);
    Result<std::shared_ptr<KvPool>> pool = make_block_pool("paged", kv);
    if (!pool) return pool.error();
    b->memory_ = find_kv_scheme("paged")->make(pool.value(), kv);
    if (tier) {
      kv.device = b->device_.get();
      kv.tiers = {.host_bytes = kv.pool_bytes, .block_tokens = kBlock};
      Result<std::unique_ptr<KvMemory>> tiered = make_offloaded(std::move(b->memory_), kv);
      if (!tiered) return tiered.error();
      b->memory_ = std::move(tiered).value();
    }
    b->engine_ = std::make_unique<Engine>(
        b->model_, *b->memory_,
        EngineOptions{.policy = find_batch_policy("chunked"), .max_batch = max_batch, .step_tokens = chunk}, b->clock_,
        nullptr);
    return b;
  }
  ~Bench() {
    engine_.reset();
    memory_.reset();
  }

  struct Round {
    double seconds = 0, hit_share = 0;
  };
  Result<Round> ask(const std::vector<std::vector<int32_t>>& prompts, int output) {
    auto sink = std::make_shared<Tally>();
    int64_t asked = 0;
    for (const auto& prompt : prompts) {
      auto request = std::make_shared<Request>();
      request->id = next_id_++;
      request->prompt = prompt;
      request->sampling.temperature = 0;
      request->max_tokens = output;
      request->ignore_eos = true;
      asked += int64_t(prompt.size());
      engine_->submit(make_sequence(request, {.stands_for = request->n}, sink,
                                    std::make_shared<std::atomic<bool>>(false), nullptr));
    }
    const double start = clock_.seconds;
    while (!engine_->idle()) {
      if (!engine_->step()) clock_.seconds += 20e-6;  // while it waits for copies
      if (clock_.seconds - start > 1e5) return invalid("the engine makes no progress");
    }
    Round round{clock_.seconds - start, double(sink->cached_tokens) / double(asked)};
    if (sink->tokens != int64_t(prompts.size()) * output) return invalid("some requests did not get all their tokens");
    while (memory_->poll()) clock_.seconds += 20e-6;  // until all copies have left
    return round;
  }

 private:
  Bench(bool large, const std::string& plan, bool tier)
      : model_(
            shape_of_nothing(),
            [of = StepCost{CostModel{.config = qwen(large)}, kRates}, plan,
             planning = kPlanS + (tier ? kPlanCopiesS : 0)](const StepInput& step) {
              const double computing = of.seconds(step);
              return plan == "sync" ? computing + planning : plan == "none" ? computing : std::max(computing, planning);
            },
            [this](double seconds) { clock_.seconds += seconds; }) {}

  VirtualClock clock_;
  TimedModel model_;
  std::unique_ptr<TimedDevice> device_;
  std::unique_ptr<KvMemory> memory_;
  std::unique_ptr<Engine> engine_;
  uint64_t next_id_ = 1;
};

std::vector<int32_t> words(uint64_t seed, int n) {
  Random random(seed);
  std::vector<int32_t> tokens;
  for (int i = 0; i < n; ++i) tokens.push_back(int32_t(random.below(64)));
  return tokens;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  const auto add = [&all](const char* scene, const char* cache, double hits, int output, int chunk, const char* plan) {
    all.push_back(
        {{"scene", scene}, {"cache", cache}, {"hits", hits}, {"output", output}, {"chunk", chunk}, {"plan", plan}});
  };
  for (const char* cache : {"none", "device", "host"})
    for (double hits : {0., 0.2, 0.4, 0.6, 0.8, 1.})
      if (hits == 0 || *cache != 'n') add("hits", cache, hits, 24, 1024, "none");
  for (const char* cache : {"none", "device", "both", "host"})
    for (int output : {2, 4, 8, 16, 32, 64, 128}) add("rounds", cache, 1, output, 1024, "none");
  for (const char* plan : {"sync", "async-2"}) {
    for (const char* cache : {"none", "device", "host", "both"})
      for (int chunk : {1024, 768, 512, 384, 256, 128, 64, 32}) add("chunks", cache, 0, 1, chunk, plan);
    add("planned", "none", 0, 24, 1024, plan);
    for (int tenth = 0; tenth <= 10; ++tenth) add("planned", "device", tenth / 10., 24, 1024, plan);
  }
  return all;
}

struct Scene {
  const char* name;
  bool large;
  int prompts, tokens, clients, rounds;
};
constexpr Scene kScenes[] = {{"hits", false, 200, 1000, 32, 1},
                             {"rounds", true, 10, 10240, 2, 3},
                             {"chunks", false, 4, 8192, 1, 1},
                             {"planned", false, 1000, 1000, 32, 1}};

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string name = point["scene"];
  Scene scene = *std::ranges::find(kScenes, name, &Scene::name);
  int output = point["output"];
  if (setting.tiny) scene.prompts = 3, scene.tokens = 64, output = std::min(output, 24);
  const int n = scene.prompts, tokens = scene.tokens;
  auto bench = Bench::create(scene.large, point["cache"], point["plan"], scene.clients, tokens, n, point["chunk"]);
  if (!bench) return bench.error();
  const int known = int(double(point["hits"]) * tokens);
  std::vector<std::vector<int32_t>> prompts, beginnings;
  for (int i = 0; i < n; ++i) {
    prompts.push_back(words(setting.seed * 100000 + uint64_t(i), known));
    beginnings.push_back(prompts.back());
    const std::vector<int32_t> rest = words(setting.seed * 100000 + 50000 + uint64_t(i), tokens + 1 - known);
    prompts.back().insert(prompts.back().end(), rest.begin(), rest.end());
    if (known > 0) beginnings.back().push_back(0);
  }
  Finding found;
  if (scene.rounds == 1 && known > 0)
    if (auto first = bench.value()->ask(beginnings, 1); !first) return first.error();
  for (int round = 1; round <= scene.rounds; ++round) {
    Result<Bench::Round> r = bench.value()->ask(prompts, output);
    if (!r) return r.error();
    found.rows.push_back(
        {{"round", round}, {"requests_per_s", n / r.value().seconds}, {"hit_share", r.value().hit_share}});
  }
  return found;
}

REGISTER_EXPERIMENT("offload_virtual", "cpu", points, each<run>);

}  // namespace engine

}  // namespace
}  // namespace xpyd::experiments::offload_virtual_experiment
