// One logits hash, whatever the number of stages, the waves under way, who cuts prompts into chunks, and how KV leaves
// them.
#include <cstdlib>

#include "base/random.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::waves_parity_test {
namespace {

template <class T, size_t n>
T one_of(Random& random, const T (&all)[n]) {
  return all[random.below(n)];
}

TinySetup draw(Random& random) {
  constexpr int kAll = 1 << 10;  // waves: more than there are chunks
  TinySetup s{.layers = 4};
  s.topology = one_of(random, {"1C", "1P1D", "2P2D", "2C1P1D"});
  s.scheme = one_of(random, {"paged", "paged", "token", "contiguous", "slots", "vattention"});
  s.order = one_of(random, {KvOrder::layer_major, KvOrder::token_major});
  if (s.scheme == "vattention") s.share = one_of(random, {KvShare::off, KvShare::alias, KvShare::copy});
  s.batching = one_of(random, {"chunked", "chunked", "prefill_first", "persistent", "static"});
  s.prefill_pp = one_of(random, {1, 2, 4});
  s.decode_pp = one_of(random, {1, 2, 4});
  s.prefill_tp = one_of(random, {1, 1, 2});
  s.decode_tp = one_of(random, {1, 1, 2});
  const int stages = std::max(s.prefill_pp, s.decode_pp);
  s.window = one_of(random, {1, stages, 2 * stages, kAll});
  s.transport = one_of(random, {"local", "local", "shm", "tcp", "handoff"});
  s.stream_kv = one_of(random, {StreamKv::layer, StreamKv::chunk, StreamKv::request});
  s.step_tokens = one_of(random, {7, 16, 33, 64, 512});
  s.block_tokens = one_of(random, {1, 4, 16, 64});
  s.max_batch = one_of(random, {3, 16});
  s.chunk_policy = one_of(random, {"fixed", "equal_time"});
  s.prefix_cache = random.below(4) != 0;
  if (s.topology != std::string("1C")) {
    s.disagg = one_of(random, {"prefill_first", "prefill_first", "decode_first"});
    s.disagg_options.pull = s.disagg == "prefill_first" && random.below(3) == 0;
  }
  if (s.transport == "shm" && s.scheme == "vattention") s.transport = "tcp";  // its pages are in no memory file
  if (s.transport == "handoff") {  // one pool: instances of one shape, and nothing is read
    s.disagg_options.pull = false;
    s.decode_pp = s.prefill_pp, s.decode_tp = s.prefill_tp;
    if (s.scheme == "vattention" && s.prefill_pp * s.prefill_tp > 1) s.transport = "local";
  }
  s.pool_bytes = 8 << 20;
  return s;
}

// Of the same prompts on one stage, a step at a time.
uint64_t expected() {
  static const uint64_t hash = run_ragged({.layers = 4,
                                           .topology = "1C",
                                           .scheme = "contiguous",
                                           .batching = "static",
                                           .prefix_cache = false,
                                           .step_tokens = 2048})
                                   .hash;
  return hash;
}

void compare(uint64_t first, uint64_t end) {
  int waves = 0;
  for (uint64_t seed = first; seed < end; ++seed) {
    Random random(seed);
    const TinySetup setup = draw(random);
    INFO("seed " << seed << " " << setup.describe());
    REQUIRE(run_ragged(setup).hash == expected());
    waves += (setup.prefill_pp > 1 || setup.decode_pp > 1) && setup.window > 1;
  }
  CHECK(waves > int(end - first) / 3);
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kSome = 40;
#else
constexpr uint64_t kSome = 400;
#endif

TEST_CASE("parity: stages, waves, wires and memories, drawn", "[parity][waves]") { compare(0, kSome); }

// `make check` draws them all.
TEST_CASE("parity: two thousand of them", "[.][all-waves]") {
  const char* seeds = std::getenv("SEEDS");
  compare(0, seeds ? std::strtoull(seeds, nullptr, 10) : 2000);
}

}  // namespace
}  // namespace xpyd::testing::waves_parity_test
