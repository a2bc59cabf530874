// The name of a block of tokens after a prefix, the same in a pool, in the tiers below it, and for a router outside
// (Mooncake RFC #1527, which Dynamo's router shares):
//   local[i] = XXH3_64(tokens of block i, little-endian u32),  seq[0] = local[0],
//   seq[i] = XXH3_64(seq[i-1] || local[i]);  a salt other than 0 enters as seq[-1] = salt.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace xpyd::allocator {

// seq[i] of one block that follows `before` (the salt, if it is the first).
uint64_t prefix_hash(uint64_t before, bool first, const int32_t* tokens, int block_tokens);

// seq[] of the full blocks of `tokens`.
std::vector<uint64_t> prefix_hashes(std::span<const int32_t> tokens, int block_tokens, uint64_t salt);

}  // namespace xpyd::allocator
