// sglang #34815: with PP8 every first token took 30 s, whatever the load, because admission and the release of KV went
// round the pipeline with the data, some 2 P iterations each. Here a wave that does not end delays nothing but itself.
#include <condition_variable>
#include <mutex>

#include "tests/program.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::pipeline_control_test {

// A pipeline of eight stages whose waves wait until the test lets them go. It computes in begin().
class Gate {
 public:
  void let_go(int waves) {
    std::lock_guard lock(mutex);
    open += waves;
    changed.notify_all();
  }
  // Waits until so many waves have begun and the engine can only wait.
  bool waits_for(int waves, double seconds) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return waits && begun >= waves; });
  }
  std::mutex mutex;
  std::condition_variable changed;
  int begun = 0, open = 0;  // waves, since the start
  bool news = false, waits = false;
};

class GatedModel final : public Model {
 public:
  GatedModel(std::unique_ptr<Model> model, Gate& gate) : model_(std::move(model)), gate_(gate) {}
  const ModelConfig& config() const override { return model_->config(); }
  int window() const override { return 16; }
  int stages() const override { return 8; }
  void begin(const StepInput& step, std::span<const Draw>, float* logits) override {
    std::lock_guard lock(gate_.mutex);
    compute_step(*model_, {step.token_ids, step.q_offsets, step.kv_lengths, step.views, step.logit_rows}, logits);
    ++gate_.begun;
    gate_.changed.notify_all();
  }
  bool wait() override {
    std::unique_lock lock(gate_.mutex);
    gate_.waits = true;
    gate_.changed.notify_all();
    gate_.changed.wait(lock, [&] { return gate_.news || gate_.open > ended_; });
    gate_.waits = false;
    return !std::exchange(gate_.news, false) && gate_.open > ended_;
  }
  bool ended() const override {
    std::lock_guard lock(gate_.mutex);
    return gate_.open > ended_ && gate_.begun > ended_;
  }
  void interrupt() override {
    std::lock_guard lock(gate_.mutex);
    gate_.news = true;
    gate_.changed.notify_all();
  }
  void end(Chosen*) override { ++ended_; }
  Work work(const StepInput&) const override { return {}; }

 private:
  std::unique_ptr<Model> model_;
  Gate& gate_;
  int ended_ = 0;
};

TEST_CASE("field bugs: a first token does not wait for waves of other requests (sglang #34815)", "[issues][waves]") {
  constexpr double kSoon = 60;  // seconds, on a machine that does other things too
  ThreadTeam team(1);
  Gate gate;
  TinySetup setup;
  setup.step_tokens = 64;
  setup.make_model = [&](const TinySetup& s, DeviceQueue&) {
    return Result<std::unique_ptr<Model>>(std::make_unique<GatedModel>(
        make_llama(tiny_weights(), team, std::max(s.step_tokens, s.max_batch), s.max_batch), gate));
  };
  TinyCluster tiny(setup);
  REQUIRE(tiny.cluster->start().ok());
  const auto ask = [&](uint64_t id, int length) {
    REQUIRE(tiny.submit(tiny_request(id, std::vector<int32_t>(size_t(length), int32_t(id)), 2)).ok());
  };
  ask(1, 300);  // five waves, none of which ends
  REQUIRE(gate.waits_for(5, kSoon));
  // A request that comes is begun at once.
  ask(2, 20);
  REQUIRE(gate.waits_for(6, kSoon));
  ask(3, 20);
  REQUIRE(gate.waits_for(7, kSoon));
  // An aborted request ends at once, and its KV is kept as long as waves write to it.
  tiny.cluster->abort(1);
  CHECK(until(kSoon, [&] { return tiny.recorder->choice(1).ends == 1; }));
  CHECK(tiny.recorder->choice(1).finish == FinishReason::abort);
  CHECK(tiny.recorder->choice(2).ends == 0);
  CHECK(tiny.cluster->stats().instances[0].kv.active >= 300 / 16);
  // Then all go on.
  gate.let_go(1000);
  CHECK(until(kSoon, [&] { return tiny.recorder->ended() == 3; }));
  CHECK(tiny.recorder->choice(2).tokens.size() == 2);
  CHECK(tiny.recorder->choice(3).tokens.size() == 2);
  CHECK(tiny.cluster->wait_idle(kSoon));
  tiny.cluster->stop();
  const KvStats kv = tiny.cluster->instances()[0]->memory().stats();
  CHECK(kv.free + kv.cached == kv.capacity);
}

}  // namespace xpyd::testing::pipeline_control_test
