// With a radix cache every prompt's hit ends where it parts from what has been computed, at any token, and its logits
// have the bits of a run without a cache: over block sizes, dtypes of KV, wires, ranks, drafts, tiers and scarce
// memory.
#include <cstdio>

#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::radix_test {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kStride = 9;
#else
constexpr int kStride = 1;
#endif

// Prompts one after the other that part at tokens on, before and behind the edges of blocks, then a next turn of each.
struct Turns {
  std::vector<int> cached, expected;
  uint64_t hash = 0;
};
Turns turns(const TinySetup& setup) {
  TinyCluster tiny(setup);
  Turns all;
  uint64_t id = 0;
  std::vector<std::vector<int32_t>> seen;  // what a tree has: prompts with the answers but their last token
  const auto ask = [&](std::vector<int32_t> prompt) {
    int longest = 0;
    for (const auto& s : seen) longest = std::max(longest, int(std::ranges::mismatch(s, prompt).in2 - prompt.begin()));
    all.expected.push_back(std::min(longest, int(prompt.size()) - 1));
    REQUIRE(tiny.submit(tiny_request(id, prompt, 5)).ok());
    tiny.run();
    const Recorder::Choice choice = tiny.recorder->choice(id++);
    REQUIRE(choice.ends == 1);
    all.cached.push_back(choice.cached_tokens);
    prompt.insert(prompt.end(), choice.tokens.begin(), choice.tokens.end() - 1);
    seen.push_back(prompt);
  };
  for (int common : {50, 1, 15, 16, 17, 31, 33, 47, 50}) {
    std::vector<int32_t> prompt;
    for (int i = 0; i < 53; ++i) prompt.push_back((i * 7 + (i < common ? 3 : 5 + common)) % 96);
    ask(prompt);
  }
  for (size_t i = 0; i < 4; ++i) {
    std::vector<int32_t> next = seen[i];
    for (int32_t t : {1, 2, 3}) next.push_back(t);
    ask(next);
  }
  all.hash = tiny.cluster->logits_hash();
  return all;
}

}  // namespace

TEST_CASE("radix: hits to the token, logits of a run without a cache", "[radix][parity]") {
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::int8, Dtype::int4}) {
    const Turns plain = turns({.kv_dtype = dtype, .prefix_cache = false});
    for (int hit : plain.cached) REQUIRE(hit == 0);
    for (int block : {1, 4, 16, 64})
      for (int step : {7, 512}) {
        TinySetup setup{.kv_dtype = dtype, .block_tokens = block, .radix = true, .step_tokens = step};
        INFO(setup.describe());
        const Turns radix = turns(setup);
        REQUIRE(radix.hash == plain.hash);
        REQUIRE(radix.cached == radix.expected);
      }
    TinySetup blocks{.kv_dtype = dtype};
    const Turns whole = turns(blocks);
    REQUIRE(whole.hash == plain.hash);
    for (size_t i = 0; i < whole.cached.size(); ++i) REQUIRE(whole.cached[i] == whole.expected[i] / 16 * 16);
  }
}

TEST_CASE("radix: one hash, whatever schedules, splits, moves and drafts", "[radix][parity]") {
  const uint64_t expected = run_ragged({.scheme = "contiguous", .batching = "static", .prefix_cache = false}).hash;
  int index = 0, ran = 0;
  int64_t hits = 0;
  for (const char* topology : {"1C", "1P1D", "2P2D"})
    for (const char* transport : {"local", "handoff"})
      for (const auto& [batching, step] :
           {std::pair{"chunked", 7}, {"chunked", 64}, {"static", 2048}, {"persistent", 64}})
        for (int block : {3, 16, 64})
          for (const char* drafter : {"off", "ngram", "mtp"})
            for (size_t pool : {size_t{3} << 14, size_t{1} << 20}) {  // the first: 192 tokens for 400
              if (std::string(topology) == "1C" && std::string(transport) == "handoff") continue;
              if (index++ % kStride != 0) continue;
              TinySetup setup{.topology = topology, .batching = batching, .transport = transport};
              setup.block_tokens = block;
              setup.radix = true;
              setup.step_tokens = step;
              setup.pool_bytes = block == 64 ? 2 * pool : pool;
              setup.threads = 1 + index % 2;
              setup.order = index % 3 ? KvOrder::layer_major : KvOrder::token_major;
              setup.stream_kv = StreamKv(index % 3);
              setup.escrow = index % 4 == 1;
              if (std::string(drafter) != "off") setup.speculation = {find_drafter(drafter), 3, 1, 3};
              if (std::string(drafter) == "off" && index % 5 == 0)
                setup.prefill_tp = setup.decode_tp = 2, setup.pool_bytes *= 2;
              if (index % 7 == 3) setup.tiers.host_bytes = 1 << 18;
              if (std::string(drafter) == "mtp") setup.pool_bytes *= 2;
              INFO(setup.describe());
              const RaggedRun run = run_ragged(setup);
              REQUIRE(run.hash == expected);
              hits += run.hit_tokens;
              ++ran;
            }
  CHECK(hits > 0);
  std::printf("radix: %d of %d combinations have the hash\n", ran, index);
}

}  // namespace xpyd::testing::radix_test
