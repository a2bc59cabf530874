// The spine of the project: one logits hash, whatever manages memory, schedules, splits and moves.

#include <cstdio>

#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::parity_test {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kStride = 9;  // a sanitizer run takes every ninth combination
#else
constexpr int kStride = 1;
#endif

uint64_t run_hash(const TinySetup& setup) { return run_ragged(setup).hash; }

uint64_t reference_hash() {
  static const uint64_t hash = run_hash(
      {.topology = "1C", .scheme = "contiguous", .batching = "static", .prefix_cache = false, .step_tokens = 2048});
  return hash;
}

void check_all(const std::string& topology, int threads) {
  uint64_t expected = reference_hash();
  int index = 0, ran = 0;
  struct {
    std::string scheme;
    int block;
    KvShare share = KvShare::off;
    int64_t hits = 0;
  } memories[] = {{"contiguous", 16},
                  {"paged", 1},
                  {"paged", 16},
                  {"paged", 64},
                  {"token", 1},
                  {"slots", 16},
                  {"vattention", 64},
                  {"vattention", 64, KvShare::alias},
                  {"vattention", 64, KvShare::takeover},
                  {"vattention", 64, KvShare::copy}};
  std::vector<std::pair<std::string, int>> batchings = {{"static", 2048}, {"prefill_first", 2048}, {"persistent", 64},
                                                        {"chunked", 7},   {"chunked", 64},         {"chunked", 512}};
  for (auto& [scheme, block, share, hits] : memories)
    for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
      for (auto& [batching, step] : batchings)
        for (const char* transport : {"local", "handoff"})
          for (StreamKv stream : {StreamKv::layer, StreamKv::chunk, StreamKv::request})
            for (bool prefix : {false, true}) {
              if (share != KvShare::off && !prefix) continue;  // that is "off"
              if (index++ % kStride != 0) continue;
              TinySetup setup{.topology = topology, .scheme = scheme, .batching = batching};
              setup.transport = transport;
              setup.order = order;
              setup.stream_kv = stream;
              setup.block_tokens = block;
              setup.prefix_cache = prefix;
              setup.share = share;
              setup.step_tokens = step;
              setup.threads = threads;
              setup.pool_bytes = scheme == "contiguous" || scheme == "slots" ? 3 << 20 : 1 << 19;
              INFO(setup.describe());
              const RaggedRun run = run_ragged(setup);
              REQUIRE(run.hash == expected);
              hits += run.hit_tokens;
              ++ran;
            }
  for (const auto& m : memories) {
    const bool shares = m.scheme == "vattention"   ? m.share != KvShare::off
                        : m.scheme == "contiguous" ? false
                                                   : m.block <= 32;  // of 40 tokens in common
    INFO(m.scheme << " " << m.block << " share " << int(m.share));
    if (kStride == 1) CHECK((m.hits > 0) == shares);  // the hash says something about reuse
  }
  std::printf("parity: %d of %d combinations of %s with %d threads have the hash %016llx\n", ran, index,
              topology.c_str(), threads, static_cast<unsigned long long>(expected));
}

// Tensor ranks and pipeline stages on both sides, with every way of moving KV between them.
void check_shards_of(const std::string& topology, bool decodes) {
  const uint64_t expected = reference_hash();
  int index = 0, ran = 0;
  struct {
    const char* scheme;
    KvOrder order;
    KvShare share = KvShare::off;
    int64_t hits = 0;
  } memories[] = {{"paged", KvOrder::layer_major},
                  {"paged", KvOrder::token_major},
                  {"token", KvOrder::layer_major},
                  {"contiguous", KvOrder::token_major},
                  {"slots", KvOrder::layer_major},
                  {"vattention", KvOrder::layer_major, KvShare::alias},
                  {"vattention", KvOrder::token_major, KvShare::copy}};
  const std::pair<int, int> shapes[] = {{1, 1}, {2, 1}, {4, 1}, {1, 2}, {2, 2}, {4, 2}};
  for (auto& [scheme, order, share, hits] : memories)
    for (auto [prefill_tp, prefill_pp] : shapes)
      for (auto [decode_tp, decode_pp] : shapes) {
        if (!decodes && (decode_tp > 1 || decode_pp > 1)) continue;
        if (prefill_tp * prefill_pp * decode_tp * decode_pp == 1) continue;
        // Grain and chunk in turn: each meets each shape, though not in every memory.
        const int turn = index++;
        if (turn % kStride != 0) continue;
        TinySetup setup{.topology = topology, .scheme = scheme};
        setup.order = order;
        setup.share = share;
        setup.stream_kv = StreamKv(turn % 3);
        setup.step_tokens = std::vector{7, 64, 512}[size_t(turn / 3 % 3)];
        setup.threads = 1 + turn % 2;
        setup.block_tokens = turn % 5 ? 16 : 4;
        setup.prefill_tp = prefill_tp;
        setup.prefill_pp = prefill_pp;
        setup.decode_tp = decode_tp;
        setup.decode_pp = decode_pp;
        if (decodes) {  // every other one is pushed
          setup.disagg_options.pull = turn % 4 == 2;
          setup.disagg = turn % 4 == 3 ? "decode_first" : "prefill_first";
        }
        // Four ranks hold each of the two heads twice.
        setup.pool_bytes = 4 << 20;
        INFO(setup.describe());
        const RaggedRun run = run_ragged(setup);
        REQUIRE(run.hash == expected);
        hits += run.hit_tokens;
        ++ran;
      }
  for (const auto& m : memories) {
    INFO(m.scheme << " share " << int(m.share));
    const bool reuses = std::string(m.scheme) != "contiguous" && std::string(m.scheme) != "slots";
    if (reuses && kStride == 1) CHECK(m.hits > 0);
  }
  std::printf("parity: %d of %d combinations of %s on ranks have the hash %016llx\n", ran, index, topology.c_str(),
              static_cast<unsigned long long>(expected));
}

