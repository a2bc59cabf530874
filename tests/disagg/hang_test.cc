// Several instances with tensor ranks in one process, each waiting for its own ranks. NCCL with several communicators
// hangs here when threads enqueue their collectives in different orders (TurboMind's notes). The ranks of this server
// meet at a barrier that belongs to their stage alone, so there is no order to agree on. The test delays every rank at
// random in each layer.
#include <thread>

#include "attention/attention.h"
#include "base/random.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::hang_test {

std::atomic<uint64_t> seed{0};
std::atomic<int64_t> calls{0};

void hold_up(const AttentionArgs& args, ThreadTeam& team) {
  ++calls;
  thread_local Random random(uint64_t(uintptr_t(args.views[0].pool)) ^ seed);
  if (random.below(4) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(400)));
  default_attention().run(args, team);
  if (random.below(4) == 0) std::this_thread::yield();
}
constexpr AttentionVariant kHeldUp = {"held up", hold_up, Isa::portable, ""};

// All instances are alike and have tp x pp ranks each.
TinySetup setup_of(const char* topology, int tp, int pp, const char* transport) {
  TinySetup setup{.topology = topology, .transport = transport};
  setup.prefill_tp = setup.decode_tp = tp;
  setup.prefill_pp = setup.decode_pp = pp;
  setup.step_tokens = 24;
  setup.max_batch = 3;
  setup.pool_bytes = 2 << 20;
  setup.make_model = [tp, pp](const TinySetup& s, DeviceQueue&) -> Result<std::unique_ptr<Model>> {
    const ModelConfig& c = tiny_config(s.layers);
    return make_sharded_llama(tiny_weights(s.layers),
                              {.shards = {.n_layers = c.n_layers, .n_kv_heads = c.n_kv_heads, .tp = tp, .pp = pp}},
                              s.step_tokens, s.max_batch, {.attention = &kHeldUp});
  };
  return setup;
}

TEST_CASE("hang: instances with tensor ranks in one process end every request, with each rank delayed at random",
          "[disagg][hang]") {
  const uint64_t expected = run_ragged({.topology = "1C"}).hash;
  int ended = 0;
  for (auto [topology, tp, pp, transport] :
       {std::tuple("3P3D", 2, 1, "local"), {"2P1D1C", 4, 1, "local"}, {"2P2D", 2, 2, "tcp"}, {"4C", 2, 1, "local"}})
    for (uint64_t n = 1; n <= 10; ++n) {
      INFO(topology << " tp " << tp << " pp " << pp << " seed " << n);
      seed = n, calls = 0;
      TinyCluster tiny(setup_of(topology, tp, pp, transport));
      uint64_t id = 0;
      for (const auto& prompt : ragged_prompts()) REQUIRE(tiny.submit(tiny_request(id++, prompt, 6)).ok());
      REQUIRE(tiny.cluster->start().ok());
      REQUIRE(tiny.cluster->wait_idle(600));
      ended += tiny.recorder->ended();
      CHECK(tiny.cluster->stats().conductor.logits_hash == expected);
      tiny.cluster->stop();
      CHECK(calls > 100);
    }
  CHECK(ended == 40 * 9);
}

}  // namespace xpyd::testing::hang_test
