// Placement policies choose the instance that prefills a request and the one that decodes it. They are pure functions
// of a snapshot of the cluster, and randomness is an argument. All policies read the same view: counts, as other
// routers use them, and predictions in seconds.
//
// Disaggregation policies decide the order of prefill and decode, which is one for a whole cluster
// (disagg/handover/kv_room.h says why), and for each request whether its prompt stays on the decode instance.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "disagg/messages.h"

namespace xpyd::disagg {

// One instance as a policy sees it.
struct InstanceView {
  Role role = Role::colocated;
  // Counts.
  int queued = 0;                // prompts placed here and not done
  int64_t queued_tokens = 0;     // of these prompts, to be computed
  int sequences = 0;             // placed here to decode, not ended
  int64_t context_tokens = 0;    // KV tokens of these sequences
  int64_t available_tokens = 0;  // KV tokens that are free or evictable
  int64_t capacity_tokens = 0;
  int64_t indexed_tokens = 0;  // tokens in its prefix cache
  int cached_tokens = 0;       // this prompt's tokens in its prefix cache,
  int host_tokens = 0;         // … in its host tier, after these,
  int disk_tokens = 0;         // … and on its disk, after those
  // Predictions in seconds (disagg/conductor/cluster_state.h).
  double queue_s = 0;                  // until it would begin this prompt
  double prefill_s = 0;                // computing this prompt, with what it holds of it
  double fetch_s = 0;                  // fetching what the best holder has beyond this one; kNever: impossible
  double fetched_prefill_s = 0;        // computing this prompt after that fetch
  double step_s = 0, step_with_s = 0;  // a decode step now; with this request added

  int load() const { return queued + sequences; }
  int held_tokens() const { return cached_tokens + host_tokens + disk_tokens; }  // need not be computed
};

inline constexpr double kNever = 1e300;  // seconds: never, or not wanted (JSON has no infinity)

// Latency objectives of a request, in seconds; kNever: none.
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
  uint64_t number = 0;  // of this request, from 0
  uint64_t random = 0;  // new for each request, from a seeded generator
};

struct Placement {
  int prefill = -1;  // index into instances
  int decode = -1;   // the same index for a colocated instance
  int source = -1;   // the instance that lends the prefix; -1: none
  bool operator==(const Placement&) const = default;
};

// Constants of policies that the command line sets.
struct PlacementOptions {
  double fetch_threshold = 1.5;  // mooncake: the best hit must be this many times the local one
};

struct PlacementPolicy {
  const char* name;
  Placement (*place)(const ClusterView& view, const PlacementOptions& options);
  bool predicts;  // reads the predictions in seconds
  const char* source;
};

std::span<const PlacementPolicy> placement_policies();
const PlacementPolicy* find_placement_policy(std::string_view name);  // null: no such policy

// ---- The order of prefill and decode.

struct DisaggOptions {
  bool pull = false;                    // if P computes first: D reads, instead of P writing
  int max_local_prefill_tokens = 1000;  // conditional_threshold: at most so many uncached tokens stay on D,
  int max_prefill_queue = 2;            // … and any prompt if at least so many jobs wait
};

// One request and its decode instance D, as a policy sees them.
struct DisaggView {
  int tokens = 0;         // to be computed or found
  int cached_decode = 0;  // of these, D has so many
  int prefill_jobs = 0;   // waiting in the global queue
  // Predicted seconds of a step of D that has the whole prompt beside its batch; kNever: one step does not hold it.
  double joined_step_s = kNever;
  double tbt_s = kNever;  // the request's objective; kNever: none
};

struct DisaggPolicy {
  const char* name;
  DisaggOrder (*remote)(const DisaggOptions& options);                  // the order of all prompts that do not stay
  bool (*stays)(const DisaggView& view, const DisaggOptions& options);  // D computes this prompt; null: never
  const char* source;
  DisaggOrder decide(const DisaggView& view, const DisaggOptions& options) const {
    return stays && stays(view, options) ? DisaggOrder::local : remote(options);
  }
};

std::span<const DisaggPolicy> disagg_policies();
const DisaggPolicy* find_disagg_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
