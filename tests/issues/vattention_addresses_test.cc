// `xpyd info` refused the vAttention paper's own example (Yi-34B: 60 layers, 8 KV heads of 128, a context of 200,000
// tokens, batch 500: 120 buffers of 100 GB). It counted twice the batch, and had addresses for 2^32 rows of one head.
#include <cstring>

#include "allocator/kv_memory.h"
#include "allocator/kv_pool.h"
#include "allocator/schemes.h"
#include "tests/catch.h"

namespace xpyd::testing::vattention_addresses_test {

TEST_CASE("vattention serves the paper's Yi-34B example: KV in the last of a thousand slots is right",
          "[allocator][vattention]") {
#if defined(__SANITIZE_THREAD__)
  SKIP_TEST("ThreadSanitizer leaves a program no 24 TB of addresses");
#endif
  KvOptions o;
  o.shape = {60, 4, 128, Dtype::bf16};
  o.max_sequence_tokens = 200000;
  o.vattention.max_sequences = 1000;  // twice the batch
  o.pool_bytes = size_t(64) << 20;
  o.vattention.share = KvShare::off;
  auto pool = make_block_pool("vattention", o);
  INFO((pool ? "" : pool.error().message));
  REQUIRE(pool);
  auto memory = find_kv_scheme("vattention")->make(std::move(pool).value(), o);
  CHECK(double(memory->layout().pool_bytes()) >= 24.5e12);
  // Reserves slots of short sequences until one lies behind 2^32 rows of one head of the layers before it.
  const std::vector<int32_t> tokens(3, 7);
  std::vector<KvHandle> handles;
  for (int i = 0; i < 8; ++i) {
    auto reserved = memory->reserve(tokens, 0);
    REQUIRE(reserved);
    handles.push_back(reserved.value().handle);
    REQUIRE(memory->append(handles.back(), 3));
  }
  for (const bool write : {true, false}) {
    int mark = 0, there = 0;
    for (KvHandle handle : handles)
      for (int row = 0; row < 60 * 2 * 4; ++row, ++mark) {
        std::byte* at = memory->view(handle).row(row / 8, row / 4 % 2, 2, row % 4);
        if (write) std::memcpy(at, &mark, sizeof mark);
        std::memcpy(&there, at, sizeof there);
        REQUIRE(there == mark);
      }
  }
  const std::byte* last = memory->view(handles[7]).row(59, 1, 2, 3);
  CHECK(size_t(last - memory->base()) / o.shape.row_bytes() > size_t(1) << 32);
  for (KvHandle handle : handles) memory->free(handle);
  memory->check_invariants(true);
}

}  // namespace xpyd::testing::vattention_addresses_test
