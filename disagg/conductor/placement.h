// Placement policies: which instance prefills a request and which one decodes it. Pure functions over a snapshot of the
// cluster; randomness is an argument. One view serves every rule: what other routers count, in their units, and what
// ours predict, in seconds.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "disagg/service.h"

namespace xpyd::disagg {

// One instance as a policy sees it.
struct InstanceView {
  Role role = Role::colocated;
  // Counted.
  int queued = 0;                // prompts placed here and not done
  int64_t queued_tokens = 0;     // of them, to be computed
  int sequences = 0;             // placed here to decode and not ended
  int64_t context_tokens = 0;    // of them, KV
  int64_t available_tokens = 0;  // of KV: free or evictable
  int64_t capacity_tokens = 0;
  int64_t indexed_tokens = 0;  // in its prefix cache
  int64_t recent_tokens = 0;   // computed or queued here of the prompts of the last three minutes
  int cached_tokens = 0;       // of this prompt, in its prefix cache,
  int host_tokens = 0;         // … beyond these in its host tier,
  int disk_tokens = 0;         // … and beyond those on its disk
  // Predicted, in seconds (disagg/conductor/scoreboard.h).
  double queue_s = 0;            // until it would begin this prompt
  double prefill_s = 0;          // this prompt, with cached_tokens
  double fetch_s = 0;            // what the best holder has and this one has not, from there to here; kNever: cannot
  double fetched_prefill_s = 0;  // this prompt, once that is here
  double step_s = 0, step_with_s = 0;  // a decode step now, and with this request

  int load() const { return queued + sequences; }
  int held_tokens() const { return cached_tokens + host_tokens + disk_tokens; }  // not to be computed
};

inline constexpr double kNever = 1e300;  // seconds: never, or nobody asks (JSON has no infinity)

// What a client wants of a request; kNever: nothing.
struct Objectives {
  double ttft_s, tbt_s;
  bool operator==(const Objectives&) const = default;
};
inline constexpr Objectives kNoObjectives = {kNever, kNever};

struct ClusterView {
  std::span<const InstanceView> instances;
  int prompt_tokens = 0;
  int block_tokens = 16;
  Objectives objectives = kNoObjectives;
  uint64_t number = 0;  // of this request, counted from 0
  uint64_t random = 0;  // fresh for each request, from a seeded generator
};

struct Placement {
  int prefill = -1;  // index into instances
  int decode = -1;   // the same index for a colocated instance
  int source = -1;   // who sends the prefill instance its prefix first; -1: nobody
  bool operator==(const Placement&) const = default;
};

// Constants of the rules that a command line may change.
struct PlacementOptions {
  double fetch_threshold = 1.5;  // mooncake: fetch where the best hit is so many times the one here
};

struct PlacementPolicy {
  const char* name;
  Placement (*place)(const ClusterView& view, const PlacementOptions& options);
  bool predicts;          // it reads seconds
  const char* constants;  // as published; "" for none
  const char* source;
};

std::span<const PlacementPolicy> placement_policies();
const PlacementPolicy* find_placement_policy(std::string_view name);  // null: no such policy

// Of the tokens that this choice makes somebody compute, the share that another choice would have found: lost / (novel
// + lost), where lost is the best hit minus the chosen one's, novel what nobody has (Dynamo, KV locality metrics). 0
// where nothing is computed.
double regret_ratio(const ClusterView& view, int prefill);

}  // namespace xpyd::disagg
