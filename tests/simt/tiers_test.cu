// KV tiers under a pool on the card: what comes back from host memory gives the same logits, over every memory, and
// with streams that do their work late, so that a copy that nobody waited for is wrong data.
#include "base/device_cuda.h"
#include "device_memory.h"
#include "tests/catch.h"
#include "tests/end_to_end/cuda_parity.h"

namespace xpyd::testing::tiers_test {
namespace {

using cuda::simt::Late;
using cuda::simt::SmallPages;

// The ragged prompts, and then again; without a prefix cache only the tiers know them.
struct TwoRounds {
  uint64_t hash = 0;
  std::vector<std::vector<int32_t>> tokens;
  KvTierStats tiers;
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
  result.hash = tiny.cluster->logits_hash();
  for (const auto& instance : tiny.cluster->instances()) {
    instance->memory().check_invariants(!tiny.cluster->stats().shared_pool);
    const KvTierStats tiers = instance->memory().stats().tiers;
    result.tiers.host_hit_tokens += tiers.host_hit_tokens;
    result.tiers.bytes_out += tiers.bytes_out;
    result.tiers.copies_out += tiers.copies_out;
  }
  return result;
}

TEST_CASE("simt tiers: KV that comes back from pinned memory gives the same logits", "[simt][parity][tiers]") {
  SmallPages pages;
  OnCuda cuda;
  TinySetup first{.scheme = "contiguous"};
  first.pool_bytes = 3 << 20;
  cuda.put(first, false);
  const TwoRounds expected = run_twice(first);
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
          // A token is 64 bytes of each layer's K and V; in token_major a block of 16 is one run.
          if (order == KvOrder::layer_major)
            CHECK(got.tiers.bytes_out == got.tiers.copies_out * 64);
          else
            CHECK(got.tiers.bytes_out >= got.tiers.copies_out * 16 * 256);
        }
}

// The prompt leaves before anything of it has gone out: there is no copy to wait for.
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
  TinySetup plain{.scheme = "contiguous"};
  plain.pool_bytes = 3 << 20;
  cuda.put(plain, false);
  const uint64_t expected = run(plain);
  for (const char* scheme : {"vattention", "contiguous", "paged"})
    for (bool late : {false, true}) {
      TinySetup setup{.topology = "1P1D", .scheme = scheme, .transport = "handoff"};
      setup.pool_bytes = scheme == std::string("contiguous") ? 3 << 20 : 1 << 18;
      setup.tiers.host_bytes = 1 << 18;
      setup.tiers.block_tokens = 16;
      cuda.put(setup, false);
      Late streams(late);
      INFO(setup.describe() << (late ? ", late" : ""));
      CHECK(run(setup) == expected);
    }
}

TEST_CASE("simt tiers: host memory of the card's is pinned, zeroed, and reached by both queues", "[simt][tiers]") {
  auto device = make_cuda_device();
  constexpr size_t kBytes = 3 << 20;
  auto host = device->allocate_host(kBytes).value();
  auto card = device->allocate(kBytes).value();
  CHECK(reinterpret_cast<uintptr_t>(host.get()) % 4096 == 0);
  CHECK(std::all_of(host.get(), host.get() + kBytes, [](std::byte b) { return b == std::byte{0}; }));
  for (size_t i = 0; i < kBytes; ++i) host.get()[i] = std::byte(i * 7 >> 4);
  const std::vector<std::byte> expected(host.get(), host.get() + kBytes);
  Late late(true);
  // Whole, as copy engines take it, and in pieces of no nice size.
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
}  // namespace xpyd::testing::tiers_test
