// Which block of a full tier goes first: a pure function from what is known of a block to its rank; the lowest rank
// goes. A tier asks only about blocks that may go: nobody reads them, and no other block of the tier continues them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

namespace xpyd::allocator {

struct BlockUse {
  int64_t last_use = 0;  // a count of the tier's operations: larger is later
  int64_t uses = 0;      // times it was stored or found
  int position = 0;      // blocks before it in its sequences
};

using EvictionRank = std::pair<int64_t, int64_t>;

struct EvictionPolicy {
  const char* name;
  EvictionRank (*rank)(const BlockUse& use);
  const char* source;
};

std::span<const EvictionPolicy> eviction_policies();
const EvictionPolicy* find_eviction_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::allocator
