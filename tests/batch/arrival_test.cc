// A prompt begins with the first layer of KV that comes from an offload tier, and each layer waits for its own KV. Time
// is virtual, and a link and a model take the time that they are given.
#include <algorithm>
#include <vector>

#include "allocator/offload/offloaded_memory.h"
#include "allocator/schemes.h"
#include "batch/engine/engine.h"
#include "experiments/paced_layers.h"
#include "tests/catch.h"
#include "tests/link_device.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::arrival_test {
namespace {

constexpr int kLayers = 8, kBlock = 16, kPrefix = 16 * kBlock;

struct Stand {
  // Seconds of one layer: kPrefix tokens on the link, and a step in the model.
  Stand(double load_s, double compute_s, bool by_layer, const char* policy = "chunked",
        const DrafterRow* drafter = nullptr)
      : link(clock, load_s / double(size_t(kPrefix) * shape().token_bytes() / kLayers)),
        model(config(), compute_s, clock) {
    KvOptions kv{.shape = shape(), .block_tokens = kBlock, .max_sequence_tokens = 2 * kPrefix, .prefix_cache = false};
    kv.pool_bytes = size_t(8 * kPrefix) * kv.shape.token_bytes();
    kv.tiers = {.host_bytes = kv.pool_bytes, .block_tokens = kBlock, .load_by_cost = true};
    kv.device = &link;
    kv.clock = &clock;
    memory = make_offloaded(make_ranked_memory("paged", kv, {}).value(), kv).value();
    engine = std::make_unique<Engine>(model, *memory,
                                      EngineOptions{.policy = find_batch_policy(policy),
                                                    .max_batch = 4,
                                                    .step_tokens = 2 * kPrefix,
                                                    .by_layer = by_layer,
                                                    .speculation = {.drafter = drafter, .tokens = 3}},
                                      clock, nullptr);
  }
  static ModelConfig config() {
    ModelConfig c = experiments::NullModel(tiny_config()).config();
    c.n_layers = kLayers;
    return c;
  }
  static KvShape shape() { return kv_shape(config(), Dtype::f32); }
  SequencePtr sequence(uint64_t id, int first, int tokens, int output = 1, const ChoiceState& state = {},
                       uint64_t salt = 0) {
    std::vector<int32_t> prompt;
    for (int i = 0; i < tokens; ++i) prompt.push_back((first + i) % 96);
    auto request = tiny_request(id, prompt, output);
    request->ignore_eos = true;
    request->arrival_s = clock.seconds;
    request->cache_salt = salt;
    return make_sequence(request, state, recorder, nullptr, nullptr);
  }
  void submit(uint64_t id, int first, int tokens, int output = 1) {
    engine->submit(sequence(id, first, tokens, output));
  }
  // Runs until the request has ended, and returns the seconds.
  double run(uint64_t id) {
    const double began = clock.seconds;
    while (recorder->choice(id).ends == 0) engine->step();
    return clock.seconds - began;
  }
  void settle() {
    while (engine->step() || memory->poll()) clock.seconds += 20e-6;
    memory->check_invariants();
  }

