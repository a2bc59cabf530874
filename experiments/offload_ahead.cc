// offload_ahead: wde's KV offloading, experiment 3, live on a CPU: prompts a second for eight sizes of a step, with a
// host tier and without, prefix cache on and off, and sync and async-2: step k + 1 is planned while step k runs.
//
// xpyd's own CPU models compute on the engine's thread, so a step is planned when the one before has ended (sync). Here
// a model's steps run on a thread beside the engine's, two under way, in order (AheadModel: waves of one stage, as a
// pipeline has them); in sync the engine's thread waits for each, so both ways have one core for the model and one for
// the engine. Two layers of llama-micro in f32, prompts of 1,024 tokens one at a time, one token out. All four that
// differ in tier and way take turns by prompt.
//
// Arithmetic. Two layers have 1.6 M parameters: 3.1 MFLOP a token, and attention 2 x 4 x 256 x 512 = 1; at 30 to 60
// GFLOP/s 70 to 140 us: 2 to 5 ms for 32 tokens, 70 to 150 for 1,024. The engine's own part is 10 to 60 us a step, and
// 1 to 5 us for each block that goes out. So what async-2 can hide is 0.3 to 2 % at 32 tokens and nothing at 1,024,
// less what two threads cost each other by waking: async-2 / sync .93 to 1.05 at both, and not 1.30: theirs is what an
// engine in Python takes, 2.5 ms (offload_virtual). `plan_us`: what the engine took for a step beside computing, in
// sync: 5 to 100. With a tier / without .9 to 1.05: 1 MiB of copies beside 100 ms, on the engine's core.
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "base/random.h"
#include "experiments/contestant.h"
#include "experiments/offload.h"

namespace xpyd::experiments::offload_ahead_experiment {
namespace {

// forward() of another model on a thread of its own, two steps under way.
class AheadModel final : public Model {
 public:
  explicit AheadModel(Model& inner) : inner_(inner), thread_([this] { run(); }) {}
  ~AheadModel() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    news_.notify_all();
    thread_.join();
  }
  const ModelConfig& config() const override { return inner_.config(); }
  void forward(const StepInput& step, float* logits) override {
    begin(step, {}, logits);
    wait();
    end(nullptr);
  }
  int window() const override { return 2; }
  void begin(const StepInput& step, std::span<const Draw>, float* logits) override {
    auto wave = std::make_unique<Wave>();
    wave->tokens.assign(step.token_ids.begin(), step.token_ids.end());
    wave->offsets.assign(step.q_offsets.begin(), step.q_offsets.end());
    wave->lengths.assign(step.kv_lengths.begin(), step.kv_lengths.end());
    wave->rows.assign(step.logit_rows.begin(), step.logit_rows.end());
    wave->views.assign(step.views.begin(), step.views.end());
    for (size_t i = 0; i < wave->views.size(); ++i) {  // the engine's tables may change meanwhile
      KvView& view = wave->views[i];
      const int block = view.layout->block_tokens, n = (step.kv_lengths[i] + block - 1) / block;
      wave->tables.emplace_back(view.block_table, view.block_table + n);
      view.block_table = wave->tables.back().data();
    }
    wave->logits = logits;
    {
      std::lock_guard lock(mutex_);
      waves_.push_back(std::move(wave));
    }
    news_.notify_all();
  }
  bool ended() const override {
    std::lock_guard lock(mutex_);
    return !waves_.empty() && waves_.front()->ended;
  }
  bool wait() override {
    std::unique_lock lock(mutex_);
    news_.wait(lock, [this] { return waves_.front()->ended; });
    return true;
  }
  void end(Chosen*) override {
    std::lock_guard lock(mutex_);
    seconds_ = {waves_.front()->seconds};
    waves_.pop_front();
    --done_;
  }
  std::span<const double> stage_seconds() const override { return seconds_; }
  Work work(const StepInput& step) const override { return inner_.work(step); }
  size_t weight_bytes() const override { return inner_.weight_bytes(); }
  size_t scratch_bytes() const override { return inner_.scratch_bytes(); }

 private:
  struct Wave {
    std::vector<int32_t> tokens, offsets, lengths, rows;
    std::vector<KvView> views;
    std::deque<std::vector<int32_t>> tables;
    float* logits = nullptr;
    bool ended = false;
    double seconds = 0;
  };
  void run() {
    RealClock clock;
    std::unique_lock lock(mutex_);
    while (true) {
      news_.wait(lock, [this] { return stop_ || done_ < waves_.size(); });
      if (done_ == waves_.size()) return;
      Wave& wave = *waves_[done_];
      lock.unlock();
      const double start = clock.now();
      inner_.forward({.token_ids = wave.tokens,
                      .q_offsets = wave.offsets,
                      .kv_lengths = wave.lengths,
                      .views = wave.views,
                      .logit_rows = wave.rows},
                     wave.logits);
      wave.seconds = clock.now() - start;
      lock.lock();
      wave.ended = true;
      ++done_;
      news_.notify_all();
    }
  }

