// The eviction policies of a full offload tier. A policy is a pure function from the use of a block to its rank, and
// the block with the lowest rank goes first. An offload tier asks only about blocks that nobody reads and that none of
// its other blocks continues.
#pragma once

#include <cstdint>
#include <utility>

namespace xpyd::allocator {

struct BlockUse {
  int64_t last_use = 0;  // in operations of the offload tier: larger is later
  int64_t uses = 0;      // times it was stored or found
  int position = 0;      // blocks before it in its sequences
  int64_t entered = 0;   // when it entered its offload tier, in operations
};

using EvictionRank = std::pair<int64_t, int64_t>;

struct EvictionPolicy {
  const char* name;
  EvictionRank (*rank)(const BlockUse& use);
  const char* source;
};

inline EvictionRank lru(const BlockUse& use) { return {use.last_use, 0}; }
inline EvictionRank lfu(const BlockUse& use) { return {use.uses, use.last_use}; }
// The deepest block first, and the oldest of these, because many prompts share their beginnings.
inline EvictionRank length_aware(const BlockUse& use) { return {-int64_t(use.position), use.last_use}; }
inline EvictionRank fifo(const BlockUse& use) { return {use.entered, 0}; }

inline constexpr EvictionPolicy kEvictionPolicies[] = {
    {"lru", lru, "Mooncake (FAST'25) section 4.2, table 1: LRUCache"},
    {"lfu", lfu, "Mooncake table 1: LFUCache; among equals the least recently used"},
    {"length_aware", length_aware, "Mooncake table 1: LengthAwareCache"},
    {"fifo", fifo, "Mooncake Store's eviction_strategy.h: FIFOEvictionStrategy"},
};

}  // namespace xpyd::allocator
