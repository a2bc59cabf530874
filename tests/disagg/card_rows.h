// kv_fixture.h's rows in a card's memory. The card's copies write and compare them.
#pragma once

#include <cstring>

#include "base/cuda/cuda.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing {

// Writes or compares rows, and returns how many are wrong.
inline int rows_on_card(const KvMemory& kv, KvHandle handle, std::span<const int32_t> tokens, int begin, bool write) {
  cuda::Stream stream;
  cuda::Memory host = cuda::Memory::pinned(kTinyShape.row_bytes());
  int wrong = 0;
  each_row(kv.view(handle), tokens, 0, begin, [&](std::byte* row, uint64_t pattern) {
    if (write) std::memcpy(host.data(), &pattern, sizeof pattern);
    cuda::copy(write ? row : host.data(), write ? host.data() : row, sizeof pattern, stream);
    stream.wait();
    wrong += std::memcmp(host.data(), &pattern, sizeof pattern) != 0;
  });
  return wrong;
}

inline KvHandle fill_on_card(KvMemory& kv, std::span<const int32_t> tokens) {
  const KvHandle handle = kv.reserve(tokens, 0).value().handle;
  REQUIRE(kv.append(handle, int(tokens.size())));
  rows_on_card(kv, handle, tokens, 0, true);
  kv.commit(handle, tokens);
  return handle;
}

}  // namespace xpyd::testing
