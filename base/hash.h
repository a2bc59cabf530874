// XXH3-64 of bytes, chained by seed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xpyd {

uint64_t hash_bytes(const void* data, size_t bytes, uint64_t seed = 0);

}  // namespace xpyd