  Model& inner_;
  mutable std::mutex mutex_;
  std::condition_variable news_;
  std::deque<std::unique_ptr<Wave>> waves_;
  size_t done_ = 0;  // of waves_
  std::vector<double> seconds_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the others
};

constexpr int kPrompts = 4;  // as many as contestants: each has each turn

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int chunk : {1024, 768, 512, 384, 256, 128, 64, 32})
    for (const char* cache : {"on", "off"})
      if (!setting.tiny || chunk <= 64) all.push_back({{"chunk", chunk}, {"cache", cache}});
  return all;
}

class Scene {
 public:
  explicit Scene(const Setting& setting) : setting_(setting), team_(1) {}

  Result<Finding> run(const Values& point) {
    if (!model_)
      if (Status status = open(); !status) return status.error();
    const int tokens = setting_.tiny ? 128 : 1024;
    std::vector<std::unique_ptr<Contestant>> all;
    for (bool ahead : {false, true})
      for (bool tier : {false, true}) {
        KvOptions kv{.shape = kv_shape(model_->config(), Dtype::f32),
                     .max_sequence_tokens = tokens + 16,
                     .prefix_cache = point["cache"] == "on"};
        kv.pool_bytes = size_t(2 * (kPrompts + 1) * (tokens + 16)) * kv.shape.token_bytes();
        if (tier) kv.tiers = {.host_bytes = kv.pool_bytes};
        auto made = Contestant::create(
            "paged", *ahead_, kv,
            {.policy = find_batch_policy("chunked"), .max_batch = 1, .step_tokens = point["chunk"], .ahead = ahead});
        if (!made) return made.error();
        all.push_back(std::move(made).value());
      }
    std::vector<double> seconds(all.size());
    for (int prompt = -1; prompt < kPrompts; ++prompt) {  // the first touches everything
      Random random(setting_.seed * 1000 + ++asked_);
      std::vector<int32_t> ids(static_cast<size_t>(tokens));
      for (int32_t& id : ids) id = int32_t(random.below(uint64_t(model_->config().vocab)));
      for (size_t turn = 0; turn < all.size(); ++turn) {
        const size_t i = (turn + size_t(prompt + 1)) % all.size();
        if (prompt == 0) before_[i] = all[i]->engine().stats();
        const double start = clock_.now();
        all[i]->submit(ids, 1);
        while (!all[i]->engine().idle()) all[i]->step();
        if (prompt >= 0) seconds[i] += clock_.now() - start;
        while (all[i]->memory().poll()) std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
    Finding found;
    found.wrong = compare(all);
    for (size_t i = 0; i < all.size(); ++i) {
      const EngineStats now = all[i]->engine().stats();
      found.rows.push_back({{"plan", i < 2 ? "sync" : "async-2"},
                            {"tier", i % 2 ? "on" : "off"},
                            {"requests_per_s", kPrompts / seconds[i]},
                            {"plan_us", 1e6 * (now.schedule_seconds - before_[i].schedule_seconds) /
                                            double(now.steps - before_[i].steps)},
                            {"step_us", 1e6 * seconds[i] / double(now.steps - before_[i].steps)}});
    }
    return found;
  }

 private:
  Status open() {
    const std::string dir = setting_.tiny ? "experiments/models/llama-tiny" : "experiments/models/llama-micro";
    Result<ModelConfig> config = load_model_config(dir);
    if (!config) return config.error();
    config.value().n_layers = 2;
    auto weights = load_weights(dir, config.value(), {.dummy = true}, team_);
    if (!weights) return weights.error();
    model_ = make_llama(weights.value(), team_, 1024, 1);
    ahead_ = std::make_unique<AheadModel>(*model_);
    return ok();
  }

  const Setting setting_;
  ThreadTeam team_;
  RealClock clock_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<AheadModel> ahead_;
  std::map<size_t, EngineStats> before_;
  uint64_t asked_ = 0;
};

Measure open(const Setting& setting) {
  auto scene = std::make_shared<Scene>(setting);
  return [scene](const Values& point) { return scene->run(point); };
}

REGISTER_EXPERIMENT("offload_ahead", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::offload_ahead_experiment
