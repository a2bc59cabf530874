// Runs schemes whose device memory is mapped and unmapped while steps are under way, and requires the same logits. Late
// streams do their work only when something waits for it. There a missing wait for a copy or an unmapping shows as
// wrong data or a fault.
#include <algorithm>

#include "base/device/device_cuda.h"
#include "device_memory.h"
#include "tests/catch.h"
#include "tests/end_to_end/cuda_parity.h"

namespace xpyd::testing::memory_test {
namespace {

using cuda::simt::Late;
using cuda::simt::SmallPages;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kInstrumented = true;
#else
constexpr bool kInstrumented = false;
#endif

TEST_CASE("cuda parity holds when streams do their work late", "[simt][parity]") {
  Late late(true);
  check_cuda_parity(kInstrumented ? 97 : 13);
}

// A scheme with one contiguous pool. The others must give its tokens and hash.
TinySetup plain_setup(OnCuda& cuda) {
  TinySetup plain{.scheme = "contiguous"};
  plain.pool_bytes = 3 << 20;
  cuda.put(plain, false);
  return plain;
}

// Sequences of several page-group rows of 4 KiB share a pool that is too small for all, so rows are unmapped and
// mapped again.
TEST_CASE("simt vattention: the hash is the same, whenever rows are mapped", "[simt][parity][vattention]") {
  SmallPages pages;
  OnCuda cuda;
  const RaggedRun expected = run_ragged(plain_setup(cuda));
  int index = 0;
  for (const char* topology : {"1C", "1P1D", "2P2D"})
    for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
      for (bool late : {false, true})
        for (bool ahead : {false, true}) {
          if (index++ % (kInstrumented ? 5 : 1) != 0) continue;
          TinySetup setup{.topology = topology, .scheme = "vattention"};
          setup.order = order;
          setup.step_tokens = 64;
          setup.ahead = ahead;
          // A row is 64 tokens in layer_major and 16 in token_major. The longest sequence has 512.
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

// With planning ahead, the next step has begun when a sequence's last token is known. Its kernels still read and write
// the sequence's rows, which another sequence may get as soon as they are freed.
TEST_CASE("simt vattention: a stopped sequence keeps its rows until the step under way has ended",
          "[simt][vattention]") {
  SmallPages pages;
  OnCuda cuda;
  TinySetup setup{.topology = "1P1D", .scheme = "vattention"};
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

// Runs the ragged prompts twice. Without a prefix cache only the offload tiers know them the second time.
struct TwoRounds {
  uint64_t hash = 0;
  std::vector<std::vector<int32_t>> tokens;
  OffloadStats tiers;
};
TwoRounds run_twice(const TinySetup& setup) {
  TinyCluster tiny(setup);
  TwoRounds result;
  const auto prompts = ragged_prompts();
  uint64_t id = 0;
  for (int round = 0; round < 2; ++round) {
    for (const auto& prompt : prompts) REQUIRE(tiny.submit(tiny_request(id++, prompt, 6)).ok());
    tiny.run();
    REQUIRE(tiny.recorder->ended() == int(id));
  }
  for (uint64_t i = 0; i < id; ++i) result.tokens.push_back(tiny.recorder->choice(i).tokens);
  result.hash = tiny.cluster->stats().conductor.logits_hash;
  for (const auto& instance : tiny.cluster->instances()) {
    instance->memory().check_invariants(!tiny.cluster->stats().shared_pool);
    const OffloadStats tiers = instance->memory().stats().tiers;
    result.tiers.host_hit_tokens += tiers.host_hit_tokens;
    result.tiers.bytes_out += tiers.bytes_out;
    result.tiers.copies_out += tiers.copies_out;
  }
  return result;
}

TEST_CASE("simt tiers: KV that comes back from pinned memory gives the same logits", "[simt][parity][tiers]") {
  SmallPages pages;
  OnCuda cuda;
  const TwoRounds expected = run_twice(plain_setup(cuda));
  REQUIRE(expected.tiers.bytes_out == 0);
  for (const char* topology : {"1C", "1P1D"})
    for (const char* scheme : {"contiguous", "paged", "vattention"})
      for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
        for (bool late : {false, true}) {
          TinySetup setup{.topology = topology, .scheme = scheme, .prefix_cache = false};
          setup.order = order;
          setup.pool_bytes = scheme == std::string("contiguous") ? 3 << 20 : 1 << 18;
          setup.tiers.host_bytes = 1 << 18;
          cuda.put(setup, false);
          Late streams(late);
          INFO(setup.describe() << (late ? ", late" : ""));
          const TwoRounds got = run_twice(setup);
          CHECK(got.tokens == expected.tokens);
          REQUIRE(got.hash == expected.hash);
          CHECK(got.tiers.host_hit_tokens > 100);
          // A token is 64 bytes of each layer's K and V. In token_major a block of 16 is one copy.
          if (order == KvOrder::layer_major)
            CHECK(got.tiers.bytes_out == got.tiers.copies_out * 64);
          else
            CHECK(got.tiers.bytes_out >= got.tiers.copies_out * 16 * 256);
        }
}

// The prompt leaves before any of it has been offloaded, so there is no copy to wait for.
TEST_CASE("simt tiers: a prompt shorter than a tier's block is handed over", "[simt][tiers]") {
  SmallPages pages;
  OnCuda cuda;
  const std::vector<int32_t> prompt{5, 9, 33, 70, 2};
  auto run = [&](const TinySetup& setup) {
    TinyCluster tiny(setup);
    REQUIRE(tiny.submit(tiny_request(1, prompt, 6)).ok());
    tiny.run();
    const Recorder::Choice choice = tiny.recorder->choice(1);
    CHECK(choice.ends == 1);
    CHECK(choice.tokens.size() == 6);
    return choice.logits_hash;
  };
  const uint64_t expected = run(plain_setup(cuda));
  for (const char* scheme : {"vattention", "contiguous", "paged"})
    for (bool late : {false, true}) {
      TinySetup setup{.topology = "1P1D", .scheme = scheme, .transport = scheme[0] == 'p' ? "handoff" : "local"};
      setup.pool_bytes = scheme == std::string("contiguous") ? 3 << 20 : 1 << 18;
      setup.tiers.host_bytes = 1 << 18;
      setup.tiers.block_tokens = 16;
      cuda.put(setup, false);
      Late streams(late);
      INFO(setup.describe() << (late ? ", late" : ""));
      CHECK(run(setup) == expected);
    }
}

TEST_CASE("simt tiers: host memory of the device is pinned, zeroed, and reached by both copy queues", "[simt][tiers]") {
  auto device = make_cuda_device();
  constexpr size_t kBytes = 3 << 20;
  auto host = device->allocate_host(kBytes).value();
  auto card = device->allocate(kBytes).value();
  CHECK(reinterpret_cast<uintptr_t>(host.get()) % 4096 == 0);
  CHECK(std::all_of(host.get(), host.get() + kBytes, [](std::byte b) { return b == std::byte{0}; }));
  for (size_t i = 0; i < kBytes; ++i) host.get()[i] = std::byte(i * 7 >> 4);
  const std::vector<std::byte> expected(host.get(), host.get() + kBytes);
  Late late(true);
  // Once whole, as copy engines take it, and in pieces of odd sizes.
  for (size_t piece : {kBytes, size_t{1 << 20}, size_t{40000}, size_t{1001}}) {
    auto out = device->make_copy_queue(0);
    std::vector<Copy> copies;
    for (size_t at = 0; at < kBytes; at += piece)
      copies.push_back({host.get() + at, card.get() + at, std::min(piece, kBytes - at)});
    out->copy(copies, true);
    const int64_t there = out->mark();
    while (!out->reached(there)) {
    }
    std::memset(host.get(), 0, kBytes);
    for (Copy& copy : copies) copy = {copy.destination, const_cast<std::byte*>(copy.source), copy.bytes};
    out->copy(copies, false);
    out->wait();
    CHECK(std::equal(expected.begin(), expected.end(), host.get()));
  }
  auto absurd = device->allocate_host(size_t{1} << 62);
  REQUIRE_FALSE(absurd);
  CHECK(absurd.error().code == ErrorCode::unavailable);
}

}  // namespace
}  // namespace xpyd::testing::memory_test