TEST_CASE("parity: 1C on tensor ranks and pipeline stages", "[parity][shards]") { check_shards_of("1C", false); }
TEST_CASE("parity: 1P1D of unequal shapes", "[parity][shards]") { check_shards_of("1P1D", true); }

TEST_CASE("parity: equal ranks on one pool", "[parity][shards][handoff]") {
  const uint64_t expected = reference_hash();
  int turn = 0;
  for (const char* scheme : {"paged", "token", "contiguous", "slots"})
    for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
      for (auto [tp, pp] : {std::pair(2, 1), {4, 1}, {1, 2}, {2, 2}, {4, 2}})
        for (const char* topology : {"1P1D", "2P2D"}) {
          if (turn++ % kStride != 0) continue;
          TinySetup setup{.topology = topology, .scheme = scheme, .transport = "handoff"};
          setup.order = order;
          setup.disagg = turn % 2 ? "decode_first" : "prefill_first";
          setup.step_tokens = std::vector{7, 64, 512}[size_t(turn % 3)];
          setup.prefill_tp = setup.decode_tp = tp;
          setup.prefill_pp = setup.decode_pp = pp;
          setup.pool_bytes = 4 << 20;
          INFO(setup.describe());
          REQUIRE(run_ragged(setup).hash == expected);
        }
}

// How prompts are cut, by whom and into how many tokens.
TEST_CASE("parity: chunk policies", "[parity][chunks]") {
  const uint64_t expected = reference_hash();
  int turn = 0, ran = 0;
  for (const ChunkPolicy& policy : chunk_policies())
    for (const BatchPolicy& batching : batch_policies())
      for (auto [topology, pp] : {std::pair("1C", 1), {"1C", 2}, {"1P1D", 1}, {"1P1D", 2}, {"2P2D", 1}})
        for (int step : {7, 64, 200})
          for (int request_tokens : {0, 5, 48}) {
            if (turn++ % kStride != 0) continue;
            TinySetup setup{.topology = topology, .batching = batching.name};
            setup.chunk_policy = policy.name;
            setup.chunks.request_tokens = request_tokens;
            setup.chunks.minimum = turn % 3 == 0 ? 8 : 0;
            setup.step_tokens = step;
            setup.block_tokens = turn % 2 ? 16 : 4;
            setup.stream_kv = StreamKv(turn % 3);
            setup.disagg = turn % 4 == 3 ? "decode_first" : "prefill_first";
            setup.prefill_pp = pp;
            INFO(setup.describe() << " request " << request_tokens);
            REQUIRE(run_ragged(setup).hash == expected);
            ++ran;
          }
  std::printf("parity: %d of %d combinations of chunk policies have the hash %016llx\n", ran, turn,
              static_cast<unsigned long long>(expected));
}

TEST_CASE("parity: weights of few bits, exact and with rounded activations", "[parity][quantised]") {
  for (Dtype weights : {Dtype::bf16, Dtype::f16, Dtype::int8, Dtype::int4, Dtype::fp8})
    for (bool exact : {false, true}) {
      const uint64_t expected = run_hash({.topology = "1C",
                                          .scheme = "contiguous",
                                          .batching = "static",
                                          .weight_dtype = weights,
                                          .exact = exact,
                                          .prefix_cache = false,
                                          .step_tokens = 2048});
      int turn = 0;
      for (const char* topology : {"1C", "1P1D"})
        for (const char* scheme : {"paged", "slots", "vattention"})
          for (int step : {7, 64})
            for (int threads : {1, 2}) {
              TinySetup setup{.topology = topology, .scheme = scheme, .batching = "chunked"};
              setup.weight_dtype = weights, setup.exact = exact, setup.step_tokens = step, setup.threads = threads;
              if (turn++ % 3 == 0) setup.prefill_tp = 2, setup.decode_tp = topology[1] == 'P' ? 2 : 1;
              CAPTURE(setup.describe(), dtype_name(weights), exact);
              REQUIRE(run_hash(setup) == expected);
            }
    }
}

TEST_CASE("parity: 1C with 1 thread", "[parity]") { check_all("1C", 1); }
TEST_CASE("parity: 1C with 2 threads", "[parity]") { check_all("1C", 2); }
TEST_CASE("parity: 1P1D with 1 thread", "[parity]") { check_all("1P1D", 1); }
TEST_CASE("parity: 1P1D with 2 threads", "[parity]") { check_all("1P1D", 2); }
TEST_CASE("parity: 2P2D with 1 thread", "[parity]") { check_all("2P2D", 1); }
TEST_CASE("parity: 2P2D with 2 threads", "[parity]") { check_all("2P2D", 2); }

}  // namespace
}  // namespace xpyd::testing::parity_test
