// offload_trace: on one clock, when do steps compute, and when is KV copied out and in?
//
// KV offloading (wde), experiment 2: profiles of a 3B model, steps of 1,024 tokens, the pool's own prefix cache off. A
// prompt of 2 x 1,024 tokens goes out: 16 ms for 1,024 tokens, beside steps of 50 ms (0.40 s for 8,192). Then equal
// prompts come in: the first is computed, three are swapped in; "two streams, and swapping hardly disturbs computing".
//
// One engine, stepped by hand, over paged memory with the real host tier; its copies go through a device that notes
// when each was asked for and when it was done. llama-mini in f32 on both cores; the link is set to what theirs was
// beside their steps: 1,024 tokens take 0.32 of a step. Each round is new prompts: computed without the tier, computed
// with it, then three times the same, together. Two tokens of output each.
//
// Arithmetic. A copy of 8 MiB is 1 to 2 ms of memcpy and then waits for the link: in all 0.32 of
// the step in which it was computed, the bounds are the wavering of one step against another: 0.25
// to 0.42. What the first step has computed goes out beside the second, and is done before that
// ends: all of it, 0.95 or more with what the engine does between steps. The second step beside a
// copy that takes 2 ms of a core, of some 370 ms on two: 0.3 % longer; a step wavers by more than
// that: 0.93 to 1.07. Of the three that come back each brings 2,032 of 2,048 tokens over the link
// (0.635 of a step, one after the other: 1.9 steps) and computes 16 tokens and 2 steps of one, some
// 25 ms or 0.07 steps, two of these beside the next one's copy: 1.95 to 2.1 steps for all three,
// where one computed prompt takes 2.05: 0.95 to 1.03, with the wavering of steps 0.9 to 1.1, and a
// third of what three take. Between the first
// copy in and the last the link has a gap only where nobody asks: all three ask at once, so it is
// busy for 0.95 of that time or more.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/device.h"
#include "base/stats.h"
#include "experiments/contestant.h"
#include "experiments/offload.h"

namespace xpyd::experiments::offload_trace_experiment {
namespace {

constexpr double kLinkShare = 0.32;  // of a step: 16 ms of 50

struct Span {
  std::string what;  // step, out, in
  double begin_s, end_s;
  int64_t tokens;  // copied; of a step, of prompts
};

// The spans of engine and copies, in the order in which they ended.
class Trace {
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

// A copy queue whose copies are noted when they are done, to 0.1 ms. A copy begins when it was
// asked for, or when the one before it was done.
class TracedQueue final : public DeviceQueue {
 public:
  TracedQueue(double gbps, std::string name, size_t token_bytes, Trace& trace)
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
  Trace& trace_;
  RealClock clock_;
  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<Asked> asked_;
  bool stop_ = false;
  std::thread watcher_;  // last: it uses the others
};

// The CPU, with traced copies. A tier makes its queue out first.
class TracedDevice final : public Device {
 public:
  TracedDevice(size_t token_bytes, Trace& trace) : token_bytes_(token_bytes), trace_(trace) {}
  const char* name() const override { return cpu_device().name(); }
  Result<std::shared_ptr<std::byte>> allocate(size_t bytes) override { return cpu_device().allocate(bytes); }
  std::unique_ptr<DeviceQueue> make_queue(Phase phase) override { return cpu_device().make_queue(phase); }
  std::unique_ptr<DeviceQueue> make_copy_queue(double gbps) override {
    return std::make_unique<TracedQueue>(gbps, n_queues_++ % 2 ? "in" : "out", token_bytes_, trace_);
  }

 private:
  const size_t token_bytes_;
  Trace& trace_;
  int n_queues_ = 0;
};

class Scene {
 public:
  explicit Scene(const Setting& setting)
      : setting_(setting),
        step_tokens_(setting.tiny ? 64 : 1024),
        team_(std::max(1, int(std::thread::hardware_concurrency()))),
        trace_(std::make_unique<Trace>()),
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
        else  // everybody waits for KV
          std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      while (engine.memory().poll()) std::this_thread::sleep_for(std::chrono::microseconds(100));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the watchers have seen it
      for (const Span& span : trace_->take())
        found.rows.push_back({{"part", name},
                              {"what", span.what},
                              {"begin_ms", 1e3 * (span.begin_s - start)},
                              {"end_ms", 1e3 * (span.end_s - start)},
                              {"tokens", span.tokens}});
    };
    const KvTierStats before = with_->memory().stats().tiers;
    part("without", *without_, 1);
    part("computed", *with_, 1);
    part("swapped in", *with_, 3);
    const KvTierStats after = with_->memory().stats().tiers;
    const uint64_t one = std::exchange(without_hash_, without_->logits_hash()),
                   four = std::exchange(with_hash_, with_->logits_hash());
    if (with_hash_ - four != 4 * (without_hash_ - one))
      found.wrong = "other logits when KV is swapped in than when it is computed";
    const int64_t hits = after.host_hit_tokens - before.host_hit_tokens;
    if (hits < 3 * (2 * step_tokens_ - 16))
      found.wrong = std::to_string(hits) + " tokens of three prompts were swapped in";
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
  std::unique_ptr<Trace> trace_;
  std::unique_ptr<TracedDevice> device_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Contestant> without_, with_;
  uint64_t asked_ = 0, without_hash_ = 0, with_hash_ = 0;
};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int round = 0; round < (setting.tiny ? 1 : 5); ++round) all.push_back({{"round", round}});
  return all;
}

Measure open(const Setting& setting) {
  auto scene = std::make_shared<Scene>(setting);
  return [scene](const Values&) { return scene->run(); };
}

REGISTER_EXPERIMENT("offload_trace", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::offload_trace_experiment
