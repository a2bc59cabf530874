#include "base/memory.h"

#include <cstdint>

#include "tests/catch.h"

namespace xpyd::testing::memory_test {

TEST_CASE("a buffer is zeroed, page aligned, writable to its last byte and does not move", "[base][memory]") {
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
  }
}

TEST_CASE("assigning a buffer frees the old one once", "[base][memory]") {
  Buffer a(100), b(200);
  std::byte* second = b.data();
  a = std::move(b);
  REQUIRE(a.data() == second);
  REQUIRE(a.size() == 200);
  a = Buffer();
  REQUIRE(a.data() == nullptr);
  REQUIRE(Buffer(0).data() == nullptr);
}

}  // namespace xpyd::testing::memory_test
