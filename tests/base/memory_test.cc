#include "base/memory.h"

#include <cstdint>

#include "tests/catch.h"

namespace xpyd::testing::memory_test {

TEST_CASE("a buffer is zeroed, page aligned and writable to its last byte, and does not move", "[base][memory]") {
  for (size_t bytes : {size_t(1), size_t(4096), size_t(4097), size_t(3) << 20}) {
    Buffer buffer(bytes);
    REQUIRE(buffer.size() == bytes);
    REQUIRE(reinterpret_cast<uintptr_t>(buffer.data()) % 4096 == 0);
    size_t nonzero = 0;
    for (size_t i = 0; i < bytes; ++i) nonzero += buffer.as<uint8_t>()[i] != 0;
    REQUIRE(nonzero == 0);
    buffer.as<uint8_t>()[bytes - 1] = 7;
    std::byte* where = buffer.data();
    Buffer moved(std::move(buffer));
    REQUIRE(moved.data() == where);
    REQUIRE(moved.as<uint8_t>()[bytes - 1] == 7);
    REQUIRE(buffer.data() == nullptr);  // NOLINT: a moved-from buffer is empty
    REQUIRE(buffer.size() == 0);
    moved = Buffer(200);
    REQUIRE(moved.size() == 200);
  }
  REQUIRE(Buffer(0).data() == nullptr);
}

}  // namespace xpyd::testing::memory_test
