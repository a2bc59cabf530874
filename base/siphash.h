// SipHash-2-4 (Aumasson and Bernstein, 2012): a keyed hash for text that clients choose. Without the key no client can
// construct two cache salts that collide, and so read another tenant's cached prefix.
//
// Thread safety: plain functions.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace xpyd {

struct SipKey {
  uint64_t k0 = 0, k1 = 0;
};

inline uint64_t siphash(const SipKey& key, std::string_view text) {
  uint64_t v0 = key.k0 ^ 0x736f6d6570736575u, v1 = key.k1 ^ 0x646f72616e646f6du;
  uint64_t v2 = key.k0 ^ 0x6c7967656e657261u, v3 = key.k1 ^ 0x7465646279746573u;
  auto rounds = [&](int n) {
    for (int i = 0; i < n; ++i) {
      v0 += v1, v1 = std::rotl(v1, 13) ^ v0, v0 = std::rotl(v0, 32);
      v2 += v3, v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3, v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1, v1 = std::rotl(v1, 17) ^ v2, v2 = std::rotl(v2, 32);
    }
  };
  auto mix = [&](uint64_t m) {
    v3 ^= m;
    rounds(2);
    v0 ^= m;
  };
  uint64_t length = uint64_t{text.size()} << 56;
  for (; text.size() >= 8; text.remove_prefix(8)) {
    uint64_t m;
    std::memcpy(&m, text.data(), 8);
    mix(m);
  }
  uint64_t tail = 0;
  if (!text.empty()) std::memcpy(&tail, text.data(), text.size());
  mix(length | tail);
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

}  // namespace xpyd
