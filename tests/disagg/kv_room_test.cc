// Circular waits over the memory of two instances: those that stopped other systems, and those that stopped this one.
// The rule in disagg/handover/kv_room.h forbids them. Each scene ends with every answer right and every block free.

#include "tests/disagg/scene.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::kv_room_test {

constexpr int kBlock = 4;

// Each memory has this many blocks.
SimOptions small(SimOptions options, int blocks) {
  options.kv.block_tokens = kBlock;
  options.kv.pool_bytes = size_t(blocks * kBlock) * kv_shape(checksum_config(), Dtype::f32).token_bytes();
  options.kv.max_sequence_tokens = blocks * kBlock;
  return options;
}

// P took D's memory chunk by chunk, and D was full before any prompt was whole there.
TEST_CASE("LMCache#1215: a prompt that comes in chunks has room for all of them or none", "[kv_room]") {
  SimOptions options = small(in("prefill_first"), 10);
  options.stream_kv = StreamKv::chunk;
  options.step_tokens = 8;
  Scene scene("3P1D", options);
  for (uint64_t id = 0; id < 9; ++id) scene.ask(id, 28, 5, int(id));
  scene.settle();
}

// P held the KV of a prompt that waited for room at D. Another prompt held that room and waited for room at P.
TEST_CASE("sglang#31473: a prompt that holds room at D does not wait for room at P", "[kv_room]") {
  for (bool reserve_blocks : {false, true}) {
    SimOptions options = small(in("prefill_first"), 10);
    options.conductor.reserve_blocks = reserve_blocks;
    options.step_tokens = 4;
    Scene scene("1P1D", options);
    scene.serve(1, 20, 2, 1);  // its KV stays cached
    scene.ask(2, 32, 2, 2);
    scene.until_sent<ReserveKv>();
    scene.ask(3, 20, 2, 1);
    scene.settle();
  }
}

// KV that had arrived found no block for its next token, and KV that was still arriving behind it was not looked at.
TEST_CASE("vllm#57104: arriving KV is taken in behind a sequence that waits for a block", "[kv_room]") {
  Scene scene("1P1D", small(in("prefill_first"), 12));
  scene.ask(1, 16, 30, 1);
  scene.until_sent<KvDelivered>();
  scene.hand.holds = true;
  scene.ask(2, 20, 12, 2);
  scene.ticks(100);
  CHECK(scene.n_tokens(1) < 30);
  CHECK(scene.n_tokens(2) == 1);
  scene.hand.let_go();
  scene.settle();
}

// Prompts with logprobs reserved in another order than the others: P's KV waited for room at D, and D's for room at P.
TEST_CASE("prompts with and without prompt logprobs end beside each other under decode_first, with little memory",
          "[kv_room][prompt_logprobs]") {
  TinySetup setup{.topology = "1P1D", .disagg = "decode_first", .prefix_cache = false};
  setup.pool_bytes = size_t{12} * 16 * 256;  // each instance holds two of these requests
  setup.step_tokens = 16;
  TinyCluster tiny(setup);
  for (uint64_t id = 0; id < 8; ++id) {
    auto request = tiny_request(id, std::vector<int32_t>(80, int32_t(id) + 1), 9);
    request->ignore_eos = true;
    if (id % 2 == 1) request->prompt_logprobs = 3;
    REQUIRE(tiny.submit(request).ok());
  }
  tiny.run();
  for (uint64_t id = 0; id < 8; ++id) CHECK(tiny.recorder->choice(id).finish == FinishReason::length);
}

TEST_CASE("a storm of prompts that offload tiers load ends, in memories of two prompts", "[kv_room]") {
  for (const char* order : {"prefill_first", "decode_first"})
    for (bool pull : {false, true})
      for (bool reserve_blocks : {false, true}) {
        INFO(order << (pull ? " pull" : "") << (reserve_blocks ? " escrow" : ""));
        SimOptions options = small(in(order, pull), 12);
        options.conductor.reserve_blocks = reserve_blocks;
        options.kv.tiers.host_bytes = 4 * options.kv.pool_bytes;
        options.kv.tiers.block_tokens = kBlock;
        options.tier_byte_s = 0.05 / double(options.kv.pool_bytes);
        Scene scene("2P2D", options);
        for (uint64_t id = 0; id < 60; ++id) {
          scene.ask(id, 10 + int(id * 7 % 30), 1 + int(id % 7), int(id % 5));
          if (id % 6 == 5) scene.ticks(7);
        }
        scene.settle();
      }
}

}  // namespace xpyd::testing::kv_room_test
