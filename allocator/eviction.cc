#include "allocator/eviction.h"

#include "base/table.h"

namespace xpyd::allocator {
namespace {

EvictionRank lru(const BlockUse& use) { return {use.last_use, 0}; }
EvictionRank lfu(const BlockUse& use) { return {use.uses, use.last_use}; }
// The deepest first, the oldest of these: what many prompts share stands at their beginning.
EvictionRank length_aware(const BlockUse& use) { return {-int64_t(use.position), use.last_use}; }

constexpr EvictionPolicy kPolicies[] = {
    {"lru", lru, "Mooncake (FAST'25) section 4.2, table 1: LRUCache"},
    {"lfu", lfu, "Mooncake table 1: LFUCache; among equals the least recently used"},
    {"length_aware", length_aware, "Mooncake table 1: LengthAwareCache"},
};

}  // namespace

std::span<const EvictionPolicy> eviction_policies() { return kPolicies; }

const EvictionPolicy* find_eviction_policy(std::string_view name) { return find_row(kPolicies, name); }

}  // namespace xpyd::allocator
