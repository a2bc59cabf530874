#include "allocator/kv_copy.h"

#include <algorithm>
#include <vector>

#include "base/device.h"
#include "base/random.h"
#include "tests/catch.h"

using namespace xpyd;

TEST_CASE("add_block_copies: these tokens of this block and no other byte", "[allocator]") {
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
    for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      KvLayout src{{3, 2, 5, dtype}, order, 7, 4}, dst = src;
      dst.n_blocks = 6;
      Random random(1);
      for (auto [begin, end] : {std::pair{0, 7}, {0, 1}, {2, 6}, {6, 7}, {3, 3}}) {
        std::vector<std::byte> from(src.pool_bytes()), to(dst.pool_bytes());
        for (std::byte& b : from) b = std::byte(random.next());
        for (std::byte& b : to) b = std::byte(random.next());
        std::vector<std::byte> expected = to;
        for (int layer = 0; layer < 3; ++layer)
          for (int kv = 0; kv < 2; ++kv)
            for (int t = begin; t < end; ++t)
              for (int head = 0; head < 2; ++head)
                std::copy_n(from.begin() + ptrdiff_t(src.offset(2, layer, kv, t, head)),
                            src.shape.row_bytes(),
                            expected.begin() + ptrdiff_t(dst.offset(5, layer, kv, t, head)));
        std::vector<Copy> copies;
        add_block_copies(to.data(), dst, 5, from.data(), src, 2, begin, end, copies);
        cpu_queue().copy(copies, true);
        REQUIRE(to == expected);
      }
    }
}
