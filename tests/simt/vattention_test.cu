// The whole path over page groups of 4 KiB: sequences of several rows in a pool that is too small
// for all, so that rows are unmapped, handed over and mapped again while steps are under way. With
// late streams a row that is unmapped before the last step that names it has ended is a fault.
#include <algorithm>

#include "device_memory.h"
#include "tests/catch.h"
#include "tests/end_to_end/cuda_parity.h"

namespace xpyd::testing::vattention_test {
namespace {

using cuda::simt::Late;
using cuda::simt::SmallPages;

TEST_CASE("simt vattention: one hash, whatever is mapped when", "[simt][parity][vattention]") {
  SmallPages pages;
  OnCuda cuda;
  TinySetup first{.scheme = "contiguous"};
  first.pool_bytes = 3 << 20;
  cuda.put(first, false);
  const RaggedRun expected = run_ragged(first);
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr int kStride = 5;
#else
  constexpr int kStride = 1;
#endif
  int index = 0;
  for (const char* topology : {"1C", "1P1D", "2P2D"})
    for (const char* transport : {"local", "handoff"})
      for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
        for (bool late : {false, true})
          for (bool ahead : {false, true}) {
            if (index++ % kStride != 0) continue;
            if (topology == std::string("1C") && transport == std::string("handoff")) continue;
            TinySetup setup{.topology = topology, .scheme = "vattention", .transport = transport};
            setup.order = order;
            setup.step_tokens = 64;
            setup.ahead = ahead;
            // A row is 64 tokens in layer_major, 16 in token_major; the longest sequence has 512.
            setup.pool_bytes = 9 * 4 * 4096;
            cuda.put(setup, false);
            Late streams(late);
            INFO(setup.describe() << (late ? ", late" : "") << (ahead ? ", ahead" : ""));
            const RaggedRun got = run_ragged(setup);
            CHECK(got.tokens == expected.tokens);
            REQUIRE(got.hash == expected.hash);
            CHECK(cuda::simt::vmm_use() == cuda::simt::VmmUse{});
          }
}

// With planning ahead, the step after a sequence's last token has begun when that token is known; its kernels still
// read and write the sequence's rows, which a shared pool unmaps as soon as it is freed.
TEST_CASE("simt vattention: who stops keeps its rows until the step under way has ended", "[simt][vattention]") {
  SmallPages pages;
  OnCuda cuda;
  TinySetup setup{.topology = "1P1D", .scheme = "vattention", .transport = "handoff"};
  setup.pool_bytes = 24 * 4 * 4096;
  cuda.put(setup, false);
  const RaggedRun whole = run_ragged(setup);
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major}) {
    setup.order = order;
    Late streams(true);
    TinyCluster tiny(setup);
    const auto prompts = ragged_prompts();
    std::vector<size_t> expected;
    for (size_t i = 0; i < prompts.size(); ++i) {
      auto request = tiny_request(i, prompts[i], 6);
      const std::vector<int32_t>& tokens = whole.tokens[i];
      request->stop_token_ids = {tokens[1 + i % 3]};
      expected.push_back(size_t(std::find(tokens.begin(), tokens.end(), tokens[1 + i % 3]) - tokens.begin()) + 1);
      REQUIRE(tiny.submit(request).ok());
    }
    tiny.run();
    size_t early = 0;
    for (size_t i = 0; i < prompts.size(); ++i) {
      const Recorder::Choice choice = tiny.recorder->choice(i);
      CHECK(choice.finish == FinishReason::stop);
      CHECK(choice.tokens ==
            std::vector<int32_t>(whole.tokens[i].begin(), whole.tokens[i].begin() + long(expected[i])));
      early += expected[i] > 1 && expected[i] < 6;
    }
    CHECK(early >= 3);
  }
}

}  // namespace
}  // namespace xpyd::testing::vattention_test
