// Which block of a full tier goes first: a pure function from what is known of a block to its rank; the lowest rank
// goes. A tier asks only about blocks that may go: nobody reads them, and no other block of the tier continues them.
// A policy's state lives in what is known of a block, too: sieve's hand is wherever the lowest rank is.
#pragma once

#include <climits>
#include <cstdint>
#include <utility>

namespace xpyd::allocator {

struct BlockUse {
  int64_t last_use = 0;  // a count of the tier's operations: larger is later
  int64_t uses = 0;      // times it was stored or found
  int position = 0;      // blocks before it in its sequences
  int64_t entered = 0;   // its tier, as last_use
  int64_t lap = 0;       // of the hand: that of the block whose turn it was when it entered, and one more when spared
  bool visited = false;  // found since it entered, or was spared
  bool pinned = false;   // goes when nothing else can, whatever the policy (KvMark has these)
  bool awaited = false;  // will be asked for soon
  bool thought = false;  // will not be asked for
};

using EvictionRank = std::pair<int64_t, int64_t>;

struct EvictionPolicy {
  const char* name;
  EvictionRank (*rank)(const BlockUse& use);
  const char* source;
  // Of the block whose turn it is: true if it stays, and has another rank now. Not for ever: after some it says no.
  // Null: it goes.
  bool (*spares)(BlockUse& use) = nullptr;
};

inline EvictionRank lru(const BlockUse& use) { return {use.last_use, 0}; }
inline EvictionRank lfu(const BlockUse& use) { return {use.uses, use.last_use}; }
// The deepest first, the oldest of these: what many prompts share stands at their beginning.
inline EvictionRank length_aware(const BlockUse& use) { return {-int64_t(use.position), use.last_use}; }

inline EvictionRank fifo(const BlockUse& use) { return {use.entered, 0}; }
// The hand goes from the oldest to the newest and begins anew; whom it spares stays where it is in the queue.
inline EvictionRank sieve(const BlockUse& use) { return {use.lap, use.entered}; }
inline bool sieve_spares(BlockUse& use) {
  if (!use.visited) return false;
  use.visited = false;
  ++use.lap;
  return true;
}

// A conversation that a tool will go on with, after all others; a thought, which the next turn does not have, before.
inline EvictionRank ttl(const BlockUse& use) { return {use.awaited, use.last_use}; }
inline EvictionRank no_reasoning(const BlockUse& use) { return {!use.thought, use.last_use}; }

inline constexpr EvictionPolicy kEvictionPolicies[] = {
    {"lru", lru, "Mooncake (FAST'25) section 4.2, table 1: LRUCache"},
    {"lfu", lfu, "Mooncake table 1: LFUCache; among equals the least recently used"},
    {"length_aware", length_aware, "Mooncake table 1: LengthAwareCache"},
    {"fifo", fifo, "Mooncake Store's eviction_strategy.h: FIFOEvictionStrategy"},
    {"sieve", sieve, "SIEVE (NSDI'24), algorithm 1", sieve_spares},
    {"ttl", ttl, "Continuum (arXiv 2511.02230), KVFlow (NeurIPS'25): lru, but what a tool's pause ends goes last"},
    {"no_reasoning", no_reasoning, "SAECache: thoughts are hardly asked for again; lru, but they go first"},
};

inline EvictionRank rank_of(const EvictionPolicy& policy, const BlockUse& use) {
  return use.pinned ? EvictionRank{INT64_MAX, use.last_use} : policy.rank(use);
}

}  // namespace xpyd::allocator
