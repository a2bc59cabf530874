// Placement policies: which instance prefills a request and which one decodes it. Pure functions
// over a snapshot of the cluster; randomness is an argument.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace xpyd::disagg {

enum class Role : uint8_t { prefill, decode, colocated };

// One instance as a policy sees it.
struct InstanceView {
  Role role = Role::colocated;
  int64_t queued_tokens = 0;  // uncached tokens of prompts placed here and not yet done
  int sequences = 0;          // placed here to decode and not yet ended
  int available_blocks = 0;   // free or evictable
  int cached_tokens = 0;      // of this request's prompt, in this instance's prefix cache
};

struct ClusterView {
  std::span<const InstanceView> instances;
  int prompt_tokens = 0;
  uint64_t random = 0;  // fresh for each request, from a seeded generator
};

struct Placement {
  int prefill = -1;  // index into instances
  int decode = -1;   // the same index for a colocated instance
  bool operator==(const Placement&) const = default;
};

struct PlacementPolicy {
  const char* name;
  Placement (*place)(const ClusterView& view);
  const char* source;
};

std::span<const PlacementPolicy> placement_policies();
const PlacementPolicy* find_placement_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
