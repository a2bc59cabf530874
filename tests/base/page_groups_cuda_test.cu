// Page groups on a card: memory that moves between addresses and keeps its bytes.
#include <cstring>

#include "base/cuda/cuda_vmm.h"
#include "base/device/device_cuda.h"
#include "tests/catch.h"

namespace xpyd::testing {
namespace {

using cuda::vmm::granularity;

struct Words {  // the bytes of one group, on their way
  cuda::Stream stream;
  cuda::Memory host = cuda::Memory::pinned(granularity());
  void put(std::byte* to, int value) {
    std::memset(host.data(), value, host.size());
    cuda::copy(to, host.data(), host.size(), stream);
    stream.wait();
  }
  // The value that all bytes of the group have; -1: they differ.
  int get(const std::byte* from) {
    cuda::copy(host.data(), from, host.size(), stream);
    stream.wait();
    const auto* bytes = host.as<unsigned char>();
    for (size_t i = 1; i < host.size(); ++i)
      if (bytes[i] != bytes[0]) return -1;
    return bytes[0];
  }
};

TEST_CASE("cuda page groups: bytes stay with their group wherever it is mapped", "[cuda][base]") {
  const size_t size = granularity();
  auto device = make_cuda_device();
  auto groups = device->make_page_groups({.group_bytes = size, .n_groups = 6}).value();
  auto one = groups->reserve(8 * size).value(), other = groups->reserve(3 * size + 5).value();
  CHECK(other->bytes() == 3 * size + 5);
  CHECK(reinterpret_cast<uintptr_t>(one->data()) % size == 0);
  Words words;
  REQUIRE(one->map(2 * size, 1, 3));  // groups 1, 2, 3
  for (int i = 0; i < 3; ++i) words.put(one->data() + size_t(2 + i) * size, 10 + i);
  // Group 2 gets a second address, and is written through it.
  REQUIRE(other->map(0, 2, 1));
  CHECK(words.get(other->data()) == 11);
  words.put(other->data(), 77);
  CHECK(words.get(one->data() + 3 * size) == 77);
  // One copy crosses the border of two groups.
  cuda::copy(words.host.data(), one->data() + 2 * size + size / 2, size, words.stream);
  words.stream.wait();
  CHECK(words.host.as<unsigned char>()[0] == 10);
  CHECK(words.host.as<unsigned char>()[size - 1] == 77);
  // Everything leaves the first range. Parts that were not mapped do not matter.
  one->unmap(0, 8);
  CHECK(words.get(other->data()) == 77);
  REQUIRE(one->map(0, 3, 1));
  REQUIRE(one->map(size, 1, 1));
  CHECK(words.get(one->data()) == 12);
  CHECK(words.get(one->data() + size) == 10);
  // Ranges outlive the groups' other owners, and may go in any order.
  groups.reset();
  one.reset();
  CHECK(words.get(other->data()) == 77);
}

TEST_CASE("cuda page groups: a size that the card cannot map is refused", "[cuda][base]") {
  auto device = make_cuda_device();
  for (size_t bytes : {size_t{0}, size_t{4096 + 512}, granularity() + granularity() / 2}) {
    auto groups = device->make_page_groups({.group_bytes = bytes, .n_groups = 1});
    REQUIRE_FALSE(groups);
    CHECK(groups.error().code == ErrorCode::invalid_argument);
    CHECK(groups.error().message.find("page-group-bytes is " + std::to_string(bytes)) == 0);
    CHECK(groups.error().message.find(std::to_string(granularity())) != std::string::npos);
  }
}

}  // namespace
}  // namespace xpyd::testing
