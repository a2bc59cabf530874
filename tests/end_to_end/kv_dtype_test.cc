// Parity of KV in each of its dtypes: one logits hash for each, whatever manages
// memory, schedules, splits and moves. A sample of the matrix of parity_test.cc.
#include <cstdio>
#include <set>

#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::kv_dtype_test {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kStride = 353;
#else
constexpr int kStride = 43;
#endif

uint64_t plain_hash(Dtype dtype) {
  TinySetup setup{
      .topology = "1C", .scheme = "contiguous", .batching = "static", .prefix_cache = false, .step_tokens = 2048};
  setup.kv_dtype = dtype;
  return run_ragged(setup).hash;
}

TEST_CASE("parity: one hash for each dtype of KV", "[parity]") {
  struct Memory {
    const char* scheme;
    int block_tokens;
  };
  int index = 0, ran = 0;
  std::set<uint64_t> hashes = {plain_hash(Dtype::f32)};
  for (Dtype dtype : kKvDtypes) {
    if (dtype == Dtype::f32) continue;  // parity_test.cc
    const uint64_t expected = plain_hash(dtype);
    CHECK(hashes.insert(expected).second);  // it is that dtype
    std::set<std::string> seen;
    for (const char* topology : {"1C", "1P1D", "2P2D"})
      for (auto [scheme, block] :
           {Memory{"contiguous", 16}, {"paged", 1}, {"paged", 16}, {"paged", 64}, {"token", 1}, {"vattention", 64}})
        for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
          for (auto [batching, step] :
               {std::pair("static", 2048), {"prefill_first", 2048}, {"chunked", 7}, {"chunked", 64}})
            for (const char* transport : {"local", "handoff"})
              for (StreamKv stream : {StreamKv::layer, StreamKv::chunk, StreamKv::request})
                for (bool prefix : {false, true}) {
                  if (index++ % kStride != 0) continue;
                  TinySetup setup{.topology = topology, .scheme = scheme, .batching = batching};
                  setup.transport = transport;
                  setup.order = order;
                  setup.kv_dtype = dtype;
                  setup.stream_kv = stream;
                  setup.block_tokens = block;
                  setup.prefix_cache = prefix;
                  setup.step_tokens = step;
                  setup.threads = 1 + index % 2;
                  setup.pool_bytes = scheme == std::string("contiguous") ? 3 << 20 : 1 << 19;
                  INFO(setup.describe());
                  REQUIRE(run_ragged(setup).hash == expected);
                  seen.insert({std::string(scheme) + std::to_string(block), transport, batching});
                  ++ran;
                }
    CHECK(seen.size() >= (kStride == 43 ? 11 : 6));  // memories, wires, policies
  }
  std::printf("parity: %d of %d combinations with KV in bf16, int8, int4 and fp8 have their hash\n", ran, index);
}

}  // namespace
}  // namespace xpyd::testing::kv_dtype_test
