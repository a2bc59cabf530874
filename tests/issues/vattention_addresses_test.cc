// `xpyd info` refused the vAttention paper's own example (Yi-34B: 60 layers, 8 KV heads of 128, a context of 200,000
// tokens, batch 500: 120 buffers of 100 GB). It counted twice the batch, and had addresses for 2^32 rows of one head.
#include <cstring>

#include "allocator/kv_memory.h"
#include "allocator/kv_pool.h"
#include "allocator/schemes.h"
#include "tests/catch.h"

namespace xpyd::testing::vattention_addresses_test {
namespace {

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
  auto fill = [&](bool write) {
    for (size_t i = 0; i < handles.size(); ++i)
      for (int layer = 0; layer < 60; ++layer)
        for (int kv = 0; kv < 2; ++kv)
          for (int head = 0; head < 4; ++head) {
            std::byte* row = memory->view(handles[i]).row(layer, kv, 2, head);
            const int mark = int(((i * 60 + size_t(layer)) * 2 + size_t(kv)) * 4 + size_t(head));
            if (write) {
              std::memcpy(row, &mark, sizeof mark);
            } else {
              int there = 0;
              std::memcpy(&there, row, sizeof there);
              REQUIRE(there == mark);
            }
          }
  };
  fill(true);
  fill(false);
  const std::byte* last = memory->view(handles[7]).row(59, 1, 2, 3);
  CHECK(size_t(last - memory->base()) / o.shape.row_bytes() > size_t(1) << 32);
  for (KvHandle handle : handles) memory->free(handle);
  memory->check_invariants(true);
}

}  // namespace
}  // namespace xpyd::testing::vattention_addresses_test
