// The chained hash that names a block of tokens after a prefix. It is the same in a pool, in the offload tiers, and
// for an external router (Mooncake RFC #1527, which Dynamo's router shares):
//   local[i] = XXH3_64(tokens of block i, little-endian u32),  seq[0] = local[0],
//   seq[i] = XXH3_64(seq[i-1] || local[i]);  a salt other than 0 enters as seq[-1] = salt.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace xpyd::allocator {

// Returns seq[i] of one block that follows `before`. If it is the first block, `before` is the salt.
uint64_t prefix_hash(uint64_t before, bool first, const int32_t* tokens, int block_tokens);

// Returns seq[] of the full blocks of `tokens`.
std::vector<uint64_t> prefix_hashes(std::span<const int32_t> tokens, int block_tokens, uint64_t salt);

}  // namespace xpyd::allocator
