// Feeds bytes as they may come from an admitted peer to the receiving half of the tcp transport, without sockets. No
// input may crash, allocate without bound, or change a byte outside the one open registration. The first byte chooses
// how the input is cut.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "disagg/transport/tcp/tcp_frames.h"

namespace xpyd::testing {
using namespace tcp;
namespace {

constexpr size_t kMemory = 1 << 16, kBegin = 4096, kBytes = 8192;

int run(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t step = data[0] == 0 ? size : data[0];
  ++data, --size;
  // The address is fixed, so the fuzzer can name it: frames hold addresses.
  alignas(64) static std::byte memory[kMemory];
  std::memset(memory, 0x5a, sizeof memory);
  const MemoryRange region(memory);
  RegistrationTable registrations({&region, 1});
  registrations.connect(1);
  const MemoryRange range = region.subspan(kBegin, kBytes);
  const RemoteKey key = registrations.open(1, KvOp::write, {&range, 1}).value();
  XPYD_CHECK(key.index == 0 && key.generation == 1);
  InboundReader reader(registrations, std::make_shared<InboundSession>(1, registrations));

  // The input is used as it is, but offsets of the memory become addresses in it.
  std::vector<uint8_t> bytes(data, data + size);
  for (size_t at = 0; at + sizeof(FrameHead) <= size;) {
    FrameHead head;
    std::memcpy(&head, bytes.data() + at, sizeof head);
    if (head.magic != FrameHead::kMagic) break;
    at += sizeof head;
    if (head.type == FrameType::abandon) continue;
    for (int i = 0; i < head.n_ranges && at + sizeof(AddressRange) <= size; ++i) {
      AddressRange there;
      std::memcpy(&there, bytes.data() + at, sizeof there);
      there.begin += reinterpret_cast<uintptr_t>(memory);
      std::memcpy(bytes.data() + at, &there, sizeof there);
      at += sizeof there;
    }
    if (head.type == FrameType::write) at += head.bytes + sizeof kFrameSeal;
    if (head.bytes > size) break;
  }
  size_t read = 0, answered = 0;
  const auto feed = [&](iovec* where, int n) -> ssize_t {
    size_t took = 0;
    for (int i = 0; i < n && took < step; ++i) {
      const size_t part = std::min({where[i].iov_len, step - took, bytes.size() - read});
      if (part > 0) std::memcpy(where[i].iov_base, bytes.data() + read, part);
      read += part, took += part;
      if (part < where[i].iov_len) break;
    }
    return took > 0 ? ssize_t(took) : -1;
  };
  while (reader.pump(feed) == TcpReader::Outcome::again) {
    for (auto& answer : reader.answers()) {
      for (const iovec& v : answer.ranges) answered += v.iov_len;
      XPYD_CHECK(answer.bytes.size() <= 64);
    }
    XPYD_CHECK(reader.answers().size() <= 1024);
    XPYD_CHECK(answered == 0, "the window is for writes");
    reader.answers().clear();
  }
  for (size_t i = 0; i < kMemory; ++i) XPYD_CHECK(memory[i] == std::byte(0x5a) || (i >= kBegin && i < kBegin + kBytes));
  XPYD_CHECK(registrations.close(key), "nobody is inside any more");
  return 0;
}

}  // namespace
}  // namespace xpyd::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { return xpyd::testing::run(data, size); }
