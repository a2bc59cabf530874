#include "base/memory.h"

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "base/device/device.h"
#include "tests/catch.h"
#include "tests/matchers.h"

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

namespace {

// The kernel's flags for the mapping around `at`: "hg" if huge pages are asked for, "nh" if they are refused.
std::string mapping_flags(const void* at) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  for (unsigned long begin, end; std::getline(maps, line);) {
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
      inside = begin <= reinterpret_cast<uintptr_t>(at) && reinterpret_cast<uintptr_t>(at) < end;
    if (inside && line.rfind("VmFlags:", 0) == 0) return line + " ";
  }
  return "";
}

struct Chosen {
  explicit Chosen(HugePages pages) { use_huge_pages(pages); }
  ~Chosen() { use_huge_pages(HugePages::transparent); }
};

constexpr size_t kLarge = size_t(8) << 20;

}  // namespace

TEST_CASE("the kernel is asked for the chosen kind of pages", "[base][memory][pages]") {
  for (auto [pages, flag] : {std::pair{HugePages::off, " nh "}, {HugePages::transparent, " hg "}}) {
    const Chosen chosen(pages);
    const auto pool = cpu_device().allocate(kLarge);
    REQUIRE(pool.ok());
    CHECK_THAT(mapping_flags(pool.value().get()), Contains(flag));
    const Buffer buffer(kLarge);
    CHECK_THAT(mapping_flags(buffer.data()), Contains(flag));
  }
}

}  // namespace xpyd::testing::memory_test
