// The cluster's secret, and what is made of it: HMAC-SHA256 (RFC 2104, FIPS 180-4) by libnettle.
//
// Thread safety: plain functions and values.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace xpyd {

using Sha256 = std::array<uint8_t, 32>;

Sha256 hmac_sha256(std::string_view key, std::string_view message);

// In a time that does not depend on where they differ.
bool equal_in_constant_time(const Sha256& a, const Sha256& b);

// From the kernel's generator.
void fill_random(void* bytes, size_t n);

inline constexpr size_t kMinClusterKeyBytes = 16;
inline constexpr size_t kMaxClusterKeyBytes = 4096;

// Whoever holds the same key is a member of the cluster.
class ClusterKey {
 public:
  // No secret: channels still check who they speak to and what version, but any local user could
  // be a member. Refused beyond this host (channel.h).
  ClusterKey() = default;
  // The file's bytes without line ends at its end, 16 to 4,096 of them. A file that others than its
  // owner and group may open, or that its group may write, is refused.
  static Result<ClusterKey> from_file(const std::string& path);
  // For workers that this process forks, and tests.
  static ClusterKey random();

  bool secret() const { return !bytes_.empty(); }
  std::string_view bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

}  // namespace xpyd
