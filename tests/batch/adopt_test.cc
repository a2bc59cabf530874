#include "batch/engine.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::adopt_test {
namespace {

// Engine::adopt() promised to take any sequence whose KV is in place, and took the prompt of one
// that was not marked as started for one of its own: it counted it, and said it was cached.
TEST_CASE("engine: a prompt computed elsewhere was counted as this engine's, and as cached", "[engine]") {
  ThreadTeam team(1);
  RealClock clock;
  const KvOptions kv{.shape = kv_shape(tiny_config(), Dtype::f32), .pool_bytes = 1 << 20, .max_sequence_tokens = 256};
  const auto memory = find_kv_scheme("paged")->make(make_block_pool("paged", kv).value(), kv);
  const auto model = make_llama(tiny_weights(), team, 64, 4);
  Engine engine(*model, *memory, {.policy = find_batch_policy("chunked"), .max_batch = 4, .step_tokens = 64}, clock,
                nullptr);
  const auto request = tiny_request(1, std::vector<int32_t>(40, 7), 3);
  const auto recorder = std::make_shared<Recorder>();
  auto sequence = make_sequence(request, {.output = {5}}, recorder, nullptr, nullptr);
  sequence->kv = memory->reserve(request->prompt, 0).value().handle;
  REQUIRE(memory->append(sequence->kv, 40));
  memory->written(sequence->kv, request->prompt);
  sequence->computed = 40;
  engine.adopt(std::move(sequence));
  while (engine.step()) continue;

  CHECK(recorder->choice(1).finish == FinishReason::length);
  CHECK(recorder->choice(1).tokens.size() == 2);  // the first of three came with it
  CHECK(recorder->choice(1).cached_tokens == 0);
  CHECK(engine.stats().prompt_tokens == 0);
  memory->check_invariants();
}

// One that held memory before its turn stood before one that was adopted with its KV. It gave that memory up and did not
// fit any more, and the adopted one behind it was never asked for its own: both waited for ever.
TEST_CASE("engine: one adopted behind one that holds memory early runs before it", "[engine]") {
  ThreadTeam team(1);
  RealClock clock;
  KvOptions kv{.shape = kv_shape(tiny_config(), Dtype::f32), .block_tokens = 16, .max_sequence_tokens = 160};
  kv.pool_bytes = 10 * 16 * kv.shape.token_bytes();
  const auto memory = find_kv_scheme("paged")->make(make_block_pool("paged", kv).value(), kv);
  const auto model = make_llama(tiny_weights(), team, 64, 4);
  Engine engine(*model, *memory, {.policy = find_batch_policy("chunked"), .max_batch = 4, .step_tokens = 64}, clock,
                nullptr);
  const auto recorder = std::make_shared<Recorder>();
  const auto holding = [&](uint64_t id, int tokens, int held, const ChoiceState& state) {
    const auto request = tiny_request(id, std::vector<int32_t>(size_t(tokens), int32_t(id)), 3);
    auto sequence = make_sequence(request, state, recorder, nullptr, nullptr);
    sequence->kv = memory->reserve(request->prompt, 0).value().handle;
    REQUIRE(memory->append(sequence->kv, held));
    memory->written(sequence->kv, std::span(request->prompt).first(size_t(held)));
    sequence->computed = held;
    return sequence;
  };
  auto early = holding(1, 130, 16, {});  // wants 9 blocks of 10, and has one
  early->early = early->probed = true;
  engine.submit(std::move(early));
  engine.adopt(holding(2, 40, 40, {.output = {5}}));
  for (int step = 0; step < 100 && !engine.idle(); ++step) {
    engine.step();
    engine.check_invariants();
  }
  CHECK(recorder->choice(1).finish == FinishReason::length);
  CHECK(recorder->choice(2).finish == FinishReason::length);
  memory->check_invariants();
}

}  // namespace
}  // namespace xpyd::testing::adopt_test
