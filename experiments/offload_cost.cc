// offload_cost: How long does a prompt take to compute, and how long does its KV take to go to the host and back?
// Paper: light-vllm (wde), experiment 1; vLLM issue 35990.
// Set-up: llama-mini in f32; the time to compute N tokens in chunks of 512 through the cluster, and to move their KV to
//   the host tier and back (wde, experiment 1: 5 to 19 times). Every byte that comes back is compared.
// Command: make exp-offload_cost (a minute; measured, counted, computed).
// Expected: a token is 50 MFLOP at 150 GFLOP/s, .36 ms, and 8 KiB at 3 to 8 GB/s: 130 to 360 times. So `link` is also
//   set to a fifth of the prefill time, as for their 3B.
// Found: on a CPU moving is 140 to 340 times as fast as computing; over the set link 5.3. The published prefill times
//   follow within a tenth.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/device/device.h"
#include "experiments/contestant.h"
#include "experiments/offload.h"
#include "experiments/stats.h"
#include "experiments/swapper.h"
#include "model/cost/cost_model.h"

namespace xpyd::experiments::offload_cost_experiment {
namespace {

namespace cost {

constexpr int kBlock = 16;  // tokens per block of the pool and the host tier, by default

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int n : setting.tiny ? std::vector{64} : std::vector{256, 512, 1024, 2048})
    all.push_back({{"tokens", n}, {"link_times", 0}});
  all.push_back({{"tokens", setting.tiny ? 64 : 1024}, {"link_times", 5}});
  return all;
}

Measure open(const Setting& setting) {
  std::vector<std::string> common = {offload_model(setting), "--max-batch", "8", "--kv-bytes"};
  if (setting.tiny)
    common.insert(common.end(), {"4MiB"});
  else
    common.insert(common.end(), {"128MiB", "--max-model-len", "4096"});
  auto bed = std::make_shared<Bed>(setting, common);
  auto asked = std::make_shared<int>(0);
  return [=](const Values& point) -> Result<Finding> {
    const int n = point["tokens"];
    const double times = point["link_times"];
    Result<std::string> gbps = slow_link(*bed, setting, times);
    if (!gbps) return gbps.error();
    Result<std::string> wrong = bed->open({"--topology", "1C", "--chunk-tokens", "512", "--prefix-cache", "off",
                                           "--host-kv-bytes", setting.tiny ? "4MiB" : "128MiB", "--kv-copy-gbps",
                                           gbps.value()});
    if (!wrong) return wrong.error();
    if (!wrong.value().empty()) return Finding{{}, wrong.value()};
    std::vector<double> prefill, reuse;
    for (int round = 0; round < (setting.tiny ? 1 : 3); ++round) {
      // The last token is always computed, because its logits are needed.
      const std::vector<BenchRequest> prompt = {document(setting.seed, (*asked)++, n + 1, 1)};
      Run computed = run_load(bed->build(), prompt, {});
      if (times > 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // while it is copied out
      Run fetched = run_load(bed->build(), prompt, {});
      for (const Run* run : {&computed, &fetched})
        if (!run->wrong.empty()) return Finding{{}, run->wrong};
      if (fetched.logits_hash != computed.logits_hash)
        return Finding{{}, "the logits differ between loaded and computed KV"};
      if (fetched.hit_share * (n + 1) < n - 0.5) return Finding{{}, "only part of a prompt's KV was loaded"};
      prefill.push_back(computed.ttft_ms[0]);
      reuse.push_back(fetched.ttft_ms[0]);
    }
    auto swapper = Swapper::create(kv_shape(bed->build().config, Dtype::f32), KvOrder::layer_major, kBlock, n, true,
                                   std::stod(gbps.value()), setting.seed);
    if (!swapper) return swapper.error();
    std::string unequal;
    const Swap swap = swap_time(*swapper.value(), setting.tiny ? 1 : 5, unequal);
    if (!unequal.empty()) return Finding{{}, unequal};
    const double prefill_ms = summarize(prefill).mean;
    return Finding{{{{"copy_gbps", std::stod(gbps.value())},  // 0: no limit
                     {"prefill_ms", prefill_ms},
                     {"out_ms", 1e3 * swap.out_s},
                     {"in_ms", 1e3 * swap.in_s},
                     {"reuse_ms", summarize(reuse).mean},
                     {"prefill_over_out", 1e-3 * prefill_ms / swap.out_s},
                     {"prefill_over_in", 1e-3 * prefill_ms / swap.in_s},
                     {"kv_bytes", swap.bytes}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("offload_cost", "cpu", points, open);

}  // namespace cost

// offload_cost/copy: 64 MiB of KV with 4 KiB per token between pool and host tier, by block size. In token_major a
// block is one piece. In layer_major a piece is a token's row of a layer, 512 bytes.
//
// Expected: memcpy moves 6 to 10 GB/s, and a piece costs 50 to 100 ns beside its bytes, so 4 KiB reach .75 of 2 MiB.
// The engine takes 1 to 5 us for a block's hash and entry. A card's copy call takes 2.1 us: its knee is at 25 KiB.
namespace copies {

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  auto add = [&](const char* order, const char* blocks, const std::vector<int>& sizes) {
    for (int block : sizes)
      if (!setting.tiny || block <= 16) all.push_back({{"order", order}, {"blocks", blocks}, {"block", block}});
  };
  add("token_major", "scattered", {1, 2, 4, 8, 16, 64, 512});
  add("layer_major", "scattered", {1, 16, 512});
  return all;
}

Measure open(const Setting& setting) {
  return [=](const Values& point) -> Result<Finding> {
    const KvShape shape{.n_layers = 4, .n_kv_heads = 2, .head_dim = 64, .dtype = Dtype::f32};
    const int n_tokens = setting.tiny ? 256 : 16384, block = point["block"];
    const KvOrder order = point["order"] == "token_major" ? KvOrder::token_major : KvOrder::layer_major;
    auto swapper = Swapper::create(shape, order, block, n_tokens, point["blocks"] == "scattered", 0, setting.seed);
    if (!swapper) return swapper.error();
    std::string wrong;
    const Swap s = swap_time(*swapper.value(), setting.tiny ? 1 : 3, wrong);
    if (!wrong.empty()) return Finding{{}, wrong};
    const size_t bytes = size_t(s.bytes);
    const double n_blocks = double(n_tokens / block);
    return Finding{{{{"block_bytes", size_t(block) * shape.token_bytes()},
                     {"bytes", bytes},
                     {"copies_out", s.copies_out},
                     {"copies_in", s.copies_in},
                     {"out_gbps", 1e-9 * double(bytes) / s.out_s},
                     {"in_gbps", 1e-9 * double(bytes) / s.in_s},
                     {"engine_us_per_block", 1e6 * s.engine_out_s / n_blocks}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("offload_cost/copy", "cpu", points, open);

}  // namespace copies

// offload_cost/shapes: experiment 1 over its eight model shapes by the card's costs: 8,192 tokens in steps of 1,024 at
// 150 TFLOP/s (twice that in fp8) and .8 TB/s, and 2.1 us or 12 GB/s for each copy of a block's layer, K or V.
//
// Expected: 32B: 3.5 s and .15 of attention (3.69), 65,536 copies of 2.73 us 179 ms (.19, .21). 7B .90 (.84) and 60 ms;
// 3B .40 (.40) and 77; glm-9b .95 to 1.1 (1.08) and 86; 8B .85 to .95 (.89) and 90. In fp8 half of the time of the
// products (they also quantise).
namespace shapes {

constexpr int kTokens = 8192, kStep = 1024, kBlock = 16;
constexpr double kFlopsPerS = 150e12, kBytesPerS = .8e12, kCallS = 2.1e-6, kLinkBytesPerS = 12e9;

struct Shape {
  const char* name;
  int layers, hidden, intermediate, heads, kv_heads, vocab;
  double weight_bytes;  // per element
  bool fp8;             // products in fp8
};
constexpr Shape kShapes[] = {{"Qwen2.5-32B-int4", 64, 5120, 27648, 40, 8, 152064, .5, false},
                             {"Qwen2.5-7B", 28, 3584, 18944, 28, 4, 152064, 2, false},
                             {"Qwen2.5-7B-fp8", 28, 3584, 18944, 28, 4, 152064, 1, true},
                             {"Qwen2.5-3B", 36, 2048, 11008, 16, 2, 151936, 2, false},
                             {"glm-4-9b", 40, 4096, 13696, 32, 4, 151552, 2, false},
                             {"glm-4-9b-fp8", 40, 4096, 13696, 32, 4, 151552, 1, true},
                             {"Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256, 2, false},
                             {"Llama-3.1-8B-fp8", 32, 4096, 14336, 32, 8, 128256, 1, true}};

ModelConfig config_of(const Shape& s) {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = s.layers, c.hidden = s.hidden, c.intermediate = s.intermediate;
  c.n_heads = s.heads, c.n_kv_heads = s.kv_heads, c.head_dim = 128;
  c.vocab = s.vocab, c.max_position = 32768;
  return c;
}

// Attention's products are in 16 bits, whatever the weights are.
double card_prefill_s(const Shape& s) {
  const CostModel cost{.config = config_of(s)};
  double seconds = 0;
  for (int at = 0; at < kTokens; at += kStep) {
    const Work all = cost.prefill(kStep, at, at + kStep == kTokens),
               near = cost.prefill(kStep, 0, at + kStep == kTokens);
    const double attention = all.flops - near.flops;
    seconds += std::max(near.flops / (s.fp8 ? 2 : 1) / kFlopsPerS + attention / kFlopsPerS,
                        double(cost.config.parameters()) * s.weight_bytes / kBytesPerS);
  }
  return seconds;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const Shape& s : kShapes) all.push_back({{"model", s.name}});
  return all;
}

Result<Finding> run(const Values& point, const Setting&) {
  const std::string name = point["model"];
  const Shape& s = *std::ranges::find(kShapes, name, &Shape::name);
  const double copies = 2. * s.layers * kTokens / kBlock;
  const double bytes = double(kTokens) * double(kv_shape(config_of(s), Dtype::bf16).token_bytes());
  return Finding{{{{"copies", copies},
                   {"copy_bytes", bytes / copies},
                   {"card_prefill_s", card_prefill_s(s)},
                   {"card_swap_s", copies * std::max(kCallS, bytes / copies / kLinkBytesPerS)}}},
                 ""};
}

REGISTER_EXPERIMENT("offload_cost/shapes", "cpu", points, each<run>);

}  // namespace shapes

// offload_cost/trace: when steps compute, and when KV is copied (experiment 2). One engine with the host tier, stepped
// by hand. Its copies pass a device that records when each was requested and done. The link has the published speed:
// 1,024 tokens take .32 of a step. A prompt of 2 x 1,024 runs without the tier, with it, and then three times at once.
//
// Expected: a copy takes .32 of a step, .25 to .42 by the noise of steps. The tokens of the first step go out during
// the second: .95 or more. The second step beside a copy: .93 to 1.07.
namespace trace {

constexpr double kLinkShare = 0.32;  // of a step: 16 ms of 50

struct Span {
  std::string what;  // "step", "out" or "in"
  double begin_s, end_s;
  int64_t tokens;  // copied, or of prompts in a step
};

// The spans of the engine and its copies, in the order of their ends.
class Spans {
 public:
  void add(Span span) {
    std::lock_guard lock(mutex_);
    spans_.push_back(std::move(span));
  }
  std::vector<Span> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(spans_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Span> spans_;
};

// A copy queue that records each copy when it is done, within 0.1 ms. A copy begins when it is requested, or when the
// one before it is done.
class TracedQueue final : public DeviceQueue {
 public:
  TracedQueue(double gbps, std::string name, size_t token_bytes, Spans& trace)
      : queue_(cpu_device().make_copy_queue(gbps)),
        name_(std::move(name)),
        token_bytes_(token_bytes),
        trace_(trace),
        watcher_([this] { watch(); }) {}
  ~TracedQueue() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    posted_.notify_one();
    watcher_.join();
  }
  void copy(std::span<const Copy> copies, bool read_soon) override {
    size_t bytes = 0;
    for (const Copy& copy : copies) bytes += copy.bytes;
    const double now = clock_.now();
    queue_->copy(copies, read_soon);
    {
      std::lock_guard lock(mutex_);
      asked_.push_back({queue_->mark(), now, int64_t(bytes / token_bytes_)});
    }
    posted_.notify_one();
  }
  int64_t mark() override { return queue_->mark(); }
  bool reached(int64_t mark) override { return queue_->reached(mark); }
  void wait() override { queue_->wait(); }

 private:
  struct Asked {
    int64_t mark;
    double at_s;
    int64_t tokens;
  };
  void watch() {
    double free_s = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      posted_.wait(lock, [this] { return stop_ || !asked_.empty(); });
      if (asked_.empty()) return;
      const Asked copy = asked_.front();
      asked_.pop_front();
      lock.unlock();
      while (!queue_->reached(copy.mark)) std::this_thread::sleep_for(std::chrono::microseconds(50));
      const double now = clock_.now();
      trace_.add({name_, std::max(copy.at_s, free_s), now, copy.tokens});
      free_s = now;
      lock.lock();
    }
  }

  const std::unique_ptr<DeviceQueue> queue_;
  const std::string name_;
  const size_t token_bytes_;
  Spans& trace_;
  RealClock clock_;
  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<Asked> asked_;
  bool stop_ = false;
  std::thread watcher_;  // the last member, because the thread uses the others
};

// The CPU with recorded copies. An offload tier makes its outgoing queue first.
class TracedDevice final : public Device {
 public:
  TracedDevice(size_t token_bytes, Spans& trace) : token_bytes_(token_bytes), trace_(trace) {}
  const char* name() const override { return cpu_device().name(); }
  Result<std::shared_ptr<std::byte>> allocate(size_t bytes) override { return cpu_device().allocate(bytes); }
  std::unique_ptr<DeviceQueue> make_queue(Phase phase) override { return cpu_device().make_queue(phase); }
  std::unique_ptr<DeviceQueue> make_copy_queue(double gbps) override {
    return std::make_unique<TracedQueue>(gbps, n_queues_++ % 2 ? "in" : "out", token_bytes_, trace_);
  }

 private:
  const size_t token_bytes_;
  Spans& trace_;
  int n_queues_ = 0;
};

class Scene {
 public:
  explicit Scene(const Setting& setting)
      : setting_(setting),
        step_tokens_(setting.tiny ? 64 : 1024),
        team_(std::max(1, int(std::thread::hardware_concurrency()))),
        trace_(std::make_unique<Spans>()),
        device_(std::make_unique<TracedDevice>(token_kv_bytes(setting), *trace_)) {}

  Result<Finding> run() {
    if (!with_)
      if (Status status = open(); !status) return status.error();
    const std::vector<int32_t> prompt = tokens(2 * step_tokens_, ++asked_);
    const int32_t kOutput = 2;
    Finding found;
    auto part = [&](const char* name, Contestant& engine, int n) {
      trace_->take();
      const double start = clock_.now();
      for (int i = 0; i < n; ++i) engine.submit(prompt, kOutput);
      while (!engine.engine().idle()) {
        const double begin = clock_.now();
        const EngineStats before = engine.engine().stats();
        engine.engine().step();
        const EngineStats& after = engine.engine().stats();
        if (after.steps > before.steps)
          trace_->add({"step", begin, clock_.now(), int64_t(after.work.tokens - before.work.tokens)});
        else  // every sequence waits for KV
          std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      while (engine.memory().poll()) std::this_thread::sleep_for(std::chrono::microseconds(100));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // so that the watchers have seen it
      for (const Span& span : trace_->take())
        found.rows.push_back({{"part", name},
                              {"what", span.what},
                              {"begin_ms", 1e3 * (span.begin_s - start)},
                              {"end_ms", 1e3 * (span.end_s - start)},
                              {"tokens", span.tokens}});
    };
    const OffloadStats before = with_->memory().stats().tiers;
    part("without", *without_, 1);
    part("computed", *with_, 1);
    part("swapped in", *with_, 3);
    const OffloadStats after = with_->memory().stats().tiers;
    const uint64_t one = std::exchange(without_hash_, without_->logits_hash()),
                   four = std::exchange(with_hash_, with_->logits_hash());
    if (with_hash_ - four != 4 * (without_hash_ - one))
      found.wrong = "the logits differ between KV that is swapped in and KV that is computed";
    const int64_t hits = after.host_hit_tokens - before.host_hit_tokens;
    if (hits < 3 * (2 * step_tokens_ - 16))
      found.wrong = "only " + std::to_string(hits) + " tokens of three prompts were swapped in";
    for (Contestant* engine : {without_.get(), with_.get()})
      if (std::string wrong = engine->wrong(); !wrong.empty()) found.wrong = wrong;
    return found;
  }

 private:
  std::vector<int32_t> tokens(int n, uint64_t number) const {
    Random random(setting_.seed * 1000 + number);
    std::vector<int32_t> ids(static_cast<size_t>(n));
    for (int32_t& id : ids) id = int32_t(random.below(uint64_t(model_->config().vocab)));
    return ids;
  }

  Result<std::unique_ptr<Contestant>> contestant(double copy_gbps) {
    const int longest = 2 * step_tokens_ + 32;
    KvOptions kv{
        .shape = kv_shape(model_->config(), Dtype::f32), .max_sequence_tokens = longest, .prefix_cache = false};
    kv.pool_bytes = size_t(4 * longest) * kv.shape.token_bytes();
    if (copy_gbps > 0) {
      kv.tiers = {.host_bytes = size_t(8 * longest) * kv.shape.token_bytes(), .copy_gbps = copy_gbps};
      kv.device = device_.get();
    }
    return Contestant::create("paged", *model_, kv,
                              {.policy = find_batch_policy("chunked"), .max_batch = 4, .step_tokens = step_tokens_});
  }

  Status open() {
    const std::string dir = offload_model(setting_);
    Result<ModelConfig> config = load_model_config(dir);
    if (!config) return config.error();
    auto weights = load_weights(dir, config.value(), {.dummy = true}, team_);
    if (!weights) return weights.error();
    model_ = make_llama(weights.value(), team_, step_tokens_, 4);
    Result<std::unique_ptr<Contestant>> without = contestant(0);
    if (!without) return without.error();
    without_ = std::move(without).value();
    std::vector<double> steps;
    for (int i = 0; i < 2; ++i) {
      without_->submit(tokens(2 * step_tokens_, ++asked_), 1);
      while (!without_->engine().idle()) steps.push_back(without_->step());
    }
    const double bytes = double(step_tokens_) * double(token_kv_bytes(setting_));
    auto with = contestant(1e-9 * bytes / (kLinkShare * summarize(steps).mean));
    if (!with) return with.error();
    with_ = std::move(with).value();
    without_hash_ = without_->logits_hash();
    return ok();
  }

  const Setting setting_;
  const int step_tokens_;
  ThreadTeam team_;
  RealClock clock_;
  std::unique_ptr<Spans> trace_;
  std::unique_ptr<TracedDevice> device_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Contestant> without_, with_;
  uint64_t asked_ = 0, without_hash_ = 0, with_hash_ = 0;
};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int round = 0; round < (setting.tiny ? 1 : 3); ++round) all.push_back({{"round", round}});
  return all;
}

Measure open(const Setting& setting) {
  auto scene = std::make_shared<Scene>(setting);
  return [scene](const Values&) { return scene->run(); };
}

REGISTER_EXPERIMENT("offload_cost/trace", "cpu", points, open);

}  // namespace trace

}  // namespace
}  // namespace xpyd::experiments::offload_cost_experiment