  VirtualClock clock;
  LinkDevice link;
  experiments::PacedLayers model;
  std::unique_ptr<KvMemory> memory;
  std::unique_ptr<Engine> engine;
  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>();
};

// The engine looks for KV now and then: every 50 us between steps, and every 20 us in one.
constexpr double kLooks = kLayers * 20e-6 + 100e-6;

TEST_CASE("arrival: the first token comes after the longer of loading and computing, and one layer of the other",
          "[engine][tier_layers]") {
  for (const double load_s : {10e-3, 20e-3, 5e-3})
    for (const bool by_layer : {true, false}) {
      constexpr double kCompute = 10e-3;
      INFO("a layer loads in " << load_s << " s, by layer " << by_layer);
      Stand stand(load_s, kCompute, by_layer);
      stand.submit(1, 0, kPrefix + 1);
      CHECK(stand.run(1) == Approx(kLayers * kCompute));
      stand.settle();
      stand.submit(2, 0, kPrefix + 1);
      const double expected = by_layer ? std::max(load_s * kLayers + kCompute, load_s + kLayers * kCompute)
                                       : kLayers * (load_s + kCompute);
      const double took = stand.run(2);
      CHECK(took >= expected * (1 - 1e-9));
      CHECK(took <= expected + kLooks);
      CHECK(stand.recorder->choice(2).cached_tokens == kPrefix);
      const OffloadStats s = stand.memory->stats().tiers;
      CHECK(s.host_hit_tokens == kPrefix);
      // The time waited, before the step and in it.
      const double waited = took - kLayers * kCompute;
      CHECK(s.load_wait_seconds <= waited + kLooks);
      CHECK(s.load_wait_seconds >= waited - kLooks);
      stand.settle();
    }
}

TEST_CASE("arrival: other sequences compute until the first layer is there, and two loads come one after the other",
          "[engine][tier_layers]") {
  constexpr double kLoad = 20e-3, kCompute = 1e-3;
  Stand stand(kLoad, kCompute, true);
  for (const uint64_t id : {1, 2}) {
    stand.submit(id, int(id) * 7, kPrefix + 1);
    stand.run(id);
    stand.settle();
  }
  stand.submit(3, 50, 20, 100);  // decodes
  stand.engine->step();
  for (const uint64_t id : {1, 2}) stand.submit(10 + id, int(id) * 7, kPrefix + 1);
  const double began = stand.clock.seconds;
  const auto tokens = [&] { return stand.recorder->choice(3).tokens.size(); };
  while (stand.clock.seconds - began < .8 * kLoad) stand.engine->step();
  CHECK(tokens() >= 1 + size_t(.8 * kLoad / (kLayers * kCompute)));
  CHECK(stand.recorder->choice(11).ends == 0);
  stand.run(11);
  // A step that began before the first layer was there, and the time of the other sequences.
  CHECK(stand.clock.seconds - began <= kLayers * kLoad + kCompute + kLooks + kLayers * kCompute);
  stand.run(12);
  CHECK(stand.clock.seconds - began <= 2 * kLayers * kLoad + kCompute + 2 * kLooks + kLayers * kCompute);
  CHECK(stand.clock.seconds - began >= 2 * kLayers * kLoad);
  stand.run(3);
  stand.settle();
}

TEST_CASE("arrival: the time of a load is learnt from the link, however long its step computes",
          "[engine][tier_layers]") {
  constexpr double kLoad = 1e-3, kCompute = 20e-3;
  Stand stand(kLoad, kCompute, true);
  double told_s = 0;
  stand.memory->loads_if([&](int, int, int, double load_s) {
    told_s = load_s;
    return true;
  });
  for (uint64_t id = 1; id <= 4; ++id) {
    stand.submit(id, 0, kPrefix + 1);
    stand.run(id);
    stand.settle();
  }
  CHECK(told_s >= kLayers * kLoad);
  CHECK(told_s <= kLayers * kLoad + kCompute);  // noticed when a layer ends
}

// A step whose KV did not come counts as not computed, and none of its tokens counts as cached.
TEST_CASE("arrival: a prompt with a layer that does not come is computed, and no token counts as cached",
          "[engine][tier_layers]") {
  struct Lost final : KvArrival {
    bool wait(int layer) override { return layer < 3; }
    bool is_whole() override { return false; }
  };
  Stand stand(1e-3, 1e-3, true);
  stand.submit(1, 0, kPrefix + 1, 2);
  stand.run(1);
  SequencePtr sequence = stand.sequence(2, 0, kPrefix + 1, 2, {}, 7);  // no offload tier has it
  sequence->kv = stand.memory->reserve(sequence->tokens, sequence->salt()).value().handle;
  REQUIRE(stand.memory->append(sequence->kv, kPrefix));
  sequence->computed = kPrefix;
  sequence->early = sequence->probed = true;
  sequence->arrival = std::make_shared<Lost>();
  stand.engine->submit(std::move(sequence));
  stand.run(2);
  CHECK(stand.recorder->choice(2).cached_tokens == 0);
  CHECK(stand.recorder->choice(2).tokens == stand.recorder->choice(1).tokens);
  stand.settle();
}

// The drafter writes beside the sequence's KV and finds nothing, so the room for its drafts is rolled back. The process
// once ended when such a sequence went on decoding while its KV was still coming.
TEST_CASE("arrival: beside KV that is still coming nothing is drafted, and nothing trimmed", "[engine][tier_layers]") {
  struct Silent final : Drafter {
    void draft(std::span<DraftWish> wishes) override { asked += int(wishes.size()); }
    bool in_place() const override { return true; }
    int asked = 0;
  };
  static Silent* drafter = nullptr;
  static constexpr DrafterRow kSilent = {"silent",
                                         [](const DrafterParts&) -> std::unique_ptr<Drafter> {
                                           auto made = std::make_unique<Silent>();
                                           drafter = made.get();
                                           return made;
                                         },
                                         ""};
  Stand stand(10e-3, 1e-3, true, "chunked", &kSilent);
  stand.submit(1, 0, kPrefix + 1);
  stand.run(1);
  stand.settle();
  stand.engine->submit(stand.sequence(2, 0, kPrefix + 1, 4, {.output = {7}}));  // one of four tokens is out already
  bool came_late = false;
  while (stand.recorder->choice(2).ends == 0) {
    const int before = drafter->asked;
    const size_t tokens = stand.recorder->choice(2).tokens.size();
    stand.engine->step();
    if (tokens == 0 && stand.recorder->choice(2).tokens.size() == 1) came_late = drafter->asked == before;
  }
  CHECK(came_late);
  CHECK(drafter->asked > 0);  // drafts are asked for later
  stand.settle();
}

}  // namespace
}  // namespace xpyd::testing::arrival_test
